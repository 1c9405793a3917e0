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
        scheduler.computed(plan)
        for chunk in [c for c in plan.chunks if c.start + c.num_tokens == len(c.sequence.token_ids)]:
            chunk.sequence.token_ids.append(1000)
            if len(chunk.sequence.output_ids) == chunk.sequence.max_tokens:
                scheduler.remove(chunk.sequence)
                ended.append(chunk.sequence.request_id)
    raise AssertionError("no end")


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
        s.computed(plan)
        if plan.chunks[0].samples:
            s.remove(plan.chunks[0].sequence)
    assert sizes == [48, 48, 4]
    assert samples == [False, False, True]


def test_decodes_go_on_while_a_prompt_is_prefilled():
    s = scheduler(32, max_step_tokens=32)
    s.add(sequence("short", 4, max_tokens=50))
    s.computed(s.schedule())
    next(iter(s._running)).token_ids.append(7)
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
    s.computed(s.schedule())
    for running in s._running:
        running.token_ids.append(1)
    plan = s.schedule()
    assert [c.sequence.request_id for c in plan.chunks] == ["a", "b"]
    assert s.num_preemptions == 1
    assert s._waiting[0].request_id == "c"


def test_a_shared_prefix_is_not_computed_again():
    s = scheduler(16)
    s.add(sequence("a", 40))
    s.computed(s.schedule())
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
    s.computed(s.schedule())
    s.remove(second)
    s.remove(first)
    assert not s.has_work
    assert s.pool.num_in_use == 0
