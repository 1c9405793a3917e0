"""The experts of a layer for thousands of rows: rows gathered into sorted order once, products by TMA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lorry.kernels.moe_lora import dot_precision, expand_block
from lorry.kernels.moe_plan import LoRAPlan, LoRASites, plan_lora
from lorry.kernels.moe_product import split_columns
from lorry.kernels.moe_shrink import shrink_groups
from lorry.kernels.moe_sort import PairOrder, sort_pairs
from lorry.kernels.moe_tile import activation, expand_runs
from lorry.kernels.moe_weights import Activation, ExpertsWeights, PrefillPlan, PrefillTile, Projection

MIN_PAIRS_PER_EXPERT = 48
"""From so many pairs per expert up the sorted buffer pays."""


@triton.jit
def _gather_kernel(x_ptr, positions_ptr, out_ptr, N: tl.constexpr, NUM_CHOICES: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + n, mask=n < N, other=0.0)
    for choice in tl.static_range(NUM_CHOICES):
        at = tl.load(positions_ptr + row * NUM_CHOICES + choice).to(tl.int64)
        if at >= 0:
            tl.store(out_ptr + at * N + n, x, mask=n < N)


def gather_rows(x: Tensor, order: PairOrder) -> Tensor:
    """out[position of pair p] = x[p // K]; new tensor [P, N], rows without a pair unwritten. Graph-safe."""
    num_pairs = order.pairs.numel()
    out = torch.empty(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _gather_kernel[(x.shape[0],)](
        x, order.positions, out, N=x.shape[1], NUM_CHOICES=num_pairs // x.shape[0],
        BLOCK_N=triton.next_power_of_2(x.shape[1]), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _weight_block(w_desc, expert, n, k, K: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
                  JOINED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK_K, columns] of this expert's W^T; JOINED: gate columns and then the same up columns."""
    if JOINED:
        return tl.reshape(w_desc.load([expert * 2, n, k]), (2 * BLOCK_N, BLOCK_K)).T
    elif TRANSPOSED:
        return w_desc.load([expert * K + k, n])
    else:
        return w_desc.load([expert * COLUMNS + n, k]).T


@triton.jit
def _prefill_tile(
    index, num_tiles, x_desc, w_desc, bias_ptr, out_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr,
    h_ptr, plan, max_rank, h_stride, alpha, beta, limit, K: tl.constexpr, N: tl.constexpr,
    GATED: tl.constexpr, TRANSPOSED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, LORA: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    JOINED: tl.constexpr = GATED == "concatenated" and not TRANSPOSED
    TWO: tl.constexpr = GATED == "concatenated" and TRANSPOSED
    STEP: tl.constexpr = 1 if GATED == "no" or TWO else 2
    COLUMNS: tl.constexpr = N if GATED == "no" else 2 * N
    TILES_M: tl.constexpr = 8
    first_tile = index // (TILES_M * TILES_N) * TILES_M
    rest = index % (TILES_M * TILES_N)
    height = tl.minimum(TILES_M, num_tiles - first_tile)
    tile = first_tile + rest % height
    n_start = rest // height * BLOCK_N
    expert = tl.load(tile_expert_ptr + tile)
    first = tl.load(tile_start_ptr + tile)
    position = first + tl.arange(0, BLOCK_M)
    valid = position < tl.load(tile_end_ptr + tile)
    flat = tl.arange(0, BLOCK_N * STEP)
    if JOINED:
        own = n_start + flat % BLOCK_N
        column_site = flat // BLOCK_N
        column = own + column_site * N
    else:
        own = n_start + flat // STEP
        column_site = flat % STEP
        column = n_start * STEP + flat
    inside = own < N
    acc = tl.zeros([BLOCK_M, BLOCK_N * STEP], tl.float32)
    up = acc
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([first, k])
        n_first = n_start if JOINED else n_start * STEP
        w = _weight_block(w_desc, expert, n_first, k, K, COLUMNS, TRANSPOSED, JOINED, BLOCK_N, BLOCK_K)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if TWO:
            w = _weight_block(w_desc, expert, n_start + N, k, K, COLUMNS, TRANSPOSED, False, BLOCK_N, BLOCK_K)
            up = tl.dot(x, w, up, input_precision=PRECISION)
    if LORA:
        SITES: tl.constexpr = 1 if GATED == "no" else 2
        gate_inside = inside
        up_inside = inside
        if STEP == 2:
            gate_inside = inside & (column_site == 0)
            up_inside = inside & (column_site == 1)
        last = tl.minimum(first + BLOCK_M, tl.load(tile_end_ptr + tile))
        acc, up = expand_runs(
            acc, up, plan[0], h_ptr, position * h_stride, max_rank, plan[4], plan[5], plan[1], plan[2], plan[3],
            position,
            first, last, N, own, gate_inside, up_inside, SITES, TWO, BLOCK_R, UNIT, PRECISION,
        )  # fmt: skip
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * COLUMNS + column
        acc += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[None, :]
        if TWO:
            up += tl.load(bias + N, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED == "no":
        result = activation(acc, acc, alpha, beta, limit, KIND)
    elif TWO:
        result = activation(acc, up, alpha, beta, limit, KIND)
    else:
        if JOINED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        else:
            gate, up = split_columns(acc, BLOCK_M, BLOCK_N, False)
        result = activation(gate, up, alpha, beta, limit, KIND)
    n = n_start + tl.arange(0, BLOCK_N)
    target = out_ptr + position.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "max_rank", "h_stride"])
def _prefill_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr, counts_ptr, h_ptr,
    data_ptr, plan_rank_ptr, plan_b_ptr, num_pairs, pairs_ptr, run_end_ptr, max_rank, h_stride, alpha, beta, limit,
    K: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, LORA: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, PERSISTENT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[p] = act(x_p W[e_p]^T + bias + h[p] B[slot_p, e_p]) at sorted positions; see `moe.grouped_product`."""
    plan = (data_ptr, plan_rank_ptr, plan_b_ptr, num_pairs, pairs_ptr, run_end_ptr)
    num_tiles = tl.load(counts_ptr)
    stop = num_tiles * ((N + BLOCK_N - 1) // BLOCK_N)
    if PERSISTENT > 0:
        for index in tl.range(tl.program_id(0), stop, PROGRAMS, flatten=PERSISTENT == 2):
            _prefill_tile(index, num_tiles, x_desc, w_desc, bias_ptr, out_ptr, tile_expert_ptr,
                          tile_start_ptr, tile_end_ptr, h_ptr, plan, max_rank, h_stride, alpha,
                          beta, limit, K, N, GATED, TRANSPOSED, KIND, HAS_BIAS, LORA, UNIT, BLOCK_M, BLOCK_N,
                          BLOCK_K, BLOCK_R, PRECISION)  # fmt: skip
    elif tl.program_id(0) < stop:
        _prefill_tile(tl.program_id(0), num_tiles, x_desc, w_desc, bias_ptr, out_ptr, tile_expert_ptr,
                      tile_start_ptr, tile_end_ptr, h_ptr, plan, max_rank, h_stride, alpha, beta,
                      limit, K, N, GATED, TRANSPOSED, KIND, HAS_BIAS, LORA, UNIT, BLOCK_M, BLOCK_N, BLOCK_K,
                      BLOCK_R, PRECISION)  # fmt: skip


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix.view(-1, matrix.shape[-1]), [rows, columns])


def _block_columns(projection: Projection, tile: PrefillTile) -> tuple[int, int]:
    """(columns after the activation of one tile, columns of W that one TMA load brings)."""
    columns = tile.block_n // (1 if projection.gated == "no" else 2)
    return columns, tile.block_n if projection.gated == "interleaved" else columns


def prefill_product(
    x: Tensor,
    projection: Projection,
    kind: Activation,
    order: PairOrder,
    tile: PrefillTile,
    num_programs: int,
    h: Tensor | None = None,
    plan: LoRAPlan | None = None,
    max_rank: int = 0,
) -> Tensor:
    """`moe.grouped_product` for x, h and the result in sorted order, without routing weight; new tensor [P, N].

    Rows of `x` past the live ones are read and their products dropped. Needs TMA (compute capability 9.0), weights
    and x aligned to 16 bytes and contiguous, in_features a multiple of `tile.block_k`. Graph-safe, deterministic.
    """
    width, weight = projection.out_features, projection.weight
    block_n, loaded = _block_columns(projection, tile)
    if projection.gated == "concatenated" and not projection.transposed:
        halves = weight.view(-1, width, weight.shape[-1])
        w_desc = TensorDescriptor.from_tensor(halves, [2, block_n, tile.block_k])
    elif projection.transposed:
        w_desc = _descriptor(weight, tile.block_k, loaded)
    else:
        w_desc = _descriptor(weight, loaded, tile.block_k)
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    tiles = order.max_tiles * triton.cdiv(width, block_n)
    programs = tiles if tile.persistent == 0 else min(tiles, num_programs * (2 if tile.num_warps == 4 else 1))
    _prefill_kernel[(programs,)](
        _descriptor(x, tile.block_m, tile.block_k),
        w_desc,
        weight if projection.bias is None else projection.bias,
        out,
        order.tile_expert,
        order.tile_start,
        order.tile_end,
        order.counts,
        x if h is None else h,
        x if plan is None else plan.data,
        order.counts if plan is None else plan.rank,
        order.counts if plan is None else plan.b,
        x.shape[0],
        order.pairs,
        order.run_end,
        max_rank,
        0 if h is None else h.stride(0),
        kind.alpha,
        kind.beta,
        kind.limit,
        K=projection.in_features,
        N=width,
        GATED=projection.gated,
        TRANSPOSED=projection.transposed,
        KIND=kind.kind,
        HAS_BIAS=projection.bias is not None,
        LORA=plan is not None,
        UNIT=1 if plan is None else plan.unit,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        BLOCK_R=expand_block(max_rank),
        PRECISION=dot_precision(x),
        PERSISTENT=tile.persistent,
        PROGRAMS=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def fits_prefill(x: Tensor, weights: ExpertsWeights, num_pairs: int) -> PrefillPlan | None:
    """The plan where the device has TMA, the layout suits it and there are rows enough; else None."""
    if not x.is_cuda or x.dtype == torch.float32 or num_pairs < MIN_PAIRS_PER_EXPERT * weights.num_experts:
        return None
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return None
    for projection in (weights.first, weights.second):
        weight = projection.weight
        aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[2] % 8 == 0
        if not aligned or projection.in_features % 64:
            return None
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    if num_pairs < 256 * weights.num_experts:
        return PrefillPlan(num_programs=programs, group_m=32, shrink_k=128, shrink_stages=3)
    return PrefillPlan(num_programs=programs)


def prefill_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertsWeights,
    lora: LoRASites | None,
    plan: PrefillPlan,
) -> Tensor:
    """`moe.fused_experts` for many rows: sort, gather, (shrink,) gate_up, (shrink,) down, weighted sum.

    With LoRA, tiles whose rows have no adapter skip its code. Source: shared/experiments (moe_prefill.py).
    """
    from lorry.kernels.moe import sum_choices

    first, second = (plan.first, plan.second) if lora is None else (plan.first_lora, plan.second_lora)
    slots = None if lora is None else lora.token_slots
    num_slots = 0 if lora is None else lora.tables.num_slots
    order = sort_pairs(top_k_index, slots, num_slots, weights.num_experts, first.block_m, plan.group_m, counted=False)
    assert first.block_m == second.block_m
    shrink = (plan.shrink_k, plan.shrink_warps, plan.shrink_stages)
    rows = gather_rows(x, order)
    h, of_first, of_down, max_rank = None, None, None, 0
    if lora is not None:
        max_rank, inter = lora.max_rank, weights.first.out_features
        found = plan_lora(top_k_index, lora.token_slots, lora.tables, lora.sites, weights.num_experts, x.shape[1],
                          inter, True)  # fmt: skip
        of_first, of_down = found.at(0, len(lora.first)), found.at(len(lora.first), len(lora.sites))
        h = shrink_groups(x, order, of_first, max_rank, True, *shrink)
    hidden = prefill_product(rows, weights.first, weights.activation, order, first, plan.num_programs, h, of_first,
                             max_rank)  # fmt: skip
    if of_down is not None:
        h = shrink_groups(hidden, order, of_down, max_rank, True, *shrink)
    out = prefill_product(hidden, weights.second, Activation("none"), order, second, plan.num_programs, h, of_down,
                          max_rank)  # fmt: skip
    return sum_choices(out, top_k_index, weights.num_experts, top_k_weights, order.positions)
