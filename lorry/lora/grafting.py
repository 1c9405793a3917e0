"""Finds the layers and MLPs that have a faster form, proves each on random input, and puts it in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lorry.attention.base import AttentionBackend, AttentionBatch, AttentionParams
from lorry.config import PAGE_SIZE
from lorry.kv.pool import LayerKV
from lorry.lora.block import Angles, Block, GatedMLP, Norm, NormInput
from lorry.lora.manager import LoRAManager
from lorry.models.grafts import NUM_SAMPLES, is_rms_norm
from lorry.models.sites import Site

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_OUT = {"o_proj", "down_proj"}
_ROWS_THAT_AGREE = 0.5
"""Of the rows of a layer's proof: in 16-bit types rounding may send a row to another expert. Other arithmetic shows
in every row."""


@dataclass
class _Seen:
    """What a layer was called with in a forward of the model, and what its attention asked for."""

    kwargs: dict[str, Any]
    params: AttentionParams


@torch.inference_mode()
def graft_layers(
    model: Any,
    sites: Sequence[Site],
    manager: LoRAManager,
    attention: AttentionBackend,
    pool: Mapping[str, LayerKV],
    report: Callable[[str], None],
) -> None:
    """Graft MLPs and whole decoder layers of a model whose hooks and LoRA are in place.

    `report` is told what was grafted and what was left. The first page of the pool is overwritten.
    """
    by_path = {site.module: site for site in sites if site.kind == "linear"}
    for path, module in model.named_modules():
        if _has_linears(module, _MLP):
            mlp = GatedMLP(path, module, by_path, manager)
            x = torch.randn(NUM_SAMPLES, module.gate_proj.in_features, device=model.device, dtype=model.dtype)
            if _share_that_agrees(mlp.forward(x), module.forward(x)) == 1:
                module.forward = mlp.forward
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "self_attn")}
    _plan(attention, model.device)
    seen = _watch(model, layers)
    blocks, angles = {}, Angles()
    for path, layer in layers.items():
        kv = pool.get(f"{path}.self_attn")
        if kv is None or path not in seen or not _is_plain(layer, kv, seen[path]):
            continue
        block = Block(path, layer, by_path, manager, attention, kv, seen[path].params, angles)
        if _proves(block, layer, seen[path].kwargs):
            blocks[path] = block
    _chain(model, layers, blocks)
    report(f"{len(blocks)} of {len(layers)} decoder layers run in few launches" + _rest(layers, blocks))


def _rest(layers: Mapping[str, nn.Module], blocks: Mapping[str, Block]) -> str:
    kinds = sorted({type(layer).__name__ for path, layer in layers.items() if path not in blocks})
    return f"; {', '.join(kinds)} are not of the plain form and run as they are, slower" if kinds else ""


def _has_linears(module: nn.Module, names: set[str]) -> bool:
    """Whether these children are linears; all that read the input must have a bias, or none."""
    children = {name: getattr(module, name, None) for name in names}
    with_bias = [getattr(child, "bias", None) is not None for name, child in children.items() if name not in _OUT]
    return all(isinstance(child, nn.Linear) for child in children.values()) and len(set(with_bias)) == 1


def _is_plain(layer: Any, kv: LayerKV, seen: _Seen) -> bool:
    """Whether `Block` can stand for the layer; whether it computes the same is for the proof to say."""
    own = layer.self_attn
    width = kv.keys.shape[2]
    norms = [layer.input_layernorm, layer.post_attention_layernorm] if hasattr(layer, "input_layernorm") else []
    head_norms = [getattr(own, name) for name in ("q_norm", "k_norm") if hasattr(own, name)]
    angles = seen.kwargs.get("position_embeddings")
    return (
        {name for name, _ in layer.named_children()} == _LAYER
        and {name for name, _ in own.named_children()} - {"q_norm", "k_norm"} == _ATTENTION
        and _has_linears(own, _ATTENTION)
        and all(is_rms_norm(norm) for norm in (*norms, *head_norms))
        and [norm.weight.shape[0] for norm in head_norms] in ([], [width, width])
        and kv.values.shape[2] == width
        and width % 2 == 0
        and (width // 2).bit_count() == 1
        and isinstance(angles, tuple)
        and all(angle.shape in ((1, NUM_SAMPLES, width), (1, NUM_SAMPLES, width // 2)) for angle in angles)
    )


def _plan(attention: AttentionBackend, device: torch.device) -> None:
    """Attention over `NUM_SAMPLES` tokens of one sequence in page 0."""
    assert NUM_SAMPLES <= PAGE_SIZE
    rows = torch.arange(NUM_SAMPLES, device=device)
    attention.plan(AttentionBatch((NUM_SAMPLES,), (NUM_SAMPLES,), ((0,),), rows))


def _watch(model: Any, layers: Mapping[str, Any]) -> dict[str, _Seen]:
    """One forward of the model as it is; what each layer was given, by path."""
    kwargs: dict[str, dict[str, Any]] = {}
    params: dict[str, AttentionParams] = {}

    def watched(path: str, layer: Any) -> Callable[[], None]:
        forward, hook = layer.forward, layer.self_attn.lorry_attention

        def record(*args: Any, **given: Any) -> Any:
            kwargs[path] = given
            return forward(*args, **given)

        def record_params(q: Tensor, k: Tensor, v: Tensor, wanted: AttentionParams) -> Tensor:
            params[path] = wanted
            attended: Tensor = hook(q, k, v, wanted)
            return attended

        layer.forward, layer.self_attn.lorry_attention = record, record_params

        def undo() -> None:
            layer.forward, layer.self_attn.lorry_attention = forward, hook

        return undo

    undo = [watched(path, layer) for path, layer in layers.items() if hasattr(layer.self_attn, "lorry_attention")]
    rows = torch.arange(NUM_SAMPLES, device=model.device)[None]
    model(input_ids=rows, position_ids=rows, use_cache=False)
    for restore in undo:
        restore()
    return {path: _Seen(kwargs[path], params[path]) for path in kwargs if path in params}


def _proves(block: Block, layer: Any, kwargs: dict[str, Any]) -> bool:
    """On small input, beside which what the layer adds is large."""
    weight = layer.input_layernorm.weight
    x = 0.02 * torch.randn(1, NUM_SAMPLES, weight.shape[0], device=weight.device, dtype=weight.dtype)
    theirs = layer.forward(x.clone(), **kwargs)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    return _share_that_agrees(block.forward(x.clone(), **kwargs)[0], theirs[0]) >= _ROWS_THAT_AGREE


def _share_that_agrees(ours: Tensor, theirs: Tensor) -> float:
    """Share of the rows that differ by rounding only: by 3 % of their norm in 16-bit types, 0.5 % in float32 (which
    tensor cores round to TF32)."""
    bound = 5e-3 if ours.dtype == torch.float32 else 3e-2
    error = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    return float((error <= bound).float().mean())


def _chain(model: nn.Module, layers: Mapping[str, Any], blocks: Mapping[str, Block]) -> None:
    """Put the blocks in place; each computes the input norm of the next one, the last one the norm behind all."""
    for path, block in blocks.items():
        parent, _, number = path.rpartition(".")
        following = f"{parent}.{int(number) + 1}" if number.isdecimal() else ""
        if following in blocks:
            block.following = blocks[following].input
        elif following not in layers:
            norm = getattr(model.get_submodule(parent.rpartition(".")[0]), "norm", None)
            if isinstance(norm, nn.Module) and is_rms_norm(norm):
                block.following = NormInput(Norm.of(norm))
                norm.forward = _final_norm(block.following)
        layers[path].forward = block.forward


def _final_norm(source: NormInput) -> Callable[[Tensor], Tensor]:
    return lambda hidden_states: source.take(hidden_states)[None]
