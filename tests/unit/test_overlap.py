"""Steps launched before the last one is read: answers are those of steps one after another, token by token."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from lorry.engine.engine import Engine
from lorry.types import EngineRequest, TokenOutput
from tests.adapters import make_peft_adapter
from tests.engines import WAYS_OF_SAMPLING, make_engine, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

FACTORY = partial(tiny_model, "llama")
NAMES = ("a", "b", "c")


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed)[0].tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("overlap")
    return {
        name: make_peft_adapter(folder / name, FACTORY, ["q_proj", "v_proj"], rank=i + 2, seed=i, spread=0.5)
        for i, name in enumerate(NAMES)
    }


def engines(adapters: dict[str, Path], **settings) -> tuple[Engine, Engine]:
    """One that overlaps steps, and one that does not."""
    return (
        make_engine(FACTORY(), adapters, **settings),
        make_engine(FACTORY(), adapters, disable_overlap_schedule=True, **settings),
    )


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use, stats.adapter_references) == (0, 0, 0, 0)
    assert not engine.has_work


def assert_like(found: Sequence[TokenOutput], expected: Sequence[TokenOutput]) -> None:
    """The same tokens and ends; log probabilities but for rounding, as chunks of a prompt may be cut in other places
    and preempted requests are computed again."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.stop_token_id == other.stop_token_id
        assert len(one.logprobs) == len(other.logprobs)
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [v for _, v in mine.top] == pytest.approx([v for _, v in its.top], abs=1e-4)


def assert_same(adapters: dict[str, Path], make: Callable[[Engine], Sequence[EngineRequest]], **settings) -> Engine:
    """All outputs of the two kinds of engine are equal, log probabilities to the bit unless something was preempted.

    Returns the overlapping one.
    """
    overlapping, plain = engines(adapters, **settings)
    found, expected = run_engine(overlapping, make(overlapping)), run_engine(plain, make(plain))
    assert found.keys() == expected.keys()
    for name, outputs in found.items():
        assert_like(outputs, expected[name])
    assert found == expected or overlapping.stats().num_preemptions
    assert_idle(overlapping)
    assert_idle(plain)
    return overlapping


def test_the_next_step_is_launched_before_the_last_is_read(monkeypatch):
    engine = make_engine(FACTORY())
    runner, events = engine._parts.runner, []
    launch = runner.launch

    def spy(plan):
        step = launch(plan)
        number = len([kind for kind, _ in events if kind == "launch"])
        events.append(("launch", number))
        read = step.sample.read

        def spied_read():
            events.append(("read", number))
            return read()

        monkeypatch.setattr(step.sample, "read", spied_read)
        return step

    monkeypatch.setattr(runner, "launch", spy)
    run_engine(engine, [request("r", prompt(9, 1), max_tokens=4)])
    launches_and_reads = [("launch", 0), ("launch", 1), ("read", 0), ("launch", 2), ("read", 1), ("launch", 3)]
    assert events == [*launches_and_reads, ("read", 2), ("read", 3)]


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_no_step_is_wasted_on_tokens_past_the_last(monkeypatch, max_tokens):
    engine = make_engine(FACTORY())
    plans = []
    launch = engine._parts.runner.launch
    monkeypatch.setattr(engine._parts.runner, "launch", lambda plan: plans.append(plan) or launch(plan))
    outputs = run_engine(engine, [request("r", prompt(9, 1), max_tokens=max_tokens)])["r"]
    assert len(tokens_of(outputs)) == len(plans) == max_tokens
    assert outputs[-1].finish_reason == "length"
    assert_idle(engine)


