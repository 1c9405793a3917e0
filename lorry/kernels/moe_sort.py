"""One order of the (row, choice) pairs of an experts layer: by expert and then adapter slot, cut into tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNTED_PAIRS = 2048
"""Up to so many pairs each pair counts the smaller keys; above, a histogram, a scan and a scatter."""

_NO_KEY = tl.constexpr(0x7FFFFFFF)


class OrderTensors(NamedTuple):
    """The tensors of a `PairOrder` that every sort fills, as kernels take them."""

    pairs: Tensor
    slots: Tensor
    tile_expert: Tensor
    tile_start: Tensor
    tile_end: Tensor
    group_start: Tensor
    group_end: Tensor
    counts: Tensor


@dataclass(frozen=True)
class PairOrder:
    """Pair p is choice p % K of row p // K. All tensors int32 on the device; live lengths are in `counts`.

    `pairs`, `slots` [P]: pair and slot (-1 base) at each sorted position; pairs of an expert outside
    0..num_experts-1 have no position, and the positions they leave at the end are never written.
    `tile_expert`, `tile_start`, `tile_end` [max_tiles]: product tiles, `block_m` positions of one expert from
    `tile_start`, those from `tile_end` on left out. `counts[0]` of them are live.
    `group_start`, `group_end` [max_groups]: at most `group_m` positions of one expert and slot, base rows left out;
    `counts[1]` are live, of which those with `group_start` -1 are empty. `counts[2]` positions are live.
    `positions` [P]: position of each pair, -1 where it has none; None from the counting sort.
    """

    tensors: OrderTensors
    positions: Tensor | None
    num_experts: int
    block_m: int
    group_m: int

    @property
    def num_pairs(self) -> int:
        return self.tensors.pairs.numel()

    @property
    def max_tiles(self) -> int:
        return self.tensors.tile_expert.numel()

    @property
    def max_groups(self) -> int:
        return self.tensors.group_start.numel()


@triton.jit
def _pair_key(expert, slot, valid, num_experts, slot_stride):
    inside = valid & (expert >= 0) & (expert < num_experts)
    return tl.where(inside, expert * slot_stride + slot + 1, _NO_KEY)


@triton.jit
def load_pairs(experts_ptr, token_slots_ptr, pair, num_pairs, NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr):
    valid = pair < num_pairs
    expert = tl.load(experts_ptr + pair, mask=valid, other=-1).to(tl.int32)
    if HAS_SLOTS:
        slot = tl.load(token_slots_ptr + pair // NUM_CHOICES, mask=valid, other=-1)
    else:
        slot = tl.full(pair.shape, -1, tl.int32)
    return expert, slot, valid


@triton.jit
def place_pairs(
    program, experts_ptr, token_slots_ptr, order, num_pairs, num_experts, slot_stride, NUM_CHOICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Place CHUNK pairs by counting the smaller keys: (position, expert, slot, whether it has a place) of each."""
    every = tl.arange(0, PAIRS)
    expert, slot, valid = load_pairs(experts_ptr, token_slots_ptr, every, num_pairs, NUM_CHOICES, HAS_SLOTS)
    key = _pair_key(expert, slot, valid, num_experts, slot_stride)
    own = program * CHUNK + tl.arange(0, CHUNK)
    own_expert, own_slot, own_valid = load_pairs(experts_ptr, token_slots_ptr, own, num_pairs, NUM_CHOICES, HAS_SLOTS)
    own_key = _pair_key(own_expert, own_slot, own_valid, num_experts, slot_stride)
    equal = key[None, :] == own_key[:, None]
    smaller = tl.sum((key[None, :] < own_key[:, None]).to(tl.int32), 1)
    earlier = tl.sum((equal & (every[None, :] < own[:, None])).to(tl.int32), 1)
    total = tl.sum(equal.to(tl.int32), 1)
    at = smaller + earlier
    stays = own_key != _NO_KEY
    starts = (earlier % GROUP_M == 0) & (own_slot >= 0)
    tl.store(order.pairs + at, own, mask=stays)
    tl.store(order.slots + at, own_slot, mask=stays)
    tl.store(order.group_start + at, tl.where(starts, at, -1), mask=stays)
    tl.store(order.group_end + at, tl.minimum(smaller + total, at + GROUP_M), mask=stays)
    return at, own_expert, own_slot, stays


@triton.jit
def count_tiles(experts_ptr, order, num_pairs, num_experts, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
                BLOCK_M: tl.constexpr):  # fmt: skip
    """List the product tiles of all experts; one program."""
    pair = tl.arange(0, PAIRS)
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    inside = (expert >= 0) & (expert < num_experts)
    count = tl.histogram(tl.where(inside, expert, 0), EXPERTS, mask=inside)
    end = tl.cumsum(count, 0)
    _list_tiles(tl.arange(0, EXPERTS), end - count, end, 0, order, BLOCK_M)
    tl.store(order.counts, tl.sum((count + BLOCK_M - 1) // BLOCK_M, 0))
    tl.store(order.counts + 1, tl.sum(count, 0))
    tl.store(order.counts + 2, tl.sum(count, 0))


@triton.jit
def _list_tiles(expert, start, end, first, order, BLOCK_M: tl.constexpr):
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    at = first + tl.cumsum(tiles, 0) - tiles
    for i in range(0, tl.max(tiles, 0)):
        live = i < tiles
        tl.store(order.tile_expert + at + i, expert, mask=live)
        tl.store(order.tile_start + at + i, start + i * BLOCK_M, mask=live)
        tl.store(order.tile_end + at + i, end, mask=live)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "slot_stride"])
