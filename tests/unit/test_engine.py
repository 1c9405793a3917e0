"""The engine on a tiny model: answers do not depend on neighbours, everything ends once, everything comes back."""

from functools import partial
from pathlib import Path

import pytest

from lorry.engine.engine import Engine
from lorry.errors import AdapterCapacity, AdapterExists, ContextLengthExceeded, InvalidRequest, ModelNotFound
from tests.adapters import make_peft_adapter
from tests.engines import make_engine, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed)[0].tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    factory = partial(tiny_model, "mixtral")
    return {
        name: make_peft_adapter(folder / name, factory, ATTENTION, rank=rank, seed=rank, spread=0.5)
        for name, rank in (("a", 2), ("b", 5), ("c", 8))
    }


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use, stats.adapter_references) == (0, 0, 0, 0)


def many_requests(engine: Engine, num: int = 12, **params):
    names = [None, "a", "b", "c"]
    return [
        request(f"r{i}", prompt(5 + 7 * (i % 5), i), engine, names[i % 4], max_tokens=20 + i % 7, **params)
        for i in range(num)
    ]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.95, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("pool", [4096, 96])
def test_answers_in_a_batch_equal_answers_alone(adapters, params, pool):
    """Also with the pool so small that requests are preempted and computed again."""
    model = tiny_model("mixtral")
    engine = make_engine(model, adapters, max_total_tokens=pool, chunked_prefill_size=16, max_running_requests=8)
    together = run_engine(engine, many_requests(engine, **params))
    assert_idle(engine)
    assert (engine.stats().num_preemptions > 0) == (pool == 96)
    for item in many_requests(engine, **params):
        alone = make_engine(tiny_model("mixtral"), adapters, disable_radix_cache=True)
        assert tokens_of(run_engine(alone, [item])[item.request_id]) == tokens_of(together[item.request_id])


def test_adapters_change_answers(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters)
    names = [None, "a", "b", "c"]
    outputs = run_engine(engine, [request(str(name), prompt(9, 1), engine, name) for name in names])
    assert len({tuple(tokens_of(output)) for output in outputs.values()}) == 4


def test_each_request_ends_once_and_with_the_right_reason(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters)
    length = tokens_of(run_engine(engine, [request("x", prompt(9, 1), max_tokens=10)])["x"])
    stop = length[4]
    outputs = run_engine(
        engine,
        [
            request("length", prompt(9, 1), max_tokens=10),
            request("token", prompt(9, 1), max_tokens=10, stop_token_ids=(stop,)),
        ],
    )
    assert [o.finish_reason for o in outputs["length"]] == [None] * 9 + ["length"]
    ended = outputs["token"][-1]
    assert (ended.finish_reason, ended.stop_token_id) == ("stop", stop)
    assert tokens_of(outputs["token"]) == length[: length.index(stop) + 1]


def test_end_tokens_stop_unless_ignored():
    free = tokens_of(run_engine(make_engine(tiny_model("llama")), [request("x", prompt(9, 1))])["x"])
    engine = make_engine(tiny_model("llama"), eos=(free[3],))
    outputs = run_engine(engine, [request("stops", prompt(9, 1)), request("goes", prompt(9, 1), ignore_eos=True)])
    assert outputs["stops"][-1].finish_reason == "stop"
    assert tokens_of(outputs["goes"]) == free


def test_a_pool_for_a_third_of_the_work_loses_nothing_and_keeps_the_order(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters, max_total_tokens=4 * 48, disable_radix_cache=True)
    requests = [
        request(f"r{i:02}", prompt(16, i), engine, [None, "a", "b", "c"][i % 4], max_tokens=32) for i in range(12)
    ]
    for item in requests:
        engine.add_request(item)
    ended, counts = [], dict.fromkeys((r.request_id for r in requests), 0)
    while engine.has_work:
        for output in engine.step():
            counts[output.request_id] += len(output.token_ids)
            if output.finish_reason:
                ended.append(output.request_id)
    assert ended == [r.request_id for r in requests]
    assert set(counts.values()) == {32}
    assert engine.stats().num_preemptions > 0
    assert_idle(engine)


def test_abort_gives_one_last_output_and_everything_back(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters, max_running_requests=2)
    for name in ("runs", "also", "waits"):
        engine.add_request(request(name, prompt(20, 1), engine, "a", max_tokens=50))
    engine.step()
    for name in ("runs", "waits", "unknown", "runs"):
        engine.abort(name)
    outputs = engine.step()
    assert sorted(o.request_id for o in outputs if o.finish_reason == "abort") == ["runs", "waits"]
    engine.abort("also")
    assert [o.finish_reason for o in engine.step()] == ["abort"]
    assert not engine.has_work
    assert_idle(engine)


