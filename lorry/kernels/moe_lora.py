"""LoRA on experts: shrink h = scale * A x, beside the sort or on its own, and expand of the stand-alone add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorry.kernels.moe_plan import RANK_STEP, look_up, plan_site
from lorry.kernels.moe_sort import count_tiles, place_pairs
from lorry.kernels.moe_tile import dot


@triton.jit
def _shrink_rows(x_row, a_ptr, rank, scale, h_row, other_h_row, other_scale, start, step, twice, K: tl.constexpr,
                 BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """h_row[r] = scale * a[r] . x for r in start, start + step, .. blocks; with `twice` into other_h_row as well.

    WAIT: x is of the kernel before; A is not, and is on its way when that one ends.
    """
    k = tl.arange(0, BLOCK_K)
    for first in range(start, rank, step):
        r = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for k_start in tl.static_range(0, K, BLOCK_K):
            at = k_start + k
            mask = (r < rank)[:, None] & (at < K)[None, :]
            a = tl.load(a_ptr + r[:, None] * K + at[None, :], mask=mask, other=0.0)
            if WAIT:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            acc += a.to(tl.float32) * tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        h = tl.sum(acc, 1)
        tl.store(h_row + r, (h * scale).to(h_row.dtype.element_ty), mask=r < rank)
        if twice:
            tl.store(other_h_row + r, (h * other_scale).to(h_row.dtype.element_ty), mask=r < rank)


@triton.jit
def _shrink_part(part, x_row, h_row, data_ptr, own, other, max_rank, K: tl.constexpr, SITES: tl.constexpr,
                 PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr,
                 WAIT: tl.constexpr):  # fmt: skip
    """One part of the rank blocks of one site of one pair; a second site with the first one's A is done there.

    `own` and `other` are (rank, a, scale) of the two sites.
    """
    rank, a_at, scale = own[0], own[1], own[2]
    other_rank, other_a_at, other_scale = other[0], other[1], other[2]
    same = (SITES == 2) & (a_at == other_a_at) & (rank == other_rank)
    start = part % PARTS * BLOCK_R
    if part < PARTS:
        _shrink_rows(x_row, data_ptr + a_at * UNIT, rank, scale, h_row, h_row + max_rank, other_scale, start,
                     PARTS * BLOCK_R, same, K, BLOCK_R, BLOCK_K, WAIT)  # fmt: skip
    elif SITES == 2:
        _shrink_rows(x_row, data_ptr + other_a_at * UNIT, tl.where(same, 0, other_rank), other_scale,
                     h_row + max_rank, h_row, scale, start, PARTS * BLOCK_R, False, K, BLOCK_R, BLOCK_K,
                     WAIT)  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_pairs_kernel(
    x_ptr, h_ptr, data_ptr, pairs_ptr, counts_ptr, plan, num_pairs, h_stride, max_rank, K: tl.constexpr,
    ROWS_PER_X: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of the rank rows of one pair. The plan is older than the kernel before, which `x` may be of."""
    at = tl.program_id(0)
    pair = tl.load(pairs_ptr + at)
    other_at = (SITES - 1) * num_pairs + at
    rank, other_rank = tl.load(plan.rank + at), tl.load(plan.rank + other_at)
    if (at < tl.load(counts_ptr + 2)) & (tl.maximum(rank, other_rank) > 0):
        own = (rank, tl.load(plan.a + at), tl.load(plan.scale + at))
        other = (other_rank, tl.load(plan.a + other_at), tl.load(plan.scale + other_at))
        _shrink_part(tl.program_id(1), x_ptr + (pair // ROWS_PER_X).to(tl.int64) * K,
                     h_ptr + pair.to(tl.int64) * h_stride, data_ptr, own, other, max_rank, K, SITES, PARTS, BLOCK_R,
                     BLOCK_K, UNIT, PDL)  # fmt: skip
    if PDL:  # whoever waits for this kernel relies on what came before it, work or no work
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_slots", "site_0", "site_1", "site_2"])
def start_kernel(
    experts_ptr, token_slots_ptr, order, num_pairs, num_experts, x_ptr, h_ptr, data_ptr, tables, num_slots, plan,
    site_0, site_1, site_2, h_stride, max_rank, NUM_CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, HIDDEN: tl.constexpr,
    INTER: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SHARED: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs sort and plan, the others (PARTS > 0) shrink, which needs neither.

    All pairs of one part of the rank rows stand before those of the next part: pairs of one (slot, expert) read the
    same rows of A while these are still in cache.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    sites = (site_0, site_1, site_2)
    PLACING: tl.constexpr = PAIRS // CHUNK
    if program < PLACING:
        at, expert, slot, live = place_pairs(program, experts_ptr, token_slots_ptr, order, num_pairs, num_experts,
                                             num_slots + 1, NUM_CHOICES, True, PAIRS, CHUNK, GROUP_M)  # fmt: skip
        on = live & (slot >= 0)
        for i in tl.static_range(SITES):
            plan_site(i * num_pairs + at, sites[i] * num_slots + slot, expert, on, live, tables, plan,
                      INTER if i == SITES - 1 else HIDDEN, HIDDEN if i == SITES - 1 else INTER, HAS_SHARED,
                      UNIT)  # fmt: skip
    elif program == PLACING:
        count_tiles(experts_ptr, order, num_pairs, num_experts, EXPERTS, PAIRS, BLOCK_M)
    elif PARTS > 0:
        job = program - PLACING - 1
        pair = job % num_pairs
        slot = tl.load(token_slots_ptr + pair // NUM_CHOICES)
        expert = tl.load(experts_ptr + pair).to(tl.int32)
        if (slot >= 0) & (expert >= 0) & (expert < num_experts):
            rank, a, _, scale = look_up(tables, site_0 * num_slots + slot, expert, True, HIDDEN, INTER, HAS_SHARED,
                                        UNIT)  # fmt: skip
            own = (rank, a, scale)
            other = own
            if SITES == 3:
                rank, a, _, scale = look_up(tables, site_1 * num_slots + slot, expert, True, HIDDEN, INTER,
                                            HAS_SHARED, UNIT)  # fmt: skip
                other = (rank, a, scale)
            _shrink_part(job // num_pairs, x_ptr + (pair // NUM_CHOICES).to(tl.int64) * HIDDEN,
                         h_ptr + pair.to(tl.int64) * h_stride, data_ptr, own, other, max_rank, HIDDEN, SITES - 1,
                         PARTS, BLOCK_R, BLOCK_K, UNIT, False)  # fmt: skip


@triton.jit
def _shrink_group(x_start, valid, target, a_ptr, rank, scale, other_target, other_a_ptr, other_rank, other_scale,
                  twice, part, K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_R: tl.constexpr,
                  BLOCK_K: tl.constexpr, SITES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """target[:, r] = scale * x a[r] over this part's rank blocks; of SITES 2 the other one from the same x.

    With `twice` the other site has the same A, and gets the same product with its own scale. Whole steps of 16 ranks
    are written, zero past the rank.
    """
    k = tl.arange(0, BLOCK_K)
    for r_start in range(part * BLOCK_R, tl.maximum(rank, other_rank), PARTS * BLOCK_R):
        r = r_start + tl.arange(0, BLOCK_R)
        acc = tl.zeros([GROUP_M, BLOCK_R], tl.float32)
        other = acc
        for k_start in range(0, K, BLOCK_K):
            at = k_start + k
            x = tl.load(x_start + at[None, :], mask=valid[:, None] & (at < K)[None, :], other=0.0)
            rows = r[None, :] * K + at[:, None]
            inside = (r < rank)[None, :] & (at < K)[:, None]
            acc = dot(x, tl.load(a_ptr + rows, mask=inside, other=0.0), acc, False, PRECISION)
            if SITES == 2:
                inside = (r < other_rank)[None, :] & (at < K)[:, None]
                other = dot(x, tl.load(other_a_ptr + rows, mask=inside, other=0.0), other, False, PRECISION)
        h_type: tl.constexpr = target.dtype.element_ty
        written = (rank + 15) // 16 * 16
        tl.store(target + r[None, :], (acc * scale).to(h_type), mask=valid[:, None] & (r < written)[None, :])
        written = (tl.where(twice, rank, other_rank) + 15) // 16 * 16
        other = tl.where(twice, acc, other) * other_scale
        tl.store(other_target + r[None, :], other.to(h_type), mask=valid[:, None] & (r < written)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_groups_kernel(
    x_ptr, order, h_ptr, data_ptr, plan, num_pairs, h_stride, max_rank, K: tl.constexpr, ROWS_PER_X: tl.constexpr,
    SORTED_H: tl.constexpr, SITES: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One group of rows of one (expert, slot); SPLIT: and one site. ROWS_PER_X 0: x is in sorted order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0)
    first = -1
    if group < tl.load(order.counts + 1):
        first = tl.load(order.group_start + group)
    if first >= 0:
        position = first + tl.arange(0, GROUP_M)
        valid = position < tl.load(order.group_end + group)
        pair = tl.load(order.pairs + position, mask=valid, other=0)
        x_row = position if ROWS_PER_X == 0 else pair // ROWS_PER_X
        x_start = x_ptr + x_row.to(tl.int64)[:, None] * K
        target = h_ptr + ((position if SORTED_H else pair) * h_stride)[:, None]
        other_at = (SITES - 1) * num_pairs + first
        rank, other_rank = tl.load(plan.rank + first), tl.load(plan.rank + other_at)
        scale, other_scale = tl.load(plan.scale + first), tl.load(plan.scale + other_at)
        a_place, other_place = tl.load(plan.a + first), tl.load(plan.a + other_at)
        same = (a_place == other_place) & (rank == other_rank)
        a_ptr, other_a_ptr = data_ptr + a_place * UNIT, data_ptr + other_place * UNIT
        own_rank = tl.where(same, 0, other_rank)
        part = tl.program_id(1)
        if SPLIT and part >= PARTS:
            _shrink_group(x_start, valid, target + max_rank, other_a_ptr, own_rank, other_scale, target, data_ptr, 0,
                          scale, False, part - PARTS, K, PARTS, GROUP_M, BLOCK_R, BLOCK_K, 1, PRECISION)  # fmt: skip
        else:
            loaded = 0 if SPLIT else own_rank
            _shrink_group(x_start, valid, target, a_ptr, rank, scale, target + max_rank, other_a_ptr, loaded,
                          other_scale, same & (SITES == 2), part, K, PARTS, GROUP_M, BLOCK_R, BLOCK_K,
                          1 if SPLIT else SITES, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["first_column"])
def expand_groups_kernel(
    y_ptr, route_ptr, order, h_ptr, data_ptr, rank_ptr, b_ptr, h_stride, first_column, y_stride, N: tl.constexpr,
    COLUMN_STEP: tl.constexpr, HAS_ROUTE: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[pair, first_column + COLUMN_STEP * n] += h B of one group of rows of one (expert, slot)."""
    group = tl.program_id(0)
    first = -1
    if group < tl.load(order.counts + 1):
        first = tl.load(order.group_start + group)
    if first >= 0:
        position = first + tl.arange(0, GROUP_M)
        valid = position < tl.load(order.group_end + group)
        pair = tl.load(order.pairs + position, mask=valid, other=0)
        rank = tl.load(rank_ptr + first)
        b_start = data_ptr + tl.load(b_ptr + first) * UNIT
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros([GROUP_M, BLOCK_N], tl.float32)
        for r_start in range(0, rank, BLOCK_R):
            r = r_start + tl.arange(0, BLOCK_R)
            h = tl.load(h_ptr + (pair * h_stride)[:, None] + r[None, :], mask=valid[:, None] & (r < rank)[None, :],
                        other=0.0)  # fmt: skip
            b = tl.load(b_start + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
            acc = dot(h, b.to(h.dtype), acc, False, PRECISION)
        if HAS_ROUTE:
            acc *= tl.load(route_ptr + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
        if rank > 0:
            target = y_ptr + pair.to(tl.int64)[:, None] * y_stride + (first_column + n * COLUMN_STEP)[None, :]
            mask = valid[:, None] & (n < N)[None, :]
            y = tl.load(target, mask=mask, other=0.0).to(tl.float32) + acc
            tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)


def dot_precision(x: Tensor) -> str:
    """float32 operands are multiplied exactly, not as tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def rank_block(max_rank: int) -> int:
    """Rank rows of one step of a shrink: the largest rank, but 16 where a graph leaves room for any (masked rows
    cost registers)."""
    return 16 if max_rank > 128 else min(64, max(16, triton.next_power_of_2(max_rank)))


def expand_block(max_rank: int) -> int:
    """Rank rows of one step of an expand."""
    return 32 if 16 < max_rank <= 128 else 16


def empty_h(x: Tensor, num_pairs: int, num_sites: int, max_rank: int) -> Tensor:
    """The shrunk vectors [P, num_sites, max_rank rounded up to whole steps], unfilled.

    In float32 beside float16: x A may leave the range of float16 where x A B does not.
    """
    rank = triton.cdiv(max_rank, RANK_STEP) * RANK_STEP
    assert num_pairs * num_sites * rank < 2**31, "the kernels address h with 32 bits"
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    return torch.empty(num_pairs, num_sites, rank, dtype=dtype, device=x.device)
