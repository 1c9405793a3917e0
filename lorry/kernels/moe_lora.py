"""LoRA on experts: shrink h = scale * A x, beside the sort or on its own, and expand of the stand-alone add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorry.kernels.moe_plan import plan_pairs
from lorry.kernels.moe_sort import count_smaller_keys, load_pairs
from lorry.kernels.moe_tile import dot


@triton.jit
def _shrink_rows(x_row, a_ptr, rank, scale, h_row, other_h_row, other_scale, start, step, twice,
                 K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """h_row[r] = scale * a[r] . x for r in start, start + step, .. blocks; with `twice` into other_h_row as well."""
    k = tl.arange(0, BLOCK_K)
    for first in range(start, rank, step):
        r = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for k_start in tl.static_range(0, K, BLOCK_K):
            at = k_start + k
            x = tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32)
            mask = (r < rank)[:, None] & (at < K)[None, :]
            acc += tl.load(a_ptr + r[:, None] * K + at[None, :], mask=mask, other=0.0).to(tl.float32) * x[None, :]
        h = tl.sum(acc, 1)
        tl.store(h_row + r, (h * scale).to(h_row.dtype.element_ty), mask=r < rank)
        if twice:
            tl.store(other_h_row + r, (h * other_scale).to(h_row.dtype.element_ty), mask=r < rank)


@triton.jit
def _shrink_part(part, x_row, h_row, data_ptr, rank, a_at, scale, other_rank, other_a_at, other_scale, max_rank,
                 K: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_K: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """One part of the rank blocks of one site of one pair; a second site with the first one's A is done there."""
    step: tl.constexpr = PARTS * BLOCK_R
    start = part % PARTS * BLOCK_R
    if SITES == 2:
        same = (a_at == other_a_at) & (rank == other_rank)
        if part < PARTS:
            _shrink_rows(
                x_row,
                data_ptr + a_at * UNIT,
                rank,
                scale,
                h_row,
                h_row + max_rank,
                other_scale,
                start,
                step,
                same,
                K,
                BLOCK_R,
                BLOCK_K,
            )
        else:
            _shrink_rows(x_row, data_ptr + other_a_at * UNIT, tl.where(same, 0, other_rank), other_scale,
                         h_row + max_rank, h_row, scale, start, step, False, K, BLOCK_R, BLOCK_K)  # fmt: skip
    else:
        _shrink_rows(x_row, data_ptr + a_at * UNIT, rank, scale, h_row, h_row, scale, start, step, False, K, BLOCK_R,
                     BLOCK_K)  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "h_stride", "max_rank"])
def shrink_pairs_kernel(
    x_ptr, h_ptr, data_ptr, plan_rank_ptr, plan_a_ptr, plan_scale_ptr, num_pairs, h_stride, max_rank,
    K: tl.constexpr, ROWS_PER_X: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    other = (SITES - 1) * num_pairs + pair
    rank = tl.load(plan_rank_ptr + pair)
    other_rank = tl.load(plan_rank_ptr + other)
    if tl.maximum(rank, other_rank) > 0:
        _shrink_part(
            tl.program_id(1), x_ptr + (pair // ROWS_PER_X).to(tl.int64) * K, h_ptr + pair.to(tl.int64) * h_stride,
            data_ptr, rank, tl.load(plan_a_ptr + pair), tl.load(plan_scale_ptr + pair), other_rank,
            tl.load(plan_a_ptr + other), tl.load(plan_scale_ptr + other), max_rank, K, SITES, PARTS, BLOCK_R, BLOCK_K,
            UNIT,
        )  # fmt: skip


@triton.jit
def _look_up(tables, site, expert, slot, width, HAS_SHARED: tl.constexpr, UNIT: tl.constexpr):
    """(rank, place of A in units, scale) of one pair, from the tables."""
    column = site * tables[5] + slot
    rank = tl.load(tables[2] + column)
    row = expert.to(tl.int64) * rank
    if HAS_SHARED:
        row = tl.where(tl.load(tables[4] + column) & 1 != 0, 0, row)
    return rank, (tl.load(tables[0] + column) + row * width) // UNIT, tl.load(tables[3] + column)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_slots", "site_0", "site_1", "site_2", "h_stride",
                               "max_rank"])  # fmt: skip
