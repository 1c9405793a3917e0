"""LoRA on linear layers: shrink and expand over segments of rows, each row with its own adapter.

A *segment* is a run of rows that have one slot: a request, or a chunk of all rows of an adapter. Weights are found
through small tables (`LoRATables`), so any number of adapters at any ranks share one allocation. The grids are made
for capacities on the host; the work there is, is read on the device, so a captured graph replays with any mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lorry.kernels.dense_kernels import INTERPRETED, expand_kernel, shrink_kernel
from lorry.kernels.tables import LoRATables

MAX_SLICES = 3
SPLIT_UNIT = 32 if INTERPRETED else 128
"""Parts of the K axis are multiples of this, whatever the tiles: a multiple of every `shrink_k`."""


FULL_GRID = 100
"""So many programs keep a GPU busy: fewer are cut along the K axis, at the price of partial sums."""


@dataclass(frozen=True)
class Segments:
    """Rows by segment: `indptr` [S + 1] and `slots` [S] int32, S the capacity; a slot of -1 is no work.

    Segment s holds positions indptr[s] to indptr[s + 1]; position p is row permutation[p], or row p where
    `permutation` is None. No row is in two segments with a slot. `max_len` is the longest segment the grid is made
    for; longer ones are right too, but slower.
    """

    indptr: Tensor
    slots: Tensor
    permutation: Tensor | None
    max_len: int


@dataclass(frozen=True)
class DenseConfig:
    """Tile sizes of both kernels, and how the K axis of the shrink is cut.

    `splits` parts of it are summed in order: by the expand where programs share them, else (`serial`) by the shrink.
    `joined`: one program for all slices, which reads x once. `rank_programs` share the rank rows of a slice.
    """

    splits: int
    serial: bool
    joined: bool
    rank_programs: int
    shrink_m: int
    shrink_r: int
    shrink_k: int
    shrink_warps: int
    shrink_stages: int
    expand_m: int
    expand_n: int
    expand_r: int
    expand_warps: int

    @property
    def num_parts(self) -> int:
        """How many parts of h there are to sum."""
        return 1 if self.serial else self.splits


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it still runs (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def choose_config(max_len: int, in_features: int, max_rank: int, num_segments: int = 1) -> DenseConfig:
    """Tiles for a capacity, measured on an H200. What orders a sum depends on the shape of the weights alone."""
    rank_programs = min(4, -(-max_rank // 16))
    if INTERPRETED:
        rank_programs = min(2, rank_programs)
        return DenseConfig(2, max_len > 8, max_len > 16, rank_programs, 16, 16, 32, 4, 2, 16, 64, 16, 4)
    splits = 1 if in_features < 1024 else 4 if in_features < 8192 else 8
    rows = min(64, max(16, 1 << (max_len - 1).bit_length()))
    if rows <= 32:
        expand_r = 64 if rows == 16 else 16
        return DenseConfig(splits, False, False, rank_programs, rows, 16, 128, 4, 4, rows, 128, expand_r, 4)
    serial = num_segments * -(-max_len // 64) >= FULL_GRID
    return DenseConfig(splits, serial, True, rank_programs, 64, 16, 128, 4, 3, 32, 128, 16, 4)


def lora_shrink(
    x: Tensor, tables: LoRATables, sites: tuple[int, ...], segments: Segments, max_rank: int, config: DenseConfig
) -> Tensor:
    """h[t, i, r] = sum_k x[t, k] A_i[r, k] for rows t, slices i of `sites`, rank rows r of the row's slot.

    x [T, in] of any row stride, bfloat16, float16 or float32. Returns h [parts, T, slices * C] float32, new, where C
    is `max_rank` rounded up to 16: the sum over the first axis is h. `max_rank` is at least the rank of any slot at
    the sites. From a slot's rank to the next multiple of 16 h is zero; past that, and in rows of slot -1, it is not
    written. Nobody needs to zero anything. Deterministic, a row's result does not depend on other rows; safe
    under graph capture. Source: the segmented gather products of punica and S-LoRA, at true ranks.
    """
    assert 1 <= len(sites) <= MAX_SLICES
    assert x.stride(1) == 1
    capacity = -(-max_rank // 16) * 16
    h = torch.empty((config.num_parts, x.shape[0], len(sites) * capacity), dtype=torch.float32, device=x.device)
    joined = len(sites) if config.joined else 1
    pdl = supports_pdl(x.device)
    rank_programs = min(config.rank_programs, -(-max_rank // config.shrink_r))
    grid = (
        segments.slots.shape[0],
        -(-segments.max_len // config.shrink_m),
        len(sites) // joined * rank_programs * config.num_parts,
    )
    shrink_kernel[grid](
        lora_pointers(h, tables, segments, segments.slots),
        x,
        *three(sites),
        tables.rank.shape[1],
        x.shape[1],
        x.stride(0),
        h.stride(0),
        h.stride(1),
        capacity,
        JOIN=joined,
        COLUMNS=config.shrink_r * (1 if joined == 1 else 2 if joined == 2 else 4),
        RANK_PROGRAMS=rank_programs,
        SPLITS=config.splits,
        SERIAL=config.serial,
        HAS_PERMUTATION=segments.permutation is not None,
        EVEN_K=x.shape[1] % config.shrink_k == 0,
        SPLIT_UNIT=SPLIT_UNIT,
        BLOCK_M=config.shrink_m,
        BLOCK_R=config.shrink_r,
        BLOCK_K=config.shrink_k,
        PDL=pdl,
        num_warps=config.shrink_warps,
        num_stages=config.shrink_stages,
        **launch_options(pdl),
    )
    return h


def lora_expand(
    y: Tensor,
    h: Tensor,
    tables: LoRATables,
    sites: tuple[int, ...],
    widths: tuple[int, ...],
    segments: Segments,
    config: DenseConfig,
) -> None:
    """y[t, columns of slice i] += scale_i * sum_r h[t, i, r] B_i[r, :], in place, for the rows t of the segments.

    y [T, sum(widths)] of any row stride; the slices' columns follow each other. h is what `lora_shrink` returned for
    the same sites, segments and config. h is rounded to y's dtype, products are summed in float32, y is rounded once.
    Rows of slot -1 and slices that a row's slot does not touch (rank 0) are neither read nor written.
    Must follow its `lora_shrink` on the same stream with no other kernel between. Deterministic; safe under graph
    capture.
    """
    assert len(sites) == len(widths)
    assert y.stride(1) == 1
    assert y.shape[1] == sum(widths)
    pdl = supports_pdl(y.device)
    grid = (
        segments.slots.shape[0],
        -(-segments.max_len // config.expand_m),
        sum(-(-width // config.expand_n) for width in widths),
    )
    expand_kernel[grid](
        lora_pointers(h, tables, segments, segments.slots),
        y,
        *three(sites),
        tables.rank.shape[1],
        *three(widths),
        y.stride(0),
        h.stride(0),
        h.stride(1),
        h.shape[2] // len(sites),
        PARTS=h.shape[0],
        HAS_PERMUTATION=segments.permutation is not None,
        BLOCK_M=config.expand_m,
        BLOCK_N=config.expand_n,
        FIRST_R=16,
        BLOCK_R=config.expand_r,
        PDL=pdl,
        num_warps=config.expand_warps,
        num_stages=1,
        **launch_options(pdl),
    )


def add_lora(
    y: Tensor,
    x: Tensor,
    tables: LoRATables,
    sites: tuple[int, ...],
    widths: tuple[int, ...],
    segments: Segments,
    max_rank: int,
    config: DenseConfig | None = None,
) -> None:
    """y += scale * (x A^T) B for each row's own adapter, in place: `lora_shrink`, then `lora_expand`.

    Shapes, dtypes and guarantees are theirs; `config` None chooses by capacity. No rows or no segments: no launch.
    """
    if x.shape[0] == 0 or segments.slots.shape[0] == 0:
        return
    if config is None:
        config = choose_config(segments.max_len, x.shape[1], max_rank, segments.slots.shape[0])
    h = lora_shrink(x, tables, sites, segments, max_rank, config)
    lora_expand(y, h, tables, sites, widths, segments, config)


def lora_pointers(h: Tensor, tables: LoRATables, segments: Segments, token_slots: Tensor) -> tuple[Tensor, ...]:
    """The tensors of LoRA as all kernels take them; those that read no `token_slots` may be given any."""
    permutation = segments.slots if segments.permutation is None else segments.permutation
    found = (tables.a_offset, tables.b_offset, tables.rank, tables.scale)
    return (h, tables.data, *found, segments.indptr, segments.slots, permutation, token_slots)


def three(values: tuple[int, ...]) -> tuple[int, int, int]:
    """`values` of one to three slices, followed by zeros."""
    padded = (*values, 0, 0)
    return padded[0], padded[1], padded[2]


def launch_options(pdl: bool) -> dict[str, bool]:
    """Arguments of a launch that may overlap the one before it, or may not."""
    return {"launch_pdl": True} if pdl else {}
