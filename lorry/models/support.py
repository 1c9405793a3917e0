"""Refuses, before any weight is read, models that this engine would serve wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from lorry.errors import UnsupportedModel

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "moe", "dense", "sparse"}
_MIXERS = ("Mamba", "LinearAttention", "GatedDelta", "ShortConv", "RecurrentBlock", "Rwkv", "Lightning", "Indexer")
_ROPE_REFUSED = {
    "dynamic": "its frequencies depend on the longest sequence of the batch",
    "longrope": "its frequencies depend on the longest sequence of the batch",
}


def refuse_config(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` with every reason that the configuration alone gives."""
    _raise(config, list(_config_reasons(config)))


def refuse_modules(model: nn.Module, config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` with every reason that the modules (built without weights) give."""
    _raise(config, list(_module_reasons(model)))


def _raise(config: PreTrainedConfig, reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedModel(f"{config.model_type} models are not served: {'; '.join(reasons)}")


def _config_reasons(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES):
        yield f"layers of type {kind!r} (only full and sliding-window attention is served)"
    if getattr(config, "attention_chunk_size", None):
        yield "chunked attention"
    if getattr(config, "index_topk", None):
        yield "sparse attention by an indexer"
    for rope_type in sorted(set(_rope_types(getattr(config, "rope_parameters", None)))):
        if rope_type in _ROPE_REFUSED:
            yield f"{rope_type!r} rotary scaling: {_ROPE_REFUSED[rope_type]}"
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        yield "it takes images or sound; only text models are served"
    if getattr(config, "quantization_config", None):
        yield "quantised weights"


def _rope_types(parameters: Any) -> Iterator[str]:
    """Types in `rope_parameters`, which may be one set or one set for each layer type."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield str(parameters["rope_type"])
        for nested in parameters.values():
            yield from _rope_types(nested)


def _module_reasons(model: nn.Module) -> Iterator[str]:
    kinds = {type(module).__name__ for module in model.modules()}
    for kind in sorted(kinds):
        if kind.startswith("Conv") or any(mixer in kind for mixer in _MIXERS):
            yield f"{kind} layers keep a state of their own, which is not served"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention cannot be replaced through transformers' attention interface"
    for module in model.modules():
        if getattr(module, "has_post_expert_norm", False):
            yield "experts with a norm of their own behind the product"
            break
