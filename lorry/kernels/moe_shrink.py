"""Launches of LoRA on experts: shrink alone, shrink beside the sort, and the add to any experts' intermediate."""

from __future__ import annotations

import triton
from torch import Tensor

from lorry.kernels.moe_lora import (
    dot_precision,
    empty_h,
    expand_groups_kernel,
    rank_block,
    shrink_groups_kernel,
    shrink_pairs_kernel,
    start_kernel,
)
from lorry.kernels.moe_plan import (
    LoRAPlan,
    LoRASites,
    empty_plan,
    plan_lora,
    site_arguments,
)
from lorry.kernels.moe_sort import PairOrder, count_sizes, empty_order, sort_pairs
from lorry.kernels.tables import LoRATables


def pair_sizes(num_pairs: int, width: int, max_rank: int) -> dict[str, int]:
    """Blocks of the shrink without tensor cores: few rank rows for a program, so that even one row of tokens fills
    the GPU, and long loads; measured on an H200 at rank 16 and widths of 2,048 and 768."""
    block_r, block_k = (4, 512) if num_pairs < 512 else (16, 128)
    if width >= 1024 or num_pairs <= 16:
        block_r, block_k = 2, 1024
    parts = min(16 // block_r, triton.cdiv(max_rank, block_r))
    return {"PARTS": parts, "BLOCK_R": block_r, "BLOCK_K": min(block_k, max(16, triton.next_power_of_2(width)))}


def launch_options(pdl: bool) -> dict[str, bool]:
    """`launch_pdl` only where it is wanted: not every Triton backend takes it."""
    return {"launch_pdl": True} if pdl else {}


def start_experts(
    x: Tensor,
    top_k_index: Tensor,
    lora: LoRASites,
    num_experts: int,
    inter: int,
    block_m: int,
    group_m: int = 16,
    shrink: bool = True,
    pdl: bool = False,
) -> tuple[PairOrder, LoRAPlan, Tensor]:
    """(sort_pairs(..), plan_lora(..), h), h[p, s] = scale[s] * A[s, slot, expert] x[p // K], in one launch.

    x [T, H], top_k_index [T, K], at most `MAX_COUNTED_PAIRS` pairs; see `sort_pairs`, `LoRASites`, `LoRAPlan`.
    h by pair as `empty_h` makes it, accumulated and scaled in float32; elements beyond a pair's rank are never
    written, without `shrink` none is. Deterministic; safe under graph capture.
    """
    num_pairs, num_choices = top_k_index.numel(), top_k_index.shape[1]
    tables, hidden, num_sites = lora.tables, x.shape[1], len(lora.first)
    order = empty_order(top_k_index, tables.num_slots, num_experts, block_m, group_m, True)
    plan = empty_plan(tables, num_sites + 1, num_pairs, hidden, inter)
    h = empty_h(x, num_pairs, num_sites, lora.max_rank)
    padded, chunk = count_sizes(num_pairs)
    sizes = pair_sizes(num_pairs, hidden, lora.max_rank)
    sizes["PARTS"] *= shrink
    start_kernel[(padded // chunk + 1 + num_pairs * num_sites * sizes["PARTS"],)](
        top_k_index,
        lora.token_slots,
        order.tensors,
        num_pairs,
        num_experts,
        x,
        h,
        tables.data,
        tables.tensors,
        tables.num_slots,
        plan.tensors,
        *site_arguments(lora.sites),
        h.stride(0),
        h.stride(1),
        NUM_CHOICES=num_choices,
        EXPERTS=triton.next_power_of_2(num_experts),
        PAIRS=padded,
        CHUNK=chunk,
        BLOCK_M=block_m,
        GROUP_M=group_m,
        HIDDEN=hidden,
        INTER=inter,
        SITES=num_sites + 1,
        **sizes,
        HAS_SHARED=tables.shared is not None,
        UNIT=plan.unit,
        PDL=pdl,
        num_warps=4,
    )
    return order, plan, h


def shrink_pairs(x: Tensor, order: PairOrder, plan: LoRAPlan, max_rank: int, pdl: bool = False) -> Tensor:
    """h[p, s] = scale[s, p] * A[s, p] x_p, one program for each pair and few rank rows: for few rows.

    x [T, in] or [P, in] by pair; the plan of `order` has one or two sites. The rest as in `start_experts`.
    """
    num_sites, num_pairs = plan.tensors.rank.shape
    h = empty_h(x, num_pairs, num_sites, max_rank)
    sizes = pair_sizes(num_pairs, x.shape[1], max_rank)
    shrink_pairs_kernel[(num_pairs, num_sites * sizes["PARTS"])](
        x,
        h,
        plan.data,
        order.tensors.pairs,
        order.tensors.counts,
        plan.tensors,
        num_pairs,
        h.stride(0),
        h.stride(1),
        K=x.shape[1],
        ROWS_PER_X=num_pairs // x.shape[0],
        SITES=num_sites,
        **sizes,
        UNIT=plan.unit,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return h


def shrink_groups(
    x: Tensor,
    order: PairOrder,
    plan: LoRAPlan,
    max_rank: int,
    sorted_rows: bool = False,
    block_k: int | None = None,
    num_warps: int = 2,
    num_stages: int = 3,
    pdl: bool = False,
) -> Tensor:
    """h[p, s] = scale[s, p] * A[s, p] x_p by tensor cores, `order.group_m` rows of one A at a time.

    x [T, in] or [P, in] by pair; with `sorted_rows` h is in sorted order, and so is x where it has P rows.
    Whole steps of ranks are written, zero past the rank. The rest as in `shrink_pairs`.
    """
    num_sites, num_pairs = plan.tensors.rank.shape
    h = empty_h(x, num_pairs, num_sites, max_rank)
    block_r = rank_block(max_rank)
    few = order.positions is None
    # Programs of parts that no rank reaches come in the way of those with work: only where there is room for them.
    parts = min(4, triton.cdiv(max_rank, block_r)) if few and num_pairs <= 256 else 1
    split = few and num_sites == 2
    by_pair = x.shape[0] == num_pairs
    block_k = block_k or (256 if block_r == 16 else 128)
    shrink_groups_kernel[(order.max_groups, parts * (1 + split))](
        x,
        order.tensors,
        h,
        plan.data,
        plan.tensors,
        num_pairs,
        h.stride(0),
        h.stride(1),
        K=x.shape[1],
        ROWS_PER_X=0 if by_pair and sorted_rows else num_pairs // x.shape[0],
        SORTED_H=sorted_rows,
        SITES=num_sites,
        SPLIT=split,
        PARTS=parts,
        GROUP_M=order.group_m,
        BLOCK_R=block_r,
        BLOCK_K=min(block_k, max(16, triton.next_power_of_2(x.shape[1]))),
        UNIT=plan.unit,
        PRECISION=dot_precision(x),
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch_options(pdl),
    )
    return h


def merged_experts_fused_moe_lora_add(
    y: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    token_slots: Tensor,
    tables: LoRATables,
    sites: tuple[int, ...],
    num_experts: int,
    max_rank: int,
    *,
    interleaved: bool = False,
    top_k_weights: Tensor | None = None,
    order: PairOrder | None = None,
) -> None:
    """y[p] += (top_k_weights[p] *) scale * B[slot, expert] (A[slot, expert] x_p), in place, for any experts.

    y [P, W] with P = T * K, row p of choice p % K of row p // K (last dimension contiguous): with two `sites` (gate,
    up) the gate_up intermediate, W = 2I, gate before up or, `interleaved`, alternating, each with its own A and B;
    with one site the ungated intermediate or the down output. x [T, in] or [P, in]. top_k_index [T, K] (outside
    0..num_experts-1: an expert that lives elsewhere, its row of y is not touched), token_slots [T] int32 (-1: base
    or padding, not touched), `top_k_weights` [T, K] where y carries the routing weight already.

    Accumulates and scales in float32; slots of rank 0 do nothing; `max_rank` is at least every rank at these sites.
    `order` saves the sort where the caller has one (its `block_m` does not matter). Every call launches by
    capacity: safe under graph capture. The name is that of SGLang's op for the same purpose.
    """
    if order is None:
        order = sort_pairs(top_k_index, token_slots, tables.num_slots, num_experts, 16)
    width = y.shape[1] // len(sites)
    plan = plan_lora(order, tables, sites, x.shape[1], width, ends_with_down=False)
    h = shrink_groups(x, order, plan, max_rank)
    block_n = min(128, max(16, triton.next_power_of_2(width)))
    for i in range(len(sites)):
        expand_groups_kernel[(order.max_groups, triton.cdiv(width, block_n))](
            y,
            y if top_k_weights is None else top_k_weights,
            order.tensors,
            h[:, i],
            plan.data,
            plan.tensors.rank[i],
            plan.tensors.b[i],
            h.stride(0),
            i if interleaved else i * width,
            y.stride(0),
            N=width,
            COLUMN_STEP=len(sites) if interleaved else 1,
            HAS_ROUTE=top_k_weights is not None,
            GROUP_M=order.group_m,
            BLOCK_N=block_n,
            BLOCK_R=rank_block(max_rank),
            UNIT=plan.unit,
            PRECISION=dot_precision(y),
            num_warps=4,
        )
