"""Scheduling without a model: order, chunks, preemption, and that pages always come back."""

import random

import pytest

from lorry.config import PAGE_SIZE
from lorry.engine.scheduler import Scheduler
from lorry.engine.sequence import Sequence, StepPlan
from lorry.kv.prefix import PagePool
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams


def sequence(name: str, num_prompt: int, max_tokens: int = 1, first: int = 0) -> Sequence:
    tokens = tuple(range(first, first + num_prompt))
    request = EngineRequest(request_id=name, token_ids=tokens, params=SamplingParams())
    return Sequence(request, BASE_SLOT, 0, max_tokens, list(tokens))


def scheduler(num_pages: int, max_running: int = 8, max_step_tokens: int = 64, cache: bool = True) -> Scheduler:
    return Scheduler(PagePool(num_pages, PAGE_SIZE, cache), max_running, max_step_tokens)


def run(scheduler: Scheduler, max_steps: int = 10_000) -> list[str]:
    """Run to the end as the engine does; returns the names in the order in which they ended."""
    ended: list[str] = []
    for _ in range(max_steps):
        plan = scheduler.schedule()
        if not plan.chunks:
            assert not scheduler.has_work
            return ended
        check(scheduler, plan)
        finish(scheduler, plan)
        for chunk in plan.sampling:
            if len(chunk.sequence.output_ids) == chunk.sequence.max_tokens:
                scheduler.remove(chunk.sequence)
                ended.append(chunk.sequence.request_id)
    raise AssertionError("no end")


def finish(scheduler: Scheduler, plan: StepPlan, token: int = 1000) -> None:
    """Launch a plan and read it, with the same token for all."""
    scheduler.launched(plan)
    read(scheduler, plan, token)


def read(scheduler: Scheduler, plan: StepPlan, token: int = 1000) -> list[Sequence]:
    gone = scheduler.landed(plan)
    for chunk in plan.sampling:
        if not chunk.sequence.ended:
            scheduler.append(chunk.sequence, token)
    return gone


def check(scheduler: Scheduler, plan: StepPlan) -> None:
    assert plan.num_tokens <= scheduler._max_step_tokens
    names = [chunk.sequence.request_id for chunk in plan.chunks]
    assert len(set(names)) == len(names)
    for chunk in plan.chunks:
        assert chunk.num_tokens > 0
        assert chunk.start == chunk.sequence.num_computed
        assert len(chunk.sequence.pages) * PAGE_SIZE >= chunk.start + chunk.num_tokens
        assert len(set(chunk.sequence.pages)) == len(chunk.sequence.pages)


def test_a_long_prompt_is_computed_in_chunks_and_samples_once():
    s = scheduler(16, max_step_tokens=48)
    s.add(sequence("a", 100))
    sizes, samples = [], []
    while s.has_work:
        plan = s.schedule()
        sizes.append(plan.num_tokens)
        samples.append(plan.chunks[0].samples)
        finish(s, plan)
        if plan.chunks[0].samples:
            s.remove(plan.chunks[0].sequence)
    assert sizes == [48, 48, 4]
    assert samples == [False, False, True]


def test_decodes_go_on_while_a_prompt_is_prefilled():
    s = scheduler(32, max_step_tokens=32)
    s.add(sequence("short", 4, max_tokens=50))
    finish(s, s.schedule())
    s.add(sequence("long", 200, first=500))
    plan = s.schedule()
    assert [(c.sequence.request_id, c.num_tokens) for c in plan.chunks] == [("short", 1), ("long", 31)]


def test_with_a_third_of_the_pages_everything_ends_in_order_of_arrival():
    num = 12
    s = scheduler(num_pages=num, cache=False)
    for i in range(num):
        s.add(sequence(f"r{i:02}", 10, max_tokens=38, first=100 * i))
    assert run(s) == [f"r{i:02}" for i in range(num)]
    assert s.num_preemptions > 0
    assert s.pool.num_in_use == 0


def test_the_youngest_gives_way_and_returns_first():
    s = scheduler(num_pages=4, cache=False)
    for i, name in enumerate("abc"):
        s.add(sequence(name, PAGE_SIZE, max_tokens=PAGE_SIZE * 2, first=100 * i))
    finish(s, s.schedule())
    plan = s.schedule()
    assert [c.sequence.request_id for c in plan.chunks] == ["a", "b"]
    assert s.num_preemptions == 1
    assert s._waiting[0].request_id == "c"


def test_a_shared_prefix_is_not_computed_again():
    s = scheduler(16)
    s.add(sequence("a", 40))
    finish(s, s.schedule())
    s.add(sequence("b", 40))
    plan = s.schedule()
    b = next(c for c in plan.chunks if c.sequence.request_id == "b")
    assert (b.start, b.num_tokens, b.sequence.num_hit_tokens) == (32, 8, 32)


@pytest.mark.parametrize("seed", range(20))
def test_any_load_ends_with_nothing_lost(seed: int):
    rng = random.Random(seed)
    s = scheduler(rng.randint(6, 20), rng.randint(1, 6), rng.randint(6, 80), cache=rng.random() < 0.5)
    names = [f"r{i}" for i in range(rng.randint(1, 25))]
    for name in names:
        s.add(sequence(name, rng.randint(1, 60), rng.randint(1, 30), first=rng.choice([0, 0, 500])))
    assert sorted(run(s)) == sorted(names)
    assert s.pool.num_in_use == 0


def test_aborting_waiting_and_running_ones_gives_pages_back():
    s = scheduler(4, max_running=1)
    first, second = sequence("a", 30, 9), sequence("b", 30, 9)
    s.add(first)
    s.add(second)
    finish(s, s.schedule())
    s.remove(second)
    s.remove(first)
    assert not s.has_work
    assert s.pool.num_in_use == 0