def test_a_stop_token_found_a_step_late_drops_the_token_behind_it(adapters):
    free = tokens_of(run_engine(make_engine(FACTORY()), [request("x", prompt(9, 1), max_tokens=20)])["x"])
    stop = free[6]
    length = free.index(stop) + 1

    def make(engine: Engine) -> list[EngineRequest]:
        return [
            request("stops", prompt(9, 1), max_tokens=20, stop_token_ids=(stop,)),
            request("at once", prompt(9, 1), max_tokens=20, stop_token_ids=(free[0],)),
            request("goes on", prompt(9, 1), engine, "a", max_tokens=20),
        ]

    assert_same(adapters, make)
    engine = make_engine(FACTORY())
    engine.add_request(request("r", prompt(9, 1), max_tokens=20, stop_token_ids=(stop,)))
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.step()
    assert tokens_of(outputs) == free[:length]
    assert engine.stats().num_running == 0
    assert engine.stats().pages_in_use > 0, "a step in flight still writes to its pages"
    assert engine.has_work
    assert engine.step() == []
    assert_idle(engine)


@pytest.mark.parametrize("pool", [2048, 112])
def test_all_ways_of_sampling_also_when_requests_are_preempted(adapters, pool):
    def make(engine: Engine) -> list[EngineRequest]:
        return [
            request(f"r{i}", prompt(5 + 3 * i, i % 3), engine, [None, *NAMES][i % 4], **{"max_tokens": 24} | way)
            for i, way in enumerate(WAYS_OF_SAMPLING * 2)
        ]

    engine = assert_same(adapters, make, max_total_tokens=pool, max_running_requests=8, chunked_prefill_size=16)
    assert (engine.stats().num_preemptions > 0) == (pool == 112)


def test_penalties_count_the_token_in_flight(adapters):
    """With such a penalty no token comes twice, so one that was not counted in time would show."""
    engine = make_engine(FACTORY())
    outputs = run_engine(engine, [request("r", prompt(9, 1), max_tokens=60, repetition_penalty=100.0)])["r"]
    tokens = tokens_of(outputs)
    assert len(set(tokens)) > 55
    plain = make_engine(FACTORY(), disable_overlap_schedule=True)
    expected = run_engine(plain, [request("r", prompt(9, 1), max_tokens=60, repetition_penalty=100.0)])["r"]
    assert tokens == tokens_of(expected)


def test_an_abort_between_launch_and_read_gives_nothing_more(adapters):
    engine = make_engine(FACTORY(), adapters)
    for name in ("goes", "stays"):
        engine.add_request(request(name, prompt(20, 1), engine, "a", max_tokens=6))
    engine.step()
    engine.step()
    engine.abort("goes")
    engine.abort("goes")
    held = engine.stats()
    assert held.adapter_references == 2, "the step in flight uses the adapter"
    first = engine.step()
    assert [o for o in first if o.request_id == "goes"] == [TokenOutput(request_id="goes", finish_reason="abort")]
    assert engine.stats().adapter_references == 1
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert {o.request_id for o in rest} == {"stays"}
    assert_idle(engine)


def test_an_id_can_be_used_again_while_the_old_request_is_in_flight(adapters):
    engine, plain = engines(adapters)
    expected = run_engine(plain, [request("r", prompt(11, 2), plain, "b", max_tokens=5)])["r"]
    engine.add_request(request("r", prompt(20, 1), engine, "a", max_tokens=6))
    engine.step()
    engine.abort("r")
    engine.add_request(request("r", prompt(11, 2), engine, "b", max_tokens=5))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[0].finish_reason == "abort"
    assert outputs[1:] == expected


def test_a_slot_is_not_reused_while_a_step_that_uses_it_is_in_flight(adapters):
    engine = make_engine(FACTORY(), {"a": adapters["a"]}, max_loras_per_batch=1)
    arena = engine._parts.lora.arena
    assert arena is not None
    engine.add_request(request("r", prompt(9, 1), engine, "a", max_tokens=9))
    engine.step()
    engine.step()
    engine.unload_adapter("a")
    engine.abort("r")
    assert not arena._free_slots
    engine.step()
    assert arena._free_slots
    other = engine.register_adapter(engine.prepare_adapter("b", str(adapters["b"])))
    fresh = make_engine(FACTORY(), {"b": adapters["b"]})
    expected = run_engine(fresh, [request("r", prompt(9, 1), fresh, "b")])["r"]
    assert run_engine(engine, [request("r", prompt(9, 1), engine, other.name)])["r"] == expected


