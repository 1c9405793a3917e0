"""Adapters come to the device on a stream of their own while steps run: no answer changes, none is served early."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.engine.engine import Engine
from tests.adapters import make_peft_adapter
from tests.engines import make_engine, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FACTORY = partial(tiny_model, "qwen3_moe", hidden_size=64, moe_intermediate_size=32)
NAMES = "abcdef"
PROMPT = random_tokens(21, 5)[0].tolist()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("residency")
    return {
        name: make_peft_adapter(folder / name, FACTORY, ["q_proj", "v_proj"], rank=64, seed=i, spread=0.1)
        for i, name in enumerate(NAMES)
    }


def engine_on_gpu(paths: dict[str, Path], **settings: object) -> Engine:
    defaults = {"max_running_requests": 4, "chunked_prefill_size": 32, "lora_memory": 2**24}
    return make_engine(FACTORY().cuda(), paths, **(defaults | settings))


def answer(engine: Engine, name: str | None, **params: object) -> list[int]:
    return tokens_of(run_engine(engine, [request("x", PROMPT, engine, name, **params)])["x"])


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> dict[str, list[int]]:
    engine = engine_on_gpu(paths)
    return {name: answer(engine, name) for name in NAMES}


@pytest.mark.parametrize("max_loaded_loras", [None, 2])
def test_adapters_that_take_each_others_place_answer_as_if_they_had_stayed(paths, alone, max_loaded_loras):
    assert len({tuple(tokens) for tokens in alone.values()}) > 3
    size = engine_on_gpu({"a": paths["a"]}).adapters["a"].num_bytes
    engine = engine_on_gpu(paths, lora_memory=int(2.5 * size), max_loaded_loras=max_loaded_loras)
    for name in 3 * NAMES:
        assert answer(engine, name) == alone[name]
    assert engine.stats().num_adapter_evictions >= 12


def test_a_running_answer_does_not_notice_adapters_that_come_and_go(paths, alone):
    size = engine_on_gpu({"a": paths["a"]}).adapters["a"].num_bytes
    engine = engine_on_gpu(paths, lora_memory=int(3.5 * size))
    expected = answer(engine, "a", max_tokens=120)
    engine.add_request(request("long", PROMPT, engine, "a", max_tokens=120))
    outputs, turn = [], 0
    while engine.has_work:
        outputs += engine.step()
        name = NAMES[1:][turn % 5]
        if turn % 3 == 0:
            engine.pin_adapter(name)  # brings it to the device
            engine.pin_adapter(name, pinned=False)
        elif turn % 3 == 1:
            engine.register_adapter(engine.prepare_adapter(name, str(paths[name])), replace=True)
        turn += 1
    assert tokens_of(outputs) == expected
    assert engine.stats().num_adapter_copies > 30
    for name in NAMES:
        assert answer(engine, name) == alone[name]
