"""A layer's attention projections with LoRA at almost no launch of its own.

The product of a projection is our own, whose first programs do the shrink (`product_and_shrink`, few rows), or that
of any library, followed by the shrink (`shrink_after`). The expand is done by the kernel that reads the product
anyway: norm, rotary and KV write behind q, k, v (`norm_rotate_write`), add and norm behind o (`add_and_norm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from lorry.kernels.dense import (
    SPLIT_UNIT,
    Segments,
    choose_config,
    launch_options,
    lora_pointers,
    lora_shrink,
    supports_pdl,
    three,
)
from lorry.kernels.dense_add_norm_kernels import add_norm_row_kernel, add_norm_tile_kernel
from lorry.kernels.dense_fused_kernels import product_kernel, qkv_row_kernel, qkv_tile_kernel
from lorry.kernels.dense_kernels import INTERPRETED
from lorry.kernels.dense_tiles import BASE_TILES
from lorry.kernels.tables import LoRATables

MAX_ROWS_BY_ROW = 16 if INTERPRETED else 256
"""Up to so many rows the expand of each row is its own program; above, that of tiles of a segment."""

TILE_ELEMENTS = 256 if INTERPRETED else 8192
"""What four warps of `add_and_norm` for many rows hold in registers: the same with LoRA and without, so that the
squares of a row are summed in one order."""

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
class TileConfig:
    """Tiles of `norm_rotate_write` for many rows: rows and heads of a program, and the most registers of a thread."""

    block_m: int
    heads: int
    warps: int
    registers: int | None


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


def choose_tiles(heads: Heads, lora: bool) -> TileConfig:
    """Tiles measured on an H200 at Qwen3-30B-A3B's heads; the heads of a program are all of q, of k or of v."""
    few = gcd(heads.num_q, heads.num_kv, 4)
    if INTERPRETED:
        return TileConfig(16, few, 4, None)
    return TileConfig(32, few, 4, 128) if lora else TileConfig(32, 1, 4, None)


def project(x: Tensor, weight: Tensor, lora: GroupLoRA | None) -> Projected:
    """x W^T and h by the way that is faster: our product for few rows, else torch's, with the shrink beside it.

    Shapes and guarantees are those of `product_and_shrink` and `shrink_after`.
    """
    num_rows = x.shape[0]
    if INTERPRETED:
        ours = num_rows <= MAX_ROWS_BY_ROW
    else:
        ours = num_rows <= 32 or (num_rows <= 128 and weight.shape[0] <= NARROW)
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
    product_kernel[(num_shrink + tiles,)](
        parts,
        x,
        weight,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        parts.stride(0),
        num_shrink,
        **_lora_arguments(lora, h, parts),
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
    pools = (q, keys, values)
    norms = (keys if heads.q_norm is None else heads.q_norm, keys if heads.k_norm is None else heads.k_norm)
    others = (heads.cos, heads.sin, *norms, heads.eps, write_slots)
    sizes = {"Q_HEADS": heads.num_q, "KV_HEADS": heads.num_kv, "HALF": width // 2, "NORM": heads.q_norm is not None}
    options = _lora_arguments(lora, projected.h, q) | sizes | {"BLOCK_R": 16, "num_stages": 1}
    num_heads = heads.num_q + 2 * heads.num_kv
    if num_rows <= MAX_ROWS_BY_ROW:
        qkv_row_kernel[(num_heads, num_rows)](
            *pools, parts, parts.stride(0), *others, **options, PARTS=parts.shape[0], num_warps=1
        )
        return q
    assert parts.shape[0] == 1
    config = choose_tiles(heads, lora is not None)
    grid = (num_heads // config.heads, *_tiles(num_rows, config.block_m, lora))
    qkv_tile_kernel[grid](
        *pools, parts, *others, num_rows, **options,
        HEADS=config.heads, BLOCK_M=config.block_m, num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
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
    options = _lora_arguments(lora, projected.h, y)
    block_n = 1 << (width - 1).bit_length()
    if num_rows <= MAX_ROWS_BY_ROW:
        add_norm_row_kernel[(num_rows,)](
            y, residual, parts, parts.stride(0), weight, eps, width, **options,
            PARTS=parts.shape[0], BLOCK_N=block_n, BLOCK_R=16,
            num_warps=min(16, max(1, block_n // 256)),
        )  # fmt: skip
        return y
    assert parts.shape[0] == 1
    block_m = max(1, TILE_ELEMENTS // block_n)
    add_norm_tile_kernel[_tiles(num_rows, block_m, lora)](
        y, residual, parts, weight, eps, width, num_rows, **options,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=2, num_warps=4 * max(1, block_n // TILE_ELEMENTS),
    )  # fmt: skip
    return y


def shrink_after(x: Tensor, y: Tensor, lora: GroupLoRA | None) -> Projected:
    """`Projected` of a product y = x W^T [T, out] that any library has computed: adds the shrink."""
    if lora is None:
        return Projected(y[None], None)
    segments = lora.segments
    config = choose_config(segments.max_len, x.shape[1], lora.max_rank, segments.slots.shape[0])
    return Projected(y[None], lora_shrink(x, lora.tables, lora.sites, segments, lora.max_rank, config))


def _tiles(num_rows: int, block_m: int, lora: GroupLoRA | None) -> tuple[int, int]:
    """(tiles of a group, groups) of a kernel that works by `dense_tiles.tile_of_rows`."""
    if lora is None:
        return -(-num_rows // block_m), 1
    tiles = -(-lora.segments.max_len // block_m)
    return tiles, lora.segments.slots.shape[0] + -(-num_rows // (tiles * block_m * BASE_TILES))


def _lora_arguments(lora: GroupLoRA | None, h: Tensor | None, result: Tensor) -> dict[str, Any]:
    """What all kernels here are told of LoRA (without it `result` stands for every tensor), and of their launch."""
    assert (lora is None) == (h is None)
    pdl = supports_pdl(result.device)
    names = ("site0", "site1", "site2", "num_segments", "num_slots", "h_split_stride", "h_stride", "max_rank")
    pointers: tuple[Tensor, ...] = (result,) * 10
    numbers: tuple[int, ...] = (0,) * len(names)
    if lora is not None and h is not None:
        pointers = lora_pointers(h, lora.tables, lora.segments, lora.token_slots)
        num_segments, num_slots = lora.segments.slots.shape[0], lora.tables.rank.shape[1]
        max_rank = h.shape[2] // len(lora.sites)
        numbers = (*three(lora.sites), num_segments, num_slots, h.stride(0), h.stride(1), max_rank)
    return {
        "lora": pointers,
        **dict(zip(names, numbers, strict=True)),
        "LORA": lora is not None,
        "H_PARTS": 1 if h is None else h.shape[0],
        "HAS_PERMUTATION": lora is not None and lora.segments.permutation is not None,
        "PDL": pdl,
        **launch_options(pdl),
    }
