"""A layer's attention projections with LoRA at almost no launch of its own.

The product of a projection is our own, whose first programs do the shrink (`product_and_shrink`, few rows), or that
of any library, followed by the shrink (`shrink_after`). The expand is done by the kernel that reads the product
anyway: norm, rotary and KV write behind q, k, v (`norm_rotate_write`), add and norm behind o (`add_and_norm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorry.kernels.dense import (
    SPLIT_UNIT,
    LoRATables,
    Segments,
    choose_config,
    launch_options,
    lora_shrink,
    supports_pdl,
    three,
)
from lorry.kernels.dense_add_norm_kernels import add_norm_row_kernel, add_norm_tile_kernel
from lorry.kernels.dense_fused_kernels import product_kernel, qkv_row_kernel, qkv_tile_kernel
from lorry.kernels.dense_kernels import INTERPRETED

MAX_ROWS_BY_ROW = 16 if INTERPRETED else 256
"""Up to so many rows the expand of each row is its own program; above, that of tiles of a segment."""


NARROW = 2560
"""Up to so many output features the product is cut into more parts of the K axis."""


@dataclass(frozen=True)
class GroupLoRA:
    """LoRA of sibling sites in one step: where weights are, who has which, and the room for rank rows.

    `token_slots` [T] int32 is the slot of each row, -1 for none: the segments with a slot hold exactly the others.
    """

    tables: LoRATables
    sites: tuple[int, ...]
    segments: Segments
    token_slots: Tensor
    max_rank: int


@dataclass(frozen=True)
class Projected:
    """A projection before LoRA is added: its sum over the first axis of `parts` [P, T, out]; h of `lora_shrink`."""

    parts: Tensor
    h: Tensor | None


@dataclass(frozen=True)
class ProductConfig:
    """Tiles of the product for few rows, and of the shrink in it (see `DenseConfig`)."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    shrink_k: int


@dataclass(frozen=True)
class Heads:
    """What q, k and v become: heads, norm weights [D] or None, eps, and cos, sin [T, D] (the halves alike)."""

    num_q: int
    num_kv: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


def choose_product(num_rows: int, out_features: int, dtype: torch.dtype) -> ProductConfig:
    """Tiles measured on an H200 at Qwen3-30B-A3B's attention shapes, with 8 adapters of rank 16; float32 small."""
    if INTERPRETED:
        return ProductConfig(16, 32, 32, 2, 4, 2, 32)
    block_m = min(128, max(16, 1 << (num_rows - 1).bit_length()))
    if dtype == torch.float32:
        return ProductConfig(min(block_m, 64), 64, 64, 4, 4, 2, 64)
    narrow = out_features <= NARROW
    if block_m > 32 and not narrow:
        return ProductConfig(block_m, 128, 64, 2, 8, 4, 64)
    return ProductConfig(block_m, 64, 128, 4, 4, 3 if not narrow else 5 if block_m == 16 else 4, 128)


def project(x: Tensor, weight: Tensor, lora: GroupLoRA | None) -> Projected:
    """x W^T and h by the way that is faster: our product for few rows, else torch's, with the shrink beside it.

    Shapes and guarantees are those of `product_and_shrink` and `shrink_after`.
    """
    num_rows = x.shape[0]
    if INTERPRETED:
        ours = num_rows <= MAX_ROWS_BY_ROW
    else:
        ours = num_rows <= 32 or (num_rows <= 128 and lora is not None and weight.shape[0] <= NARROW)
    return product_and_shrink(x, weight, lora) if ours else shrink_after(x, x @ weight.T, lora)


