"""Our attention and experts, registered at transformers' official extension points under the name `lorry`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from lorry.attention.base import AttentionBackend, AttentionParams
from lorry.kv.pool import KVShape, LayerKV

HOOK_NAME = "lorry"


class AttentionHook(Protocol):
    """What an attention module calls, in its attribute `lorry_attention`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]."""
        ...


class ExpertsHook(Protocol):
    """What an experts module calls, in its attribute `lorry_experts`."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers gives [1, heads, T, dim] and takes [1, T, heads, dim]; arguments we do not know are caught by
    the self-check at load, which compares with the model's own attention."""
    assert attention_mask is None, "an attention name that transformers does not know gets no mask"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else float(q.shape[-1]) ** -0.5
    hook: AttentionHook = module.lorry_attention  # type: ignore[assignment]
    return hook(q, k, v, AttentionParams(scale, sliding_window, softcap, s_aux))[None], None


def _experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    hook: ExpertsHook = module.lorry_experts  # type: ignore[assignment]
    return hook(hidden, top_k_index, top_k_weights)


AttentionInterface.register(HOOK_NAME, _attention)
ExpertsInterface.register(HOOK_NAME, _experts)


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of every attention layer; the probe at load shows that each one really calls the hook."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    }


class ShapeProbe:
    """Stands in for attention in one dry forward and writes down the shapes of each layer's keys and values."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, KVShape] = {}
        self.num_calls: dict[str, int] = {}
        for path, module in find_attention(model).items():
            module.lorry_attention = self._hook(path)  # type: ignore[assignment]

    def _hook(self, path: str) -> AttentionHook:
        def hook(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            self.shapes[path] = KVShape(k.shape[1], k.shape[2], v.shape[2])
            self.num_calls[path] = self.num_calls.get(path, 0) + 1
            return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

        return hook


def bind_attention(model: nn.Module, backend: AttentionBackend, pool: dict[str, LayerKV]) -> None:
    """Give every attention layer the backend and its own part of the KV pool."""

    def bound(kv: LayerKV) -> AttentionHook:
        return lambda q, k, v, params: backend.run(q, k, v, kv, params)

    for path, module in find_attention(model).items():
        module.lorry_attention = bound(pool[path])  # type: ignore[assignment]


def use_hooks(model: PreTrainedModel) -> None:
    """Make a model built with another implementation use ours."""
    model.set_attn_implementation(HOOK_NAME)
    model.set_experts_implementation(HOOK_NAME)
