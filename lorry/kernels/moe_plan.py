"""Where each pair finds its LoRA weights: the tables of all adapters, looked up once per layer and step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorry.kernels.moe_sort import PairOrder
from lorry.kernels.tables import LoRATables

RANK_STEP = 16
"""Ranks are rounded up to whole steps in workspaces; kernels read h in such steps."""


class PlanTensors(NamedTuple):
    """`LoRAPlan` as kernels take it."""

    rank: Tensor
    a: Tensor
    b: Tensor
    scale: Tensor


class BlockTensors(NamedTuple):
    """`TileBlocks` as kernels take them."""

    num_blocks: Tensor
    slot: Tensor
    row: Tensor
    rows: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoRASites:
    """The adapters of one step at one layer: `first` are the sites of gate and up (or up alone), `down` its site.

    `token_slots` [T] int32 (-1: base). `max_rank` is at least every rank in `tables` at these sites; it sizes
    workspaces and loops, so a graph is captured with the largest rank that it may ever meet.
    """

    tables: LoRATables
    token_slots: Tensor
    first: tuple[int, ...]
    down: int
    max_rank: int

    @property
    def sites(self) -> tuple[int, ...]:
        return (*self.first, self.down)


@dataclass(frozen=True)
class TileBlocks:
    """What the tiles of a large product expand: blocks of `RANK_STEP` rank rows of B of each slot in the tile.

    `num_blocks` [num_sites, max_tiles] of each tile. Of block i of the tile that starts at position p, at
    p * `per_row` + i in [num_sites, P * per_row]: `slot`, `row` its first rank row, `rows` how many of its rank rows
    there are (int32), `b` where that row is in `data` (int64, in the plan's `unit`).
    """

    tensors: BlockTensors
    per_row: int

    def at(self, first: int, last: int) -> TileBlocks:
        """Of sites first .. last - 1 alone."""
        return TileBlocks(BlockTensors(*(t[first:last] for t in self.tensors)), self.per_row)


@dataclass(frozen=True)
class LoRAPlan:
    """By site and sorted position [num_sites, P]: `rank` (0: no LoRA), `a`, `b` where the first rank row of its
    expert's A and B is in `data`, in units of `unit` elements, `scale`. Where rank is 0 the rest is not valid.
    """

    data: Tensor
    tensors: PlanTensors
    unit: int
    blocks: TileBlocks | None = None

    @property
    def num_sites(self) -> int:
        return self.tensors.rank.shape[0]

    def at(self, first: int, last: int) -> LoRAPlan:
        """Of sites first .. last - 1 alone."""
        tensors = PlanTensors(*(t[first:last] for t in self.tensors))
        return LoRAPlan(self.data, tensors, self.unit, self.blocks and self.blocks.at(first, last))


@triton.jit
def look_up(tables, column, expert, on, IN: tl.constexpr, OUT: tl.constexpr, HAS_SHARED: tl.constexpr,
            UNIT: tl.constexpr):  # fmt: skip
    """(rank, a, b, scale) of a `LoRAPlan`, from column site * num_slots + slot of the tables; rank 0 if not `on`."""
    rank = tl.load(tables.rank + column, mask=on, other=0)
    a = tl.load(tables.a_offset + column, mask=on, other=0)
    b = tl.load(tables.b_offset + column, mask=on, other=0)
    scale = tl.load(tables.scale + column, mask=on, other=0.0)
    a_row = expert.to(tl.int64) * rank
    b_row = a_row
    if HAS_SHARED:
        shared = tl.load(tables.shared + column, mask=on, other=0)
        a_row = tl.where(shared & 1 != 0, 0, a_row)
        b_row = tl.where(shared & 2 != 0, 0, b_row)
    return rank, (a + a_row * IN) // UNIT, (b + b_row * OUT) // UNIT, scale


@triton.jit
def plan_site(at, column, expert, on, live, tables, plan, IN: tl.constexpr, OUT: tl.constexpr,
              HAS_SHARED: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Fill the plan of one site at the places `at` that are `live`; (rank, b)."""
    rank, a, b, scale = look_up(tables, column, expert, on, IN, OUT, HAS_SHARED, UNIT)
    tl.store(plan.rank + at, rank, mask=live)
    tl.store(plan.a + at, a, mask=live)
    tl.store(plan.b + at, b, mask=live)
    tl.store(plan.scale + at, scale, mask=live)
    return rank, b


@triton.jit
def _list_blocks(blocks, site, tile, max_tiles, first, per_row, num_places, slot, rank, b, starts,
                 WIDTH: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """The blocks of one tile at one site, from its positions that start another slot."""
    STEP: tl.constexpr = 16
    own = tl.where(starts, (rank + STEP - 1) // STEP, 0)
    tl.store(blocks.num_blocks + site * max_tiles + tile, tl.sum(own, 0))
    at = site * num_places + first * per_row + tl.cumsum(own, 0) - own
    for i in range(0, tl.max(own, 0)):
        mask = i < own
        tl.store(blocks.slot + at + i, slot, mask=mask)
        tl.store(blocks.row + at + i, i * STEP, mask=mask)
        tl.store(blocks.rows + at + i, tl.minimum(rank - i * STEP, STEP), mask=mask)
        tl.store(blocks.b + at + i, b + i * (STEP * WIDTH // UNIT), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "site_0", "site_1", "site_2", "num_pairs", "max_tiles", "per_row"])
def _plan_kernel(
    order, tables, plan, blocks, num_slots, site_0, site_1, site_2, num_pairs, max_tiles, per_row,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, SITES: tl.constexpr, ENDS_WITH_DOWN: tl.constexpr,
    HAS_SHARED: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(order.counts):
        first = tl.load(order.tile_start + tile)
        at = first + tl.arange(0, BLOCK_M)
        live = at < tl.load(order.tile_end + tile)
        slot = tl.load(order.slots + at, mask=live, other=-1)
        expert = tl.load(order.tile_expert + tile)
        on = live & (slot >= 0)
        before = tl.load(order.slots + at - 1, mask=on & (at > first), other=-1)
        sites = (site_0, site_1, site_2)
        for i in tl.static_range(SITES):
            rank, b = plan_site(i * num_pairs + at, sites[i] * num_slots + slot, expert, on, live, tables, plan,
                                INTER if ENDS_WITH_DOWN and i == SITES - 1 else HIDDEN,
                                HIDDEN if ENDS_WITH_DOWN and i == SITES - 1 else INTER, HAS_SHARED, UNIT)  # fmt: skip
            if LIST:
                _list_blocks(blocks, i, tile, max_tiles, first, per_row, num_pairs * per_row, slot, rank, b,
                             on & (slot != before), HIDDEN if ENDS_WITH_DOWN and i == SITES - 1 else INTER,
                             UNIT)  # fmt: skip


def site_arguments(sites: tuple[int, ...]) -> tuple[int, int, int]:
    """Three site numbers, the last repeated where there are fewer."""
    return sites[0], sites[min(1, len(sites) - 1)], sites[-1]


def empty_plan(tables: LoRATables, num_sites: int, num_pairs: int, hidden: int, inter: int) -> LoRAPlan:
    """An unfilled plan; `unit` is 16 where every row starts at a multiple of 16 elements, for wide loads."""
    device = tables.data.device
    dtypes = (torch.int32, torch.int64, torch.int64, torch.float32)
    tensors = PlanTensors(*(torch.empty(num_sites, num_pairs, dtype=dtype, device=device) for dtype in dtypes))
    return LoRAPlan(tables.data, tensors, 16 if hidden % 16 == 0 and inter % 16 == 0 else 1)


def _empty_blocks(order: PairOrder, num_sites: int, max_rank: int) -> TileBlocks:
    per_row, device = triton.cdiv(max_rank, RANK_STEP), order.tensors.pairs.device
    count = torch.empty(num_sites, order.max_tiles, dtype=torch.int32, device=device)
    shape = (num_sites, order.num_pairs * per_row)
    assert shape[0] * shape[1] < 2**31, "the kernels address blocks with 32 bits"
    dtypes = (torch.int32, torch.int32, torch.int32, torch.int64)
    return TileBlocks(
        BlockTensors(count, *(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes)), per_row
    )


def plan_lora(
    order: PairOrder,
    tables: LoRATables,
    sites: tuple[int, ...],
    hidden: int,
    inter: int,
    ends_with_down: bool,
    max_rank: int = 0,
) -> LoRAPlan:
    """plan[s, position] = tables[sites[s], slot], with the offset of the position's expert; see `LoRAPlan`.

    `order` with its slots (-1: rank 0). Sites read `hidden` and write `inter` elements, with
    `ends_with_down` the last one the other way round. With `max_rank` (at least every rank) the plan has `blocks`.
    New tensors, every live position written; safe under graph capture.
    """
    plan = empty_plan(tables, len(sites), order.num_pairs, hidden, inter)
    blocks = _empty_blocks(order, len(sites), max_rank) if max_rank else None
    _plan_kernel[(order.max_tiles,)](
        order.tensors,
        tables.tensors,
        plan.tensors,
        plan.tensors if blocks is None else blocks.tensors,
        tables.num_slots,
        *site_arguments(sites),
        order.num_pairs,
        order.max_tiles,
        0 if blocks is None else blocks.per_row,
        HIDDEN=hidden,
        INTER=inter,
        SITES=len(sites),
        ENDS_WITH_DOWN=ends_with_down,
        HAS_SHARED=tables.shared is not None,
        UNIT=plan.unit,
        BLOCK_M=order.block_m,
        LIST=blocks is not None,
        num_warps=4,
    )
    return replace(plan, blocks=blocks)
