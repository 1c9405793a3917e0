"""How a GPU's memory is divided, with a GPU that is pretended where there is none."""

from typing import Any

import pytest
import torch

from lorry.config import EngineConfig
from lorry.engine.build import Parts, _finish_on_cuda, _kv_bytes_per_token, _Unfinished
from lorry.engine.memory import KVSize, MemoryBudget, StepLimits, largest_step, size_kv
from lorry.errors import ConfigError
from lorry.kv.pool import KVShape, allocate_kv, grow_kv
from lorry.models.hooks import bind_attention
from tests.engines import make_parts, packed_logits
from tests.models import random_tokens, tiny_model

GIB = 2**30


def make_config(**settings: Any) -> EngineConfig:
    return EngineConfig.parse(model="m", **settings)


def limits(config: EngineConfig) -> StepLimits:
    return StepLimits.of(config, torch.device("cpu"))


def budget() -> MemoryBudget:
    return MemoryBudget("a GPU", 10 * GIB, 9 * GIB)


def test_parts_are_counted_and_the_rest_is_left():
    account = budget()
    account.take("weights", 4 * GIB)
    account.take("arena of adapters", GIB)
    account.take("weights", 5 * GIB)  # counted anew, not twice
    assert account.left == 3 * GIB


def test_what_does_not_fit_is_explained_by_a_table():
    account = budget()
    account.take("weights", 6 * GIB)
    with pytest.raises(ConfigError) as caught:
        account.take("arena of adapters", 4 * GIB)
    text = str(caught.value)
    for part in ("out of memory on a GPU", "weights    ", "6.00", "--lora-memory", "--mem-fraction-static", "-1.00"):
        assert part in text


def test_the_allocators_error_becomes_ours():
    account = budget()
    with (
        pytest.raises(ConfigError, match="no memory for: largest step(.|\n)*chunked-prefill-size"),
        account.explained("largest step", GIB),
    ):
        raise torch.OutOfMemoryError("tried to allocate much")


def test_a_host_has_no_limit():
    account = MemoryBudget.of(torch.device("cpu"), make_config())
    account.take("weights", 10**15)


def test_the_pool_takes_what_is_there_but_not_more_than_requests_can_use():
    config = make_config(max_running_requests=2)
    assert size_kv(config, limits(config), 64, bytes_per_token=10, available=1000).num_tokens == 96
    assert size_kv(config, limits(config), 64, bytes_per_token=10, available=10**9).num_tokens == 128
    assert size_kv(config, limits(config), 1000, bytes_per_token=10, available=1000).context == 96
    assert size_kv(make_config(max_total_tokens=33), StepLimits(2, 8), 64, 10, 0).num_tokens == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no memory for one page"),
        ({"context_length": 100}, "100 is more than the 64"),
        ({"context_length": 64, "max_total_tokens": 32}, "does not fit into the 32 tokens"),
    ],
)
def test_pools_that_cannot_be(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        size_kv(make_config(**settings), StepLimits(2, 8), 64, bytes_per_token=10, available=-5)


def test_a_pool_grows_for_all_who_hold_it():
    pool = allocate_kv({"a": KVShape(2, 4, 6)}, 1, torch.float32, torch.device("cpu"))
    keys, values = pool["a"].keys, pool["a"].values
    grow_kv(pool, 3)
    assert (keys.shape, values.shape) == ((48, 2, 4), (48, 2, 6))
    keys[-1] = 1.0
    assert pool["a"].keys[-1].sum() == 8


def test_the_largest_step_runs_with_a_pool_of_one_page():
    config = make_config(max_running_requests=3, chunked_prefill_size=40)
    plan = largest_step(limits(config), 64, slot=-1)
    assert [(c.start, c.num_tokens, c.samples) for c in plan.chunks] == [(26, 38, True), (0, 1, True), (0, 1, True)]
    parts = make_parts(tiny_model("llama"))
    one_page = allocate_kv(parts.loaded.kv_shapes, 1, torch.float32, torch.device("cpu"))
    bind_attention(parts.loaded.model, parts.runner._attention, one_page)
    assert len(parts.runner.launch(plan).sample.read().token_ids) == 3


def test_rows_beyond_one_context_go_to_further_requests():
    plan = largest_step(StepLimits(4, 100), 48, slot=-1)
    assert [c.num_tokens for c in plan.chunks] == [48, 48, 3, 1]
    plan = largest_step(limits(make_config(max_running_requests=8, chunked_prefill_size=4)), 48, slot=-1)
    assert [c.num_tokens for c in plan.chunks] == [1] * 8


FOREIGN = 50_000
"""Bytes that others use of the pretended GPU."""


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, total: int, used: int, step: int) -> None:
    """Let torch.cuda answer with the numbers of a small GPU, on which a step reserves `step` bytes."""
    answers: dict[str, Any] = {
        "mem_get_info": (total - used, total),
        "memory_reserved": 0,
        "max_memory_reserved": step,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)


def finish(
    monkeypatch: pytest.MonkeyPatch, total: int, step: int, **settings: Any
) -> tuple[KVSize, list[str], Parts]:
    """Take an engine on the CPU through the way of a GPU's."""
    parts = make_parts(tiny_model("qwen3_moe"))
    arena, attention = parts.lora.arena, parts.runner._attention
    assert arena is not None
    pretend_gpu(monkeypatch, total, parts.loaded.weight_bytes + arena.num_bytes + FOREIGN, step)
    config = make_config(max_running_requests=4, chunked_prefill_size=64, **settings)
    pool = allocate_kv(parts.loaded.kv_shapes, 1, torch.float32, torch.device("cpu"))
    bind_attention(parts.loaded.model, attention, pool)
    account = MemoryBudget("pretended", total, int(total * 0.9))
    account.take("weights", parts.loaded.weight_bytes)
    account.take("arena of adapters", arena.num_bytes)
    said: list[str] = []
    unfinished = _Unfinished(parts.loaded, parts.lora, parts.runner, attention, config, limits(config), account, ())
    return _finish_on_cuda(unfinished, pool, said.append), said, parts


def test_kv_gets_what_weights_adapters_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch):
    total = 5 * 2**20
    kv, said, parts = finish(monkeypatch, total, step=100_000)
    arena = parts.lora.arena
    assert arena is not None
    left = int(total * 0.9) - parts.loaded.weight_bytes - arena.num_bytes - FOREIGN - 100_000
    assert kv.num_pages == left // _kv_bytes_per_token(parts.loaded) // 16
    assert 16 < kv.num_tokens < 4 * 256
    assert "KV pool" in said[-1]
    assert arena.num_free_bytes == arena.num_bytes  # the adapter of the measurement is gone
    logits = packed_logits(parts, [random_tokens(20)[0].tolist()], [-1], [[(0, 20)]])
    assert logits[0].shape == (20, 96)


def test_a_step_that_is_too_large_is_explained(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="largest step(.|\n)*--chunked-prefill-size"):
        finish(monkeypatch, total=5 * 2**20, step=2**22)


def test_a_pool_that_was_asked_for_and_does_not_fit_is_explained(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="KV pool(.|\n)*--max-total-tokens"):
        finish(monkeypatch, total=5 * 2**20, step=0, max_total_tokens=2**20)


def test_the_largest_step_suits_the_device_where_nothing_is_asked_for():
    config = make_config()
    assert limits(config) == StepLimits(64, 512)
    assert StepLimits.of(config, torch.device("cuda")) == StepLimits(128, 8192)
    asked = make_config(max_running_requests=700, chunked_prefill_size=16)
    assert StepLimits.of(asked, torch.device("cuda")) == limits(asked) == StepLimits(700, 700)
