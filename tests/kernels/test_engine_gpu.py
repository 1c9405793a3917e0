"""The engine's loop on a GPU: steps are launched ahead, no launch waits, and answers stay what they were."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.engine.engine import Engine
from lorry.types import EngineRequest, TokenOutput
from tests.adapters import make_peft_adapter
from tests.engines import WAYS_OF_SAMPLING, make_engine, request, run_engine, tokens_of
from tests.kernels.sync import no_synchronization
from tests.models import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FACTORY = partial(tiny_model, "qwen3_moe", hidden_size=64, moe_intermediate_size=32)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engine")
    return {
        name: make_peft_adapter(folder / name, FACTORY, ["q_proj", "v_proj"], rank=4 + i, seed=i, spread=0.3)
        for i, name in enumerate("ab")
    }


def engine_on_gpu(adapters: dict[str, Path], **settings) -> Engine:
    defaults = {"max_running_requests": 8, "chunked_prefill_size": 32, "lora_memory": 2**24}
    return make_engine(FACTORY().cuda(), adapters, **(defaults | settings))


def requests(engine: Engine, num: int = 18) -> list[EngineRequest]:
    return [
        request(
            f"r{i}",
            random_tokens(4 + 7 * (i % 9), i)[0].tolist(),
            engine,
            [None, "a", "b"][i % 3],
            **{"max_tokens": 4 + 5 * (i % 7)} | WAYS_OF_SAMPLING[i % len(WAYS_OF_SAMPLING)],
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_overlapping_steps_give_what_steps_one_after_another_give(adapters, disable_cuda_graph):
    """The steps are the same ones, so outputs are equal to the bit, log probabilities too."""
    outputs = []
    for disable_overlap_schedule in (False, True):
        engine = engine_on_gpu(
            adapters, disable_cuda_graph=disable_cuda_graph, disable_overlap_schedule=disable_overlap_schedule
        )
        assert (engine._parts.runner.graphs is None) == disable_cuda_graph
        outputs.append(run_engine(engine, requests(engine)))
        assert engine.stats().pages_in_use == engine.stats().adapter_references == 0
    assert outputs[0] == outputs[1]


def test_p16_p17_nothing_runs_but_what_was_captured(adapters, monkeypatch):
    """Prefill, mixed steps and decodes, one stream alone too: no step is launched anew, so none compiles a kernel."""
    engine = engine_on_gpu(adapters)

    def eager(*_: object) -> None:
        raise AssertionError("a step ran that was not captured")

    monkeypatch.setattr(engine._parts.runner, "forward", eager)
    alone = run_engine(engine, requests(engine)[1:2])
    assert len(tokens_of(alone["r1"])) > 3
    outputs = run_engine(engine, requests(engine))
    assert all(output[-1].finish_reason == "length" for output in outputs.values())


@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_a_launch_never_waits_for_the_device(adapters, disable_cuda_graph, monkeypatch):
    """Prefill, mixed and decode steps, all ways of sampling; torch raises where an operation would wait."""
    engine = engine_on_gpu(adapters, disable_cuda_graph=disable_cuda_graph)
    run_engine(engine, requests(engine))  # kernels are compiled
    launch = engine._parts.runner.launch
    num_steps = 0

    def strict(plan):
        nonlocal num_steps
        num_steps += 1
        with no_synchronization():
            return launch(plan)

    monkeypatch.setattr(engine._parts.runner, "launch", strict)
    run_engine(engine, requests(engine))
    assert num_steps > 30


def test_the_next_step_is_launched_while_the_device_is_still_busy(adapters):
    engine = engine_on_gpu(adapters)
    run_engine(engine, requests(engine))
    engine.add_request(request("r", random_tokens(9, 1)[0].tolist(), engine, "a", max_tokens=20))
    engine.step()
    torch.cuda._sleep(2_000_000_000)  # about a second
    plan = engine._scheduler.schedule()
    step = engine._parts.runner.launch(plan)
    engine._scheduler.launched(plan)
    assert plan.chunks[0].source == 0
    assert not step.sample._event.query()
    assert len(engine._read(engine._launched)) == 1
    assert not step.sample._event.query()
    engine._launched = step
    rest: list[TokenOutput] = []
    while engine.has_work:
        rest += engine.step()
    assert len(tokens_of(rest)) == 19


def test_an_adapter_that_takes_the_slot_of_another_changes_no_running_answer(adapters):
    """Loaded, unloaded and aborted while another decodes, with steps in flight all the time.

    The same steps with room for all adapters, none of which ever goes, give the same bits.
    """
    outputs = []
    for room in (3, 22):
        engine = engine_on_gpu(adapters, max_loras_per_batch=room)
        engine.add_request(request("r", random_tokens(9, 1)[0].tolist(), engine, "a", max_tokens=60, logprobs=2))
        found: list[TokenOutput] = []
        for i in range(20):
            name = f"other{i}"
            engine.register_adapter(engine.prepare_adapter(name, str(adapters["ab"[i % 2]])))
            engine.add_request(request(name, random_tokens(5, i)[0].tolist(), engine, name, max_tokens=20))
            found += engine.step()
            found += engine.step()
            if room == 3:
                engine.unload_adapter(name)
            engine.abort(name)
            found += engine.step()
        while engine.has_work:
            found += engine.step()
        assert len([o for o in found if o.finish_reason == "abort"]) == 20
        outputs.append(found)
    assert outputs[0] == outputs[1]