def start_kernel(
    experts_ptr, token_slots_ptr, pairs_ptr, slots_ptr, run_end_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr,
    group_start_ptr, group_end_ptr, counts_ptr, num_pairs, num_experts, x_ptr,
    h_ptr, data_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, scale_ptr, shared_ptr, num_slots, plan_rank_ptr,
    plan_a_ptr, plan_b_ptr, plan_scale_ptr, site_0, site_1, site_2, h_stride, max_rank, NUM_CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_SHARED: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs plan, the next sort, the others (PARTS > 0) shrink pair by pair, which needs neither."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tables = (a_offset_ptr, b_offset_ptr, rank_ptr, scale_ptr, shared_ptr, num_slots)
    program = tl.program_id(0)
    SORTING: tl.constexpr = PAIRS // CHUNK + 1
    PLANNING: tl.constexpr = (PAIRS + 127) // 128
    if program < PLANNING:
        pair = program * 128 + tl.arange(0, 128)
        expert, slot, inside = load_pairs(experts_ptr, token_slots_ptr, pair, num_pairs, NUM_CHOICES, True)
        live = inside & (expert >= 0) & (expert < num_experts)
        plan = (plan_rank_ptr, plan_a_ptr, plan_b_ptr, plan_scale_ptr)
        plan_pairs(pair, expert, slot, live, tables, plan, (site_0, site_1, site_2), num_pairs, HIDDEN, INTER, SITES,
                   True, HAS_SHARED, UNIT)  # fmt: skip
    elif program < PLANNING + SORTING:
        order = (pairs_ptr, slots_ptr, run_end_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr, group_start_ptr,
                 group_end_ptr, counts_ptr)  # fmt: skip
        count_smaller_keys(program - PLANNING, experts_ptr, token_slots_ptr, order, num_pairs, num_experts,
                           num_slots + 1, NUM_CHOICES, True, EXPERTS, PAIRS, CHUNK, BLOCK_M, GROUP_M)  # fmt: skip
    elif PARTS > 0:
        job = program - SORTING - PLANNING
        pair = job // ((SITES - 1) * PARTS)
        slot = tl.load(token_slots_ptr + pair // NUM_CHOICES)
        expert = tl.load(experts_ptr + pair).to(tl.int32)
        if (slot >= 0) & (expert >= 0) & (expert < num_experts):
            rank, a_at, scale = _look_up(tables, site_0, expert, slot, HIDDEN, HAS_SHARED, UNIT)
            other_rank, other_a_at, other_scale = rank, a_at, scale
            if SITES == 3:
                other_rank, other_a_at, other_scale = _look_up(tables, site_1, expert, slot, HIDDEN, HAS_SHARED, UNIT)
            _shrink_part(job % ((SITES - 1) * PARTS), x_ptr + (pair // NUM_CHOICES).to(tl.int64) * HIDDEN,
                         h_ptr + pair.to(tl.int64) * h_stride, data_ptr, rank, a_at, scale, other_rank, other_a_at,
                         other_scale, max_rank, HIDDEN, SITES - 1, PARTS, BLOCK_R, BLOCK_K, UNIT)  # fmt: skip


@triton.jit
def _shrink_group(x_start, valid, target, a_ptr, rank, scale, other_target, other_a_ptr, other_rank, other_scale,
twice,
                  part, max_rank, K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_R: tl.constexpr,
                  BLOCK_K: tl.constexpr, SITES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """target[:, r] = scale * x a[r] over this part's rank blocks; of SITES 2 the other one from the same x.

    With `twice` the other site has the same A, and gets the same product with its own scale.
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
        tl.store(target + r[None, :], (acc * scale).to(h_type), mask=valid[:, None] & (r < rank)[None, :])
        written = tl.where(twice, rank, other_rank)
        other = tl.where(twice, acc, other) * other_scale
        tl.store(other_target + r[None, :], other.to(h_type), mask=valid[:, None] & (r < written)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "h_stride", "max_rank"])
def shrink_groups_kernel(
    x_ptr, pairs_ptr, group_start_ptr, group_end_ptr, counts_ptr, h_ptr, data_ptr, plan_rank_ptr, plan_a_ptr,
    plan_scale_ptr, num_pairs, h_stride, max_rank, K: tl.constexpr, ROWS_PER_X: tl.constexpr,
    SORTED_H: tl.constexpr, SITES: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One group of rows of one (expert, slot); SPLIT: and one site. ROWS_PER_X 0: x is in sorted order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0)
    first = -1
    if group < tl.load(counts_ptr + 1):
        first = tl.load(group_start_ptr + group)
    if first >= 0:
        position = first + tl.arange(0, GROUP_M)
        valid = position < tl.load(group_end_ptr + group)
        pair = tl.load(pairs_ptr + position, mask=valid, other=0)
        one = tl.load(pairs_ptr + first)
        x_row = position if ROWS_PER_X == 0 else pair // ROWS_PER_X
        x_start = x_ptr + x_row.to(tl.int64)[:, None] * K
        target = h_ptr + ((position if SORTED_H else pair) * h_stride)[:, None]
        rank, a_at = tl.load(plan_rank_ptr + one), tl.load(plan_a_ptr + one)
        other_one = (SITES - 1) * num_pairs + one
        other_rank, other_at = tl.load(plan_rank_ptr + other_one), tl.load(plan_a_ptr + other_one)
        scale, other_scale = tl.load(plan_scale_ptr + one), tl.load(plan_scale_ptr + other_one)
        same = (a_at == other_at) & (rank == other_rank)
        own_rank = tl.where(same, 0, other_rank)
        part = tl.program_id(1)
        if SPLIT and part >= PARTS:
            _shrink_group(x_start, valid, target + max_rank, data_ptr + other_at * UNIT, own_rank, other_scale,
                          target, data_ptr, 0, scale, False, part - PARTS, max_rank, K, PARTS, GROUP_M, BLOCK_R,
                          BLOCK_K,
                          1, PRECISION)  # fmt: skip
        else:
            loaded = 0 if SPLIT else own_rank
            _shrink_group(x_start, valid, target, data_ptr + a_at * UNIT, rank, scale, target + max_rank,
                          data_ptr + other_at * UNIT, loaded, other_scale, same & (SITES == 2), part, max_rank, K,
                          PARTS,
                          GROUP_M, BLOCK_R, BLOCK_K, 1 if SPLIT else SITES, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["h_stride", "first_column"])
def expand_groups_kernel(
    y_ptr, route_ptr, pairs_ptr, group_start_ptr, group_end_ptr, counts_ptr, h_ptr, data_ptr, plan_rank_ptr,
    plan_b_ptr, h_stride, first_column, y_stride, N: tl.constexpr, COLUMN_STEP: tl.constexpr,
    HAS_ROUTE: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[pair, first_column + COLUMN_STEP * n] += h B of one group of rows of one (expert, slot)."""
    group = tl.program_id(0)
    first = -1
    if group < tl.load(counts_ptr + 1):
        first = tl.load(group_start_ptr + group)
    if first >= 0:
        position = first + tl.arange(0, GROUP_M)
        valid = position < tl.load(group_end_ptr + group)
        pair = tl.load(pairs_ptr + position, mask=valid, other=0)
        one = tl.load(pairs_ptr + first)
        rank = tl.load(plan_rank_ptr + one)
        b_ptr = data_ptr + tl.load(plan_b_ptr + one) * UNIT
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros([GROUP_M, BLOCK_N], tl.float32)
        for r_start in range(0, rank, BLOCK_R):
            r = r_start + tl.arange(0, BLOCK_R)
            h = tl.load(h_ptr + (pair * h_stride)[:, None] + r[None, :], mask=valid[:, None] & (r < rank)[None, :],
                        other=0.0)  # fmt: skip
            b = tl.load(b_ptr + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
            acc = dot(h, b, acc, False, PRECISION)
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
    """The shrunk vectors [P, num_sites * max_rank], unfilled."""
    assert num_pairs * num_sites * max_rank < 2**31, "the kernels address h with 32 bits"
    return torch.empty(num_pairs, num_sites * max_rank, dtype=x.dtype, device=x.device)
