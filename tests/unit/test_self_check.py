"""The self-check at load refuses what would be served wrongly, and not what rounding does to choices of experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorry.attention import torch as attention
from lorry.config import EngineConfig
from lorry.engine.build import build_around
from lorry.errors import UnsupportedModel
from lorry.models.loader import LoadedModel, hook_model
from lorry.models.sites import find_experts, find_routers
from tests.models import MOE_FAMILIES, tiny_model

FAMILIES = ("llama", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
CONFIG = EngineConfig.parse(model="tiny", max_total_tokens=64, lora_memory=2**20)


def load(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> LoadedModel:
    return hook_model(tiny_model(family, **overrides).to(dtype))


def build(loaded: LoadedModel) -> None:
    build_around(loaded, CONFIG, lambda text: None)


def no_mask(attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: Any) -> Tensor:
    return attend(q, k, v, None, params)


def forgets_the_first_chunk(attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: Any) -> Tensor:
    n = len(q)
    return attend(q, k[-n:], v[-n:], None if mask is None else mask[:, -n:], params)


def wrong_scale(attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: Any) -> Tensor:
    return attend(q, k, v, mask, replace(params, scale=1.5 * params.scale))


def no_sinks(attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: Any) -> Tensor:
    return attend(q, k, v, mask, replace(params, sinks=None))


def break_attention(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor]) -> None:
    for name in ("_attend", "_attend_explicitly"):
        original = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *args, original=original: fault(original, *args))


def turn_backwards(loaded: LoadedModel) -> None:
    rotary = loaded.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda *args, **kwargs: (lambda cos, sin: (cos, -sin))(*forward(*args, **kwargs))


def shuffle_experts(loaded: LoadedModel) -> None:
    for module in find_experts(loaded.model).values():
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            weight.data = weight.data.roll(1, dims=0)


def swap_gate_and_up(loaded: LoadedModel) -> None:
    for module in find_experts(loaded.model).values():
        gate = module._apply_gate
        module._apply_gate = lambda x, gate=gate: gate(x.flip(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_faults_passes(family: str, dtype: torch.dtype):
    build(load(family, dtype))


@pytest.mark.parametrize("fault", [no_mask, forgets_the_first_chunk, wrong_scale])
@pytest.mark.parametrize("family", FAMILIES)
def test_faults_of_attention_are_refused(family: str, fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch):
    break_attention(monkeypatch, fault)
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        build(load(family))


def test_forgotten_sinks_are_refused(monkeypatch: pytest.MonkeyPatch):
    break_attention(monkeypatch, no_sinks)
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        build(load("gpt_oss"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_rotary_is_refused(family: str):
    loaded = load(family)
    turn_backwards(loaded)
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        build(loaded)


@pytest.mark.parametrize("fault", [shuffle_experts, swap_gate_and_up])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_faults_of_experts_are_refused(family: str, fault: Callable[[LoadedModel], None]):
    loaded = load(family)
    fault(loaded)
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        build(loaded)


def change_routers(loaded: LoadedModel, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """`change(weights, index)` stands between every router and its experts."""
    for router in find_routers(loaded.model).values():
        forward = router.forward

        def changed(hidden: Tensor, forward: Any = forward) -> Any:
            *logits, weights, index = forward(hidden)
            return (*logits, *change(weights, index))

        router.forward = changed


def flip_one_row_in_six(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The last choice of some rows is another expert, as if two had been nearly equal."""
    index = index.clone()
    unused = torch.stack([torch.tensor(next(e for e in range(4) if e not in row)) for row in index[::6].tolist()])
    index[::6, -1] = unused
    return weights, index


def test_flipped_choices_are_not_refused_though_their_rows_are_others():
    flipped = load("qwen3_moe")
    inputs = torch.tensor([flipped.reference.token_ids])
    change_routers(flipped, flip_one_row_in_six)
    build(flipped)
    plain = tiny_model("qwen3_moe").to(torch.bfloat16)
    expected = plain(inputs).logits[0]
    change_routers(hook_like(plain), flip_one_row_in_six)
    error = (plain(inputs).logits[0] - expected).float().square().mean(-1).sqrt() / expected.float().std()
    assert error.max() > 0.3


def hook_like(model: Any) -> Any:
    """What `change_routers` needs of a loaded model."""
    return type("Loaded", (), {"model": model})


def all_others(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return weights, (index + 1) % 4


def not_normalised(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return 0.6 * weights, index


@pytest.mark.parametrize("fault", [all_others, not_normalised])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_router_is_refused(fault: Callable[..., Any], dtype: torch.dtype):
    loaded = load("qwen3_moe", dtype)
    change_routers(loaded, fault)
    with pytest.raises(UnsupportedModel, match="router beside model.layers.0"):
        build(loaded)


def test_nan_is_refused():
    loaded = load("llama")
    loaded.model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        build(loaded)
