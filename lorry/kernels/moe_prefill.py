"""The experts of a layer for thousands of rows: rows gathered into sorted order once, products by TMA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lorry.kernels.moe_lora import dot_precision
from lorry.kernels.moe_plan import LoRAPlan, LoRASites, plan_lora
from lorry.kernels.moe_product import split_columns
from lorry.kernels.moe_shrink import shrink_groups
from lorry.kernels.moe_sort import PairOrder, sort_pairs
from lorry.kernels.moe_tile import activation, expand_blocks, load_blocks
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
    num_pairs = order.num_pairs
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
def _prefill_loop(x_desc, w_desc, first, expert, n_start, K: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr,
                  TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """(gate, up) [BLOCK_M, BLOCK_N] of a tile in float32, ungated twice the same."""
    JOINED: tl.constexpr = GATED == "concatenated" and not TRANSPOSED
    TWO: tl.constexpr = GATED == "concatenated" and TRANSPOSED
    STEP: tl.constexpr = 1 if GATED == "no" or TWO else 2
    COLUMNS: tl.constexpr = N if GATED == "no" else 2 * N
    acc = tl.zeros([BLOCK_M, BLOCK_N * STEP], tl.float32)
    other = acc
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([first, k])
        n_first = n_start if JOINED else n_start * STEP
        w = _weight_block(w_desc, expert, n_first, k, K, COLUMNS, TRANSPOSED, JOINED, BLOCK_N, BLOCK_K)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if TWO:
            w = _weight_block(w_desc, expert, n_start + N, k, K, COLUMNS, TRANSPOSED, False, BLOCK_N, BLOCK_K)
            other = tl.dot(x, w, other, input_precision=PRECISION)
    if JOINED:
        return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    elif TWO:
        return acc, other
    elif STEP == 2:
        return split_columns(acc, BLOCK_M, BLOCK_N, False)
    else:
        return acc, acc


@triton.jit
def _prefill_tile(
    tile, n_start, x_desc, w_desc, bias_ptr, out_ptr, order, h_ptr, data_ptr, blocks, per_row,
    num_pairs, max_tiles, max_rank, h_stride, alpha, beta, limit, K: tl.constexpr, N: tl.constexpr,
    GATED: tl.constexpr, TRANSPOSED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, LORA: tl.constexpr,
    UNIT: tl.constexpr, STACK: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, first = tl.load(order.tile_expert + tile), tl.load(order.tile_start + tile)
    position = first + tl.arange(0, BLOCK_M)
    valid = position < tl.load(order.tile_end + tile)
    n = n_start + tl.arange(0, BLOCK_N)
    if LORA:
        SITES: tl.constexpr = 1 if GATED == "no" else 2
        listed = first * per_row
        up_listed = listed + (SITES - 1) * num_pairs * per_row
        count = tl.load(blocks.num_blocks + tile)
        up_count = tl.load(blocks.num_blocks + (SITES - 1) * max_tiles + tile)
        if AHEAD:
            up_b = load_blocks(data_ptr, blocks, up_listed, 0, up_count, N, n, STACK, UNIT)
            b = up_b
            if SITES == 2:
                b = load_blocks(data_ptr, blocks, listed, 0, count, N, n, STACK, UNIT)
    gate, up = _prefill_loop(x_desc, w_desc, first, expert, n_start, K, N, GATED, TRANSPOSED, BLOCK_M, BLOCK_N,
                             BLOCK_K, PRECISION)  # fmt: skip
    if LORA:
        slot = tl.load(order.slots + position, mask=valid, other=-3)
        h_row = h_ptr + position * h_stride
        step = 0
        while step < tl.maximum(count, up_count):
            if not AHEAD:
                up_b = load_blocks(data_ptr, blocks, up_listed, step, up_count, N, n, STACK, UNIT)
                b = up_b
                if SITES == 2:
                    b = load_blocks(data_ptr, blocks, listed, step, count, N, n, STACK, UNIT)
            up = expand_blocks(up, up_b, blocks, up_listed, step, up_count, slot, h_row + (SITES - 1) * max_rank,
                               STACK, PRECISION)  # fmt: skip
            if SITES == 2:
                gate = expand_blocks(gate, b, blocks, listed, step, count, slot, h_row, STACK, PRECISION)
            step += STACK
            if AHEAD:
                up_b = load_blocks(data_ptr, blocks, up_listed, step, up_count, N, n, STACK, UNIT)
                if SITES == 2:
                    b = load_blocks(data_ptr, blocks, listed, step, count, N, n, STACK, UNIT)
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * (N if GATED == "no" else 2 * N)
        column = 2 * n if GATED == "interleaved" else n
        up_column = column + (0 if GATED == "no" else 1 if GATED == "interleaved" else N)
        up += tl.load(bias + up_column, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED != "no":
            gate += tl.load(bias + column, mask=n < N, other=0.0).to(tl.float32)[None, :]
    result = activation(gate, up, alpha, beta, limit, KIND)
    target = out_ptr + position.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@triton.jit
def _place(index, num_tiles, TILES_N: tl.constexpr):
    """(tile, number of its columns' block) of one program: eight tiles side by side share W in the cache."""
    TILES_M: tl.constexpr = 8
    first_tile = index // (TILES_M * TILES_N) * TILES_M
    rest = index % (TILES_M * TILES_N)
    height = tl.minimum(TILES_M, num_tiles - first_tile)
    return first_tile + rest % height, rest // height


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "per_row"])
def _prefill_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, order, h_ptr, data_ptr, blocks, per_row, num_pairs, max_tiles,
    max_rank, h_stride, alpha, beta, limit, K: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, LORA: tl.constexpr, UNIT: tl.constexpr,
    STACK: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PERSISTENT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[p] = act(x_p W[e_p]^T + bias + h[p] B[slot_p, e_p]) at sorted positions; see `moe.grouped_product`."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(order.counts)
    stop = num_tiles * TILES_N
    if PERSISTENT == 0:  # one tile, whatever the step
        stop = tl.minimum(stop, tl.program_id(0) + 1)
    for index in tl.range(tl.program_id(0), stop, PROGRAMS, flatten=PERSISTENT == 2):
        tile, column = _place(index, num_tiles, TILES_N)
        _prefill_tile(tile, column * BLOCK_N, x_desc, w_desc, bias_ptr, out_ptr, order, h_ptr, data_ptr, blocks,
                      per_row, num_pairs, max_tiles, max_rank, h_stride, alpha, beta, limit, K, N, GATED, TRANSPOSED,
                      KIND, HAS_BIAS, LORA, UNIT, STACK, AHEAD, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip


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
) -> Tensor:
    """`moe.grouped_product` for x, h and the result in sorted order, without routing weight; new tensor [P, N].

    With LoRA: h of whole rank steps, zero past each rank, and a plan that has `blocks`, for tiles of this height.
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
    blocks = None if plan is None else plan.blocks
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    tiles = order.max_tiles * triton.cdiv(width, block_n)
    programs = tiles if tile.persistent == 0 else min(tiles, num_programs * (2 if tile.num_warps == 4 else 1))
    _prefill_kernel[(programs,)](
        _descriptor(x, tile.block_m, tile.block_k), w_desc, weight if projection.bias is None else projection.bias,
        out, order.tensors, x if h is None else h, x if plan is None else plan.data,
        order.tensors if blocks is None else blocks.tensors, 0 if blocks is None else blocks.per_row,
        order.num_pairs, order.max_tiles, 0 if h is None else h.stride(1), 0 if h is None else h.stride(0),
        kind.alpha, kind.beta, kind.limit,
        K=projection.in_features,
        N=width,
        GATED=projection.gated,
        TRANSPOSED=projection.transposed,
        KIND=kind.kind,
        HAS_BIAS=projection.bias is not None,
        LORA=blocks is not None,
        UNIT=1 if plan is None else plan.unit,
        STACK=4 if h is None else 8 // h.itemsize,
        AHEAD=tile.ahead,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        PRECISION=dot_precision(x),
        PERSISTENT=tile.persistent,
        PROGRAMS=programs if tile.persistent else 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
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
        first_lora = PrefillTile(num_stages=4, persistent=0)
        return PrefillPlan(first_lora=first_lora, group_m=32, shrink_k=128, shrink_stages=3, num_programs=programs)
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

    With LoRA, tiles whose rows have no adapter skip its code.
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
        found = plan_lora(order, lora.tables, lora.sites, x.shape[1], inter, True, max_rank)
        of_first, of_down = found.at(0, len(lora.first)), found.at(len(lora.first), len(lora.sites))
        h = shrink_groups(x, order, of_first, max_rank, True, *shrink)
    hidden = prefill_product(rows, weights.first, weights.activation, order, first, plan.num_programs, h, of_first)
    if of_down is not None:
        h = shrink_groups(hidden, order, of_down, max_rank, True, *shrink)
    out = prefill_product(hidden, weights.second, Activation("none"), order, second, plan.num_programs, h, of_down)
    return sum_choices(out, top_k_index, weights.num_experts, top_k_weights, order.positions)