def decoding(num_pages: int, *sequences: Sequence, **settings) -> Scheduler:
    """A scheduler whose sequences have been prefilled and have one token of output."""
    s = scheduler(num_pages, cache=False, **settings)
    for one in sequences:
        s.add(one)
    finish(s, s.schedule())
    return s


def test_a_pending_token_counts_and_comes_from_the_step_before():
    a, b = sequence("a", 5, 9), sequence("b", PAGE_SIZE - 1, 9)
    s = decoding(8, a, b)
    first = s.schedule()
    assert [(c.start, c.source, c.samples) for c in first.chunks] == [(5, -1, True), (PAGE_SIZE - 1, -1, True)]
    s.launched(first)
    second = s.schedule()
    assert [(c.start, c.num_tokens, c.source, c.samples) for c in second.chunks] == [
        (6, 1, 0, True),
        (PAGE_SIZE, 1, 1, True),
    ]
    assert len(b.pages) == 2
    s.launched(second)
    read(s, first, 7)
    assert (a.token_ids[-1], a.num_pending, a.num_tokens - a.num_computed) == (7, 1, 1)


def test_nothing_is_planned_for_a_sequence_whose_last_token_is_pending():
    a, b = sequence("a", 5, 2), sequence("b", 5, 9)
    s = decoding(8, a, b, max_running=2)
    s.launched(s.schedule())
    s.add(sequence("c", 5, 9))
    plan = s.schedule()
    assert [c.sequence.request_id for c in plan.chunks] == ["b", "c"], "and its place is free already"


def test_nothing_is_preempted_while_a_step_is_in_flight():
    a, b = sequence("a", PAGE_SIZE - 1, 9), sequence("b", PAGE_SIZE - 1, 9, first=100)
    s = decoding(3, a, b)
    first = s.schedule()
    s.launched(first)
    assert s.schedule().chunks == ()
    assert s.num_preemptions == 0
    read(s, first)
    assert [c.sequence.request_id for c in s.schedule().chunks] == ["a"]
    assert s.num_preemptions == 1


def test_pages_of_an_ended_sequence_come_back_with_its_last_step():
    a, b = sequence("a", 5, 9), sequence("b", 5, 9)
    s = decoding(8, a, b)
    first = s.schedule()
    s.launched(first)
    second = s.schedule()
    s.launched(second)
    assert not s.remove(a)
    assert s.pool.num_in_use == 2
    assert read(s, first) == []
    assert s.pool.num_in_use == 2
    assert read(s, second) == [a]
    assert s.pool.num_in_use == 1
    assert s.remove(b)
    assert s.pool.num_in_use == 0


def test_only_known_tokens_reach_the_prefix_cache():
    s = scheduler(8)
    a = sequence("a", PAGE_SIZE - 1, 9)
    s.add(a)
    first = s.schedule()
    s.launched(first)
    second = s.schedule()
    s.launched(second)
    assert a.num_computed == PAGE_SIZE
    assert a.num_cached_pages == 0
    read(s, first, 7)
    assert a.num_cached_pages == 1
    assert s.pool.match(a.adapter_uid, [*range(PAGE_SIZE - 1), 7, 8]).pages == (a.pages[0],)


@pytest.mark.parametrize("seed", range(40))
def test_any_load_with_steps_in_flight_keeps_their_pages(seed: int):
    """Whatever ends or is aborted: a page that a step in flight writes is neither free nor another sequence's."""
    rng = random.Random(seed)
    s = scheduler(rng.randint(6, 20), rng.randint(1, 6), rng.randint(6, 80), cache=rng.random() < 0.5)
    coming = [
        sequence(f"r{i}", rng.randint(1, 60), rng.randint(1, 30), first=rng.choice([0, 0, 500]))
        for i in range(rng.randint(1, 25))
    ]
    waiting, alive, steps = list(coming), set[Sequence](), 0
    flight: tuple[StepPlan, dict[Sequence, list[int]]] | None = None
    while waiting or s.has_work or flight:
        steps += 1
        assert steps < 10_000
        while waiting and rng.random() < 0.4:
            alive.add(waiting[0])
            s.add(waiting.pop(0))
        if alive and rng.random() < 0.05:
            gone = rng.choice(sorted(alive, key=lambda x: x.request_id))
            alive.remove(gone)
            s.remove(gone)
        plan = s.schedule()
        before, flight = flight, None
        if plan.chunks:
            check(s, plan)
            s.launched(plan)
            flight = plan, {c.sequence: c.sequence.pages[c.start // PAGE_SIZE :] for c in plan.chunks}
        writers: dict[int, Sequence] = {}
        for _, written in [f for f in (before, flight) if f]:
            for owner, pages in written.items():
                assert all(writers.setdefault(page, owner) is owner for page in pages), "two write to one page"
                assert all(s.pool._references[page] > 0 for page in pages), "a page that is written is free"
        if before is None:
            continue
        for gone in s.landed(before[0]):
            assert gone.pages == []
        for chunk in before[0].sampling:
            if not chunk.sequence.ended:
                s.append(chunk.sequence, rng.randint(0, 3))
                if chunk.sequence.num_output == chunk.sequence.max_tokens or rng.random() < 0.03:
                    alive.remove(chunk.sequence)
                    s.remove(chunk.sequence)
    assert s.pool.num_in_use == 0
    assert all(x.num_in_flight == 0 and (x.ended or x in alive) for x in coming)
    assert not alive