def test_l03_unload_lets_running_requests_finish_on_their_weights(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters)
    expected = tokens_of(run_engine(engine, [request("x", prompt(9, 2), engine, "a")])["x"])
    running = request("y", prompt(9, 2), engine, "a")
    late = request("z", prompt(9, 2), engine, "a")
    engine.add_request(running)
    first = engine.step()
    engine.unload_adapter("a")
    with pytest.raises(ModelNotFound, match="unloaded"):
        engine.add_request(late)
    engine.register_adapter(engine.prepare_adapter("a", str(adapters["b"])))
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert tokens_of(first + rest) == expected
    assert_idle(engine)


def test_what_cannot_be_served_is_refused_and_changes_nothing(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters, context_length=64)
    for bad, message in [
        (request("r", []), "no tokens"),
        (request("r", [5, 96]), "0 to 95"),
        (request("r", prompt(60, 1), max_tokens=5), "holds 64 tokens, but the prompt has 60"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(bad)
    with pytest.raises(ContextLengthExceeded):
        engine.add_request(request("r", prompt(64, 1), max_tokens=None))
    engine.add_request(request("r", prompt(9, 1), engine, "a"))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request(request("r", prompt(9, 1), engine, "a"))
    with pytest.raises(AdapterExists):
        engine.register_adapter(engine.prepare_adapter("a", str(adapters["b"])))
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_without_lora_adapters_are_refused_with_the_flag():
    engine = make_engine(tiny_model("llama"), enable_lora=False)
    with pytest.raises(AdapterCapacity, match="--no-enable-lora"):
        engine.prepare_adapter("a", "/nowhere")


def test_max_tokens_none_fills_the_context():
    engine = make_engine(tiny_model("llama"), context_length=32)
    outputs = run_engine(engine, [request("r", prompt(10, 1), max_tokens=None)])["r"]
    assert len(tokens_of(outputs)) == 22
    assert outputs[-1].finish_reason == "length"


def test_logprobs_come_with_every_token():
    engine = make_engine(tiny_model("llama"))
    outputs = run_engine(engine, [request("r", prompt(10, 1), logprobs=2)])["r"]
    assert all(len(output.logprobs) == 1 and len(output.logprobs[0].top) == 2 for output in outputs)
    assert all(output.logprobs[0].top[0][0] == output.token_ids[0] for output in outputs)


def test_w06_p19_prefixes_are_shared_within_an_adapter_and_never_across(adapters):
    """Base, A, B and base again on one prompt: each as if alone, with hits only where the adapter is the same."""
    engine = make_engine(tiny_model("mixtral"), adapters)
    tokens = prompt(40, 7)
    fresh = {
        name: tokens_of(
            run_engine(e := make_engine(tiny_model("mixtral"), adapters), [request("x", tokens, e, name)])["x"]
        )
        for name in (None, "a", "b")
    }
    for name, hit in [(None, 0), ("a", 0), ("b", 0), (None, 32), ("a", 32), ("b", 32)]:
        outputs = run_engine(engine, [request("x", tokens, engine, name)])["x"]
        assert tokens_of(outputs) == fresh[name]
        assert outputs[0].num_cached_tokens == hit


def test_w04_w28_a_name_loaded_again_never_finds_the_old_prefix(adapters):
    engine = make_engine(tiny_model("mixtral"), {"x": adapters["a"]})
    tokens = prompt(40, 7)
    run_engine(engine, [request("r", tokens, engine, "x")])
    engine.unload_adapter("x")
    engine.register_adapter(engine.prepare_adapter("x", str(adapters["b"])))
    other = make_engine(tiny_model("mixtral"), {"x": adapters["b"]})
    outputs = run_engine(engine, [request("r", tokens, engine, "x")])["r"]
    assert outputs[0].num_cached_tokens == 0
    assert tokens_of(outputs) == tokens_of(run_engine(other, [request("r", tokens, other, "x")])["r"])


def test_w15_no_adapter_named_is_the_base_always(adapters):
    engine = make_engine(tiny_model("mixtral"), adapters)
    base = tokens_of(run_engine(engine, [request("1", prompt(9, 3))])["1"])
    run_engine(engine, [request("2", prompt(9, 3), engine, "a")])
    assert tokens_of(run_engine(engine, [request("3", prompt(9, 3))])["3"]) == base


def test_a_rank_past_the_backends_limit_is_refused_with_the_way_out(adapters, monkeypatch):
    engine = make_engine(tiny_model("mixtral"))
    monkeypatch.setattr(engine._parts.lora.dense, "max_rank", 4)
    with pytest.raises(AdapterCapacity, match="'b': rank 5 is above 4.*--lora-backend torch"):
        engine.register_adapter(engine.prepare_adapter("b", str(adapters["b"])))
    engine.register_adapter(engine.prepare_adapter("a", str(adapters["a"])))