def test_outputs_are_found_in_the_prefix_cache_as_far_as_when_steps_do_not_overlap(adapters):
    for turns in (15, 16, 17, 18, 30, 31, 32, 33):
        hits = []
        for engine in engines(adapters):
            first = tokens_of(run_engine(engine, [request("1", prompt(17, 3), engine, "a", max_tokens=turns)])["1"])
            talk = [*prompt(17, 3), *first, *prompt(5, 4)]
            second = run_engine(engine, [request("2", talk, engine, "a", max_tokens=4)])["2"]
            hits.append((second[0].num_cached_tokens, tokens_of(second)))
        assert hits[0] == hits[1]
        assert hits[0][0] == (17 + turns - 1) // 16 * 16


def test_dropping_what_nobody_waits_for_ends_the_step_in_flight(adapters):
    engine = make_engine(FACTORY(), adapters)
    engine.add_request(request("r", prompt(9, 1), engine, "a", max_tokens=9))
    engine.step()
    engine.abort("r")
    engine.drop_finished()
    assert_idle(engine)


class Script:
    """A random load: what arrives, is aborted, and which adapters come and go, before each step."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.settings = {
            "max_total_tokens": 16 * rng.randint(7, 24),
            "max_running_requests": rng.randint(1, 8),
            "chunked_prefill_size": rng.choice([4, 16, 64]),
            "disable_radix_cache": rng.random() < 0.3,
        }
        self.adds = [(rng.randint(0, 25), self._request(rng, f"r{i}")) for i in range(rng.randint(4, 14))]
        self.aborts = {f"r{i}": rng.randint(0, 40) for i in range(14) if rng.random() < 0.25}
        self.reloads = {rng.randint(1, 30): (rng.choice(NAMES), rng.choice(NAMES)) for _ in range(3)}

    @staticmethod
    def _request(rng: random.Random, name: str) -> tuple[str, list[int], str | None, dict]:
        params: dict = {"max_tokens": rng.choice([1, 2, 5, 12, 25, 40])}
        if rng.random() < 0.6:
            params |= {"temperature": rng.choice([0.5, 1.0, 2.0])}
            params |= rng.choice([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7}])
            params |= rng.choice([{}, {"seed": rng.randint(-5, 5)}])
        params |= rng.choice(
            [{}, {}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}]
        )
        params |= rng.choice([{}, {"logprobs": rng.choice([0, 2, 20])}])
        params |= rng.choice([{}, {"stop_token_ids": tuple(rng.sample(range(3, 96), 6))}])
        tokens = prompt(rng.randint(1, 40), rng.randint(0, 2))
        return name, tokens, rng.choice([None, *NAMES]), params

    def run(self, engine: Engine, paths: dict[str, Path], with_aborts: bool) -> dict[str, list[TokenOutput]]:
        outputs: dict[str, list[TokenOutput]] = {}
        step = 0
        while engine.has_work or step <= 40:
            if step in self.reloads:
                name, other = self.reloads[step]
                engine.unload_adapter(name)
                engine.register_adapter(engine.prepare_adapter(name, str(paths[other])))
            for at, (name, tokens, adapter, params) in self.adds:
                if at == step:
                    engine.add_request(request(name, tokens, engine, adapter, **params))
                    outputs[name] = []
            for name, at in self.aborts.items():
                if with_aborts and at == step:
                    engine.abort(name)
            for output in engine.step():
                outputs[output.request_id].append(output)
            step += 1
        assert_idle(engine)
        return outputs


@pytest.mark.parametrize("seed", range(24))
def test_any_load_is_answered_as_by_steps_one_after_another(adapters, seed):
    script = Script(seed)
    overlapping, plain = engines(adapters, **script.settings)
    expected = script.run(plain, adapters, with_aborts=False)
    found = script.run(overlapping, adapters, with_aborts=True)
    assert found.keys() == expected.keys()
    for name, outputs in found.items():
        assert [o.finish_reason is not None for o in outputs].count(True) == 1
        if outputs[-1].finish_reason == "abort":
            assert name in script.aborts
            outputs = outputs[:-1]
        assert_like(outputs, expected[name][: len(outputs)])
        assert len(outputs) == len(expected[name]) or name in script.aborts