def _count_kernel(
    experts_ptr, token_slots_ptr, order, num_pairs, num_experts, slot_stride, NUM_CHOICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) < PAIRS // CHUNK:
        place_pairs(tl.program_id(0), experts_ptr, token_slots_ptr, order, num_pairs, num_experts, slot_stride,
                    NUM_CHOICES, HAS_SLOTS, PAIRS, CHUNK, GROUP_M)  # fmt: skip
    else:
        count_tiles(experts_ptr, order, num_pairs, num_experts, EXPERTS, PAIRS, BLOCK_M)


@triton.jit
def _spread(pair, slot, SPREAD: tl.constexpr):
    """Where there are no slots, pairs are counted as if of several: fewer of them wait for one counter."""
    return slot if SPREAD == 1 else pair // 512 % SPREAD - 1


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "slot_stride"])
def _histogram_kernel(
    experts_ptr, token_slots_ptr, key_count_ptr, rank_ptr, num_pairs, num_experts, slot_stride,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, slot, valid = load_pairs(experts_ptr, token_slots_ptr, pair, num_pairs, NUM_CHOICES, HAS_SLOTS)
    key = _pair_key(expert, _spread(pair, slot, SPREAD), valid, num_experts, slot_stride)
    stays = key != _NO_KEY
    tl.store(rank_ptr + pair, tl.atomic_add(key_count_ptr + key, 1, mask=stays), mask=stays)


@triton.jit(do_not_specialize=["num_experts", "slot_stride"])
def _scan_kernel(
    key_count_ptr, key_start_ptr, order, num_experts, slot_stride, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """One program; EXPERTS experts at a time, each with SLOTS >= slot_stride keys."""
    position = 0
    num_tiles = 0
    num_groups = 0
    flat = tl.arange(0, EXPERTS * SLOTS)
    for first in range(0, num_experts, EXPERTS):
        expert = first + flat // SLOTS
        key_slot = flat % SLOTS
        live = (expert < num_experts) & (key_slot < slot_stride)
        count = tl.load(key_count_ptr + expert * slot_stride + key_slot, mask=live, other=0)
        end = position + tl.cumsum(count, 0)
        start = end - count
        tl.store(key_start_ptr + expert * slot_stride + key_slot, start, mask=live)
        groups = tl.where(HAS_SLOTS & (key_slot > 0), (count + GROUP_M - 1) // GROUP_M, 0)
        at = num_groups + tl.cumsum(groups, 0) - groups
        for i in range(0, tl.max(groups, 0)):
            own = i < groups
            tl.store(order.group_start + at + i, start + i * GROUP_M, mask=own)
            tl.store(order.group_end + at + i, tl.minimum(start + i * GROUP_M + GROUP_M, end), mask=own)
        num_groups += tl.sum(groups, 0)
        per_expert = tl.sum(tl.reshape(count, (EXPERTS, SLOTS)), 1)
        expert_end = position + tl.cumsum(per_expert, 0)
        each = first + tl.arange(0, EXPERTS)
        _list_tiles(each, expert_end - per_expert, expert_end, num_tiles, order, BLOCK_M)
        num_tiles += tl.sum((per_expert + BLOCK_M - 1) // BLOCK_M, 0)
        position += tl.sum(count, 0)
    tl.store(order.counts, num_tiles)
    tl.store(order.counts + 1, num_groups)
    tl.store(order.counts + 2, position)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "slot_stride"])
def _scatter_kernel(
    experts_ptr, token_slots_ptr, key_start_ptr, rank_ptr, order, positions_ptr, num_pairs, num_experts, slot_stride,
    NUM_CHOICES: tl.constexpr, HAS_SLOTS: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, slot, valid = load_pairs(experts_ptr, token_slots_ptr, pair, num_pairs, NUM_CHOICES, HAS_SLOTS)
    key = _pair_key(expert, _spread(pair, slot, SPREAD), valid, num_experts, slot_stride)
    stays = key != _NO_KEY
    at = tl.load(key_start_ptr + key, mask=stays, other=0) + tl.load(rank_ptr + pair, mask=stays, other=0)
    tl.store(order.pairs + at, pair, mask=stays)
    tl.store(order.slots + at, slot, mask=stays)
    tl.store(positions_ptr + pair, tl.where(stays, at, -1), mask=valid)


def max_product_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most tiles that any routing of so many pairs can need."""
    return max(1, min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m))


def empty_order(
    top_k_index: Tensor, num_slots: int, num_experts: int, block_m: int, group_m: int, counted: bool
) -> PairOrder:
    """An unfilled `PairOrder` with room for any routing of these pairs."""
    num_pairs = top_k_index.numel()
    max_tiles = max_product_tiles(num_pairs, num_experts, block_m)
    max_groups = num_pairs if counted else num_pairs // group_m + min(num_pairs, num_experts * num_slots)
    if not counted:  # products walk whole groups of tiles there, and read before they know how many are live
        max_tiles = triton.cdiv(max_tiles, 16) * 16
    sizes = [num_pairs, num_pairs, max_tiles, max_tiles, max_tiles, *[max(1, max_groups)] * 2, 3]
    tensors = OrderTensors(*(torch.empty(size, dtype=torch.int32, device=top_k_index.device) for size in sizes))
    positions = None if counted else torch.empty_like(tensors.pairs)
    return PairOrder(tensors, positions, num_experts, block_m, group_m)


def count_sizes(num_pairs: int) -> tuple[int, int]:
    """(pairs padded to a power of two, pairs placed by one program) of the counting sort."""
    padded = max(16, triton.next_power_of_2(num_pairs))
    return padded, min(padded, max(1, 2048 // padded))


def sort_pairs(
    top_k_index: Tensor,
    token_slots: Tensor | None,
    num_slots: int,
    num_experts: int,
    block_m: int,
    group_m: int = 16,
    pdl: bool = False,
    counted: bool | None = None,
) -> PairOrder:
    """order = argsort over pairs p of (top_k_index[p], token_slots[p // K]), cut into tiles.

    top_k_index [T, K] (integer, contiguous; outside 0..num_experts-1: the pair is left out), token_slots [T] int32
    (-1: base, below `num_slots`) or None (all base). Returns new tensors, sized by capacity.

    `counted` (default: up to `MAX_COUNTED_PAIRS` pairs): one launch, no atomics, the order is stable. Else three
    launches and a histogram zeroed here, with atomics, so the order within one (expert, slot) is arbitrary; no
    result depends on it.
    Safe under graph capture. With `pdl` the next kernel may start early and must wait before it reads the order.
    """
    num_pairs, num_choices = top_k_index.numel(), top_k_index.shape[1]
    slot_stride = 1 if token_slots is None else num_slots + 1
    if counted is None:
        counted = num_pairs <= MAX_COUNTED_PAIRS
    order = empty_order(top_k_index, 0 if token_slots is None else num_slots, num_experts, block_m, group_m, counted)
    slots = top_k_index if token_slots is None else token_slots
    common = {"NUM_CHOICES": num_choices, "HAS_SLOTS": token_slots is not None}
    if counted:
        padded, chunk = count_sizes(num_pairs)
        _count_kernel[(padded // chunk + 1,)](
            top_k_index,
            slots,
            order.tensors,
            num_pairs,
            num_experts,
            slot_stride,
            **common,
            EXPERTS=triton.next_power_of_2(num_experts),
            PAIRS=padded,
            CHUNK=chunk,
            BLOCK_M=block_m,
            GROUP_M=group_m,
            PDL=pdl,
            num_warps=4,
        )
        return order
    _sort_by_histogram(order, top_k_index, slots, slot_stride, common)
    return order


def _sort_by_histogram(
    order: PairOrder, top_k_index: Tensor, slots: Tensor, slot_stride: int, common: Mapping[str, bool | int]
) -> None:
    num_pairs, num_experts = top_k_index.numel(), order.num_experts
    spread = 1 if common["HAS_SLOTS"] else 8
    slot_stride = max(slot_stride, spread)
    key_count = torch.zeros(num_experts * slot_stride, dtype=torch.int32, device=top_k_index.device)
    key_start, rank = torch.empty_like(key_count), torch.empty_like(order.tensors.pairs)
    grid = (triton.cdiv(num_pairs, 512),)
    sizes = (num_pairs, num_experts, slot_stride)
    options = {**common, "SPREAD": spread, "BLOCK": 512, "num_warps": 4}
    _histogram_kernel[grid](top_k_index, slots, key_count, rank, *sizes, **options)
    keys_per_expert = triton.next_power_of_2(slot_stride)
    experts_at_once = max(1, min(triton.next_power_of_2(num_experts), 4096 // keys_per_expert))
    _scan_kernel[(1,)](
        key_count,
        key_start,
        order.tensors,
        num_experts,
        slot_stride,
        EXPERTS=experts_at_once,
        SLOTS=keys_per_expert,
        BLOCK_M=order.block_m,
        GROUP_M=order.group_m,
        HAS_SLOTS=common["HAS_SLOTS"],
        num_warps=4 if experts_at_once * keys_per_expert <= 512 else 16,
    )
    _scatter_kernel[grid](top_k_index, slots, key_start, rank, order.tensors, order.positions, *sizes, **options)