def product_and_shrink(
    x: Tensor, weight: Tensor, lora: GroupLoRA | None, config: ProductConfig | None = None
) -> Projected:
    """parts[., t, n] = sum_k x[t, k] weight[n, k], in parts of the K axis; and h of `lora_shrink`, in one launch.

    x [T, in] of any row stride, weight [out, in] contiguous, of one 16-bit or 32-bit dtype. Both results are new and
    float32; all of `parts` is written, h as by `lora_shrink`. Made for up to 128 rows. Deterministic; rows do not
    depend on each other; safe under graph capture.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    config = choose_product(num_rows, out_features, x.dtype) if config is None else config
    parts = torch.empty((config.splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    h, num_shrink = None, 0
    if lora is not None:
        splits = choose_config(1, in_features, lora.max_rank).splits
        capacity = -(-lora.max_rank // 16) * 16
        h = torch.empty((splits, num_rows, len(lora.sites) * capacity), dtype=torch.float32, device=x.device)
        num_shrink = lora.segments.slots.shape[0] * len(lora.sites) * splits
    tiles = -(-num_rows // config.block_m) * -(-out_features // config.block_n) * config.splits
    _launch(
        product_kernel,
        (num_shrink + tiles,),
        _lora_arguments(lora, h, x),
        parts_ptr=parts,
        x_ptr=x,
        weight_ptr=weight,
        num_rows=num_rows,
        in_features=in_features,
        out_features=out_features,
        x_stride=x.stride(0),
        parts_stride=parts.stride(0),
        num_shrink=num_shrink,
        EVEN_K=in_features % max(config.block_k, config.shrink_k) == 0,
        SPLIT_UNIT=SPLIT_UNIT,
        SHRINK_M=16,
        SHRINK_K=config.shrink_k,
        SPLITS=config.splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return Projected(parts, h)


def norm_rotate_write(
    projected: Projected,
    lora: GroupLoRA | None,
    heads: Heads,
    keys: Tensor,
    values: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """q, k, v = parts summed + scale * h B; q, k = rotary(norm(q, k)); k, v go to rows `write_slots` of the pool.

    parts [P, T, (num_q + 2 num_kv) * D]: q, k, v one after the other, D / 2 a power of two, P 1 above
    `MAX_ROWS_BY_ROW` rows. `lora` and h are None
    together, or those of the projection, with sites q, k, v. keys, values [rows, num_kv, D] are written in place, at
    `write_slots` [T] (integer, -1: nowhere) only, which must differ for all rows. Returns q [T, num_q * D], new, of
    the keys' dtype.
    Norm and rotary are transformers': float32 within, rounded after the norm and after its weight. Rows of slot -1
    get no LoRA. Deterministic; safe under graph capture.
    """
    parts, num_rows, width = projected.parts, projected.parts.shape[1], keys.shape[2]
    assert parts.shape[2] == (heads.num_q + 2 * heads.num_kv) * width
    q = torch.empty((num_rows, heads.num_q * width), dtype=keys.dtype, device=keys.device)
    arguments = _lora_arguments(lora, projected.h, parts)
    common: dict[str, Any] = {
        "q_ptr": q,
        "keys_ptr": keys,
        "values_ptr": values,
        "parts_ptr": parts,
        "cos_ptr": heads.cos,
        "sin_ptr": heads.sin,
        "q_norm_ptr": keys if heads.q_norm is None else heads.q_norm,
        "k_norm_ptr": keys if heads.k_norm is None else heads.k_norm,
        "eps": heads.eps,
        "write_slots_ptr": write_slots,
        "Q_HEADS": heads.num_q,
        "KV_HEADS": heads.num_kv,
        "HALF": width // 2,
        "NORM": heads.q_norm is not None,
        "BLOCK_R": 16,
        "num_stages": 1,
    }
    num_heads = heads.num_q + 2 * heads.num_kv
    if num_rows <= MAX_ROWS_BY_ROW:
        more = {"parts_stride": parts.stride(0), "PARTS": parts.shape[0], "num_warps": 1}
        _launch(qkv_row_kernel, (num_heads, num_rows), arguments, **common, **more)
        return q
    assert parts.shape[0] == 1
    block_m = 16 if INTERPRETED else 64
    groups = -(-num_rows // block_m) + (0 if lora is None else lora.segments.slots.shape[0])
    more = {"num_rows": num_rows, "BLOCK_M": block_m, "num_warps": 4}
    _launch(qkv_tile_kernel, (num_heads, groups), arguments, **common, **more)
    return q


def add_and_norm(
    projected: Projected, lora: GroupLoRA | None, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """residual += parts summed + scale * h B, in place; returns norm(residual) * weight, new.

    parts [P, T, N], residual [T, N] and weight [N] contiguous; `lora` and h are None together, or those of the
    projection, with one site. P is 1 above `MAX_ROWS_BY_ROW` rows. The norm is that of the rounded residual, float32
    within, rounded before the weight, as in transformers. Rows of slot -1 get no LoRA. Deterministic; safe under
    graph capture.
    """
    parts, (num_rows, width) = projected.parts, residual.shape
    y = torch.empty_like(residual)
    arguments = _lora_arguments(lora, projected.h, parts)
    common = {"y_ptr": y, "residual_ptr": residual, "norm_ptr": weight, "eps": eps, "width": width}
    if num_rows <= MAX_ROWS_BY_ROW:
        block_n = 1 << (width - 1).bit_length()
        _launch(
            add_norm_row_kernel,
            (num_rows,),
            arguments,
            **common,
            parts_ptr=parts,
            parts_stride=parts.stride(0),
            PARTS=parts.shape[0],
            BLOCK_N=block_n,
            BLOCK_R=16,
            num_warps=min(16, max(1, block_n // (128 if lora is None else 256))),
        )
        return y
    assert parts.shape[0] == 1
    block_m = 16
    tiles = 1 if lora is None else -(-lora.segments.max_len // block_m)
    row_groups = -(-num_rows // (tiles * block_m))
    _launch(
        add_norm_tile_kernel,
        (row_groups + (0 if lora is None else lora.segments.slots.shape[0]), tiles),
        arguments,
        **common,
        x_ptr=parts,
        num_rows=num_rows,
        BLOCK_M=block_m,
        BLOCK_N=32 if INTERPRETED else 256,
        BLOCK_R=16,
        num_warps=4,
        num_stages=1,
    )
    return y


def shrink_after(x: Tensor, y: Tensor, lora: GroupLoRA | None) -> Projected:
    """`Projected` of a product y = x W^T [T, out] that any library has computed: adds the shrink."""
    if lora is None:
        return Projected(y[None], None)
    config = choose_config(lora.segments.max_len, x.shape[1], lora.max_rank)
    h = lora_shrink(x, lora.tables, lora.sites, lora.segments, lora.max_rank, config)
    return Projected(y[None], h)


def _lora_arguments(lora: GroupLoRA | None, h: Tensor | None, unused: Tensor) -> dict[str, Any]:
    """What all kernels here know about LoRA; without it, `unused` stands for every tensor."""
    assert (lora is None) == (h is None)
    if lora is None or h is None:
        tensors = (
            "h",
            "data",
            "a_offset",
            "b_offset",
            "rank",
            "scale",
            "indptr",
            "slots",
            "permutation",
            "token_slots",
        )
        numbers = ("num_segments", "site0", "site1", "site2", "num_slots", "h_split_stride", "h_stride", "max_rank")
        flags = {"LORA": False, "H_PARTS": 1, "HAS_PERMUTATION": False}
        return {f"{name}_ptr": unused for name in tensors} | dict.fromkeys(numbers, 0) | flags
    site0, site1, site2 = three(lora.sites)
    permutation = lora.segments.permutation
    return {
        "h_ptr": h,
        "data_ptr": lora.tables.data,
        "a_offset_ptr": lora.tables.a_offset,
        "b_offset_ptr": lora.tables.b_offset,
        "rank_ptr": lora.tables.rank,
        "scale_ptr": lora.tables.scale,
        "indptr_ptr": lora.segments.indptr,
        "slots_ptr": lora.segments.slots,
        "permutation_ptr": lora.segments.slots if permutation is None else permutation,
        "token_slots_ptr": lora.token_slots,
        "num_segments": lora.segments.slots.shape[0],
        "site0": site0,
        "site1": site1,
        "site2": site2,
        "num_slots": lora.tables.rank.shape[1],
        "h_split_stride": h.stride(0),
        "h_stride": h.stride(1),
        "max_rank": h.shape[2] // len(lora.sites),
        "LORA": True,
        "H_PARTS": h.shape[0],
        "HAS_PERMUTATION": permutation is not None,
    }


def _launch(kernel: Any, grid: tuple[int, ...], lora_arguments: dict[str, Any], **arguments: Any) -> None:
    """Launch with those of the LoRA arguments that the kernel has."""
    pdl = supports_pdl(arguments["y_ptr" if "y_ptr" in arguments else "parts_ptr"].device)
    shared = {name: value for name, value in lora_arguments.items() if name in kernel.arg_names}
    kernel[grid](**shared, **arguments, PDL=pdl, **launch_options(pdl))
