"""Grouped products of an experts layer over tiles of sorted pairs; activation, routing weight and LoRA inside."""

from __future__ import annotations

import triton
import triton.language as tl

from lorry.kernels.moe_tile import activation, along, dot, expand, load_b, tile_numbers


@triton.jit
def _load_weight(w_ptr, n, k, inside, K: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
                 EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    pointer = w_ptr + along(n * STRIDE_N, 1 - SWAP) + along(k * STRIDE_K, SWAP)
    if EVEN_N and EVEN_K:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=along(inside, 1 - SWAP) & along(k < K, SWAP), other=0.0)


@triton.jit
def _main_loop(x_ptr, w_ptr, row, valid, n, other_n, inside, K: tl.constexpr, STRIDE_N: tl.constexpr,
               STRIDE_K: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
               TWO: tl.constexpr, EVEN_N: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x[row] w^T over columns n, and with TWO over other_n as well (else the second result is a copy of nothing)."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + along(row.to(tl.int64) * K, SWAP)
    acc = tl.zeros([COLUMNS if SWAP else BLOCK_M, BLOCK_M if SWAP else COLUMNS], tl.float32)
    other = acc
    for start in range(0, K, BLOCK_K):
        at = start + k
        mask = along(valid, SWAP)
        if not EVEN_K:
            mask = mask & along(at < K, 1 - SWAP)
        x = tl.load(x_row + along(at, 1 - SWAP), mask=mask, other=0.0)
        w = _load_weight(w_ptr, n, at, inside, K, STRIDE_N, STRIDE_K, EVEN_N, EVEN_K, SWAP)
        acc = dot(x, w, acc, SWAP, PRECISION)
        if TWO:
            w = _load_weight(w_ptr, other_n, at, inside, K, STRIDE_N, STRIDE_K, EVEN_N, EVEN_K, SWAP)
            other = dot(x, w, other, SWAP, PRECISION)
    return acc, other


@triton.jit
def split_columns(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Even and odd columns of an interleaved gate_up tile."""
    if SWAP:
        return tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
    else:
        return tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def _find_lora(order, plan, position, valid, first, num_pairs, SITES: tl.constexpr):
    """(rank, b of the first site, the same of the last one, number of the slot in the tile) by row of a tile."""
    last = (SITES - 1) * num_pairs + position
    rank, b_at = tl.load(plan.rank + position, mask=valid, other=0), tl.load(plan.b + position, mask=valid, other=0)
    up_rank, up_b_at = tl.load(plan.rank + last, mask=valid, other=0), tl.load(plan.b + last, mask=valid, other=0)
    number = tile_numbers(order.slots, position, valid, first, tl.maximum(rank, up_rank) > 0)
    return rank, b_at, up_rank, up_b_at, number


@triton.jit
def _product_tile(
    expert, first, end, n_start, x_ptr, w_ptr, bias_ptr, out_ptr, route_ptr, order, h_ptr, data_ptr, plan, num_pairs,
    max_rank, h_stride, alpha, beta, limit, K: tl.constexpr, N: tl.constexpr, STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr, ROWS_PER_X: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTE: tl.constexpr, LORA: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    TWO: tl.constexpr = GATED == "concatenated"
    STEP: tl.constexpr = 2 if GATED == "interleaved" else 1
    position = first + tl.arange(0, BLOCK_M)
    valid = position < end
    pair = tl.load(order.pairs + position, mask=valid, other=0)
    column = n_start * STEP + tl.arange(0, BLOCK_N * STEP)
    inside = column < N * STEP
    if LORA:
        SITES: tl.constexpr = 1 if GATED == "no" else 2
        rank, b_at, up_rank, up_b_at, number = _find_lora(order, plan, position, valid, first, num_pairs, SITES)
        own = column // STEP
        gate_inside = inside & (column % STEP == 0)
        up_inside = inside & (column % STEP == STEP - 1)
        if AHEAD:
            b = load_b(data_ptr, number, rank, b_at, 0, 0, N, own, gate_inside, GROUP, BLOCK_R, UNIT, SWAP)
            up_b = b
            if SITES == 2:
                up_b = load_b(data_ptr, number, up_rank, up_b_at, 0, 0, N, own, up_inside, GROUP, BLOCK_R, UNIT, SWAP)
    if WAIT == 3:
        tl.extra.cuda.gdc_wait()
    acc, up = _main_loop(x_ptr, w_ptr + expert * STRIDE_E, pair // ROWS_PER_X, valid, column, column + N, inside, K,
                         STRIDE_N, STRIDE_K, BLOCK_M, BLOCK_N * STEP, BLOCK_K, TWO, N % BLOCK_N == 0, SWAP,
                         PRECISION)  # fmt: skip
    if LORA:
        if not AHEAD:
            b = load_b(data_ptr, number, rank, b_at, 0, 0, N, own, gate_inside, GROUP, BLOCK_R, UNIT, SWAP)
            up_b = b
            if SITES == 2:
                up_b = load_b(data_ptr, number, up_rank, up_b_at, 0, 0, N, own, up_inside, GROUP, BLOCK_R, UNIT, SWAP)
        if WAIT == 2:
            tl.extra.cuda.gdc_wait()
        acc, up = expand(acc, up, b, up_b, data_ptr, h_ptr, pair * h_stride, max_rank, number, rank, b_at, up_rank,
                         up_b_at, N, own, gate_inside, up_inside, SITES, TWO, GROUP, BLOCK_R, UNIT, SWAP,
                         PRECISION)  # fmt: skip
    if HAS_BIAS:
        bias = bias_ptr + expert * (N * (1 if GATED == "no" else 2)) + column
        acc += along(tl.load(bias, mask=inside, other=0.0).to(tl.float32), 1 - SWAP)
        if TWO:
            up += along(tl.load(bias + N, mask=inside, other=0.0).to(tl.float32), 1 - SWAP)
    if GATED == "no":
        result = activation(acc, acc, alpha, beta, limit, KIND)
    elif TWO:
        result = activation(acc, up, alpha, beta, limit, KIND)
    else:
        gate, up = split_columns(acc, BLOCK_M, BLOCK_N, SWAP)
        result = activation(gate, up, alpha, beta, limit, KIND)
    if HAS_ROUTE:
        result *= along(tl.load(route_ptr + pair, mask=valid, other=0.0).to(tl.float32), SWAP)
    n = n_start + tl.arange(0, BLOCK_N)
    target = out_ptr + along(pair.to(tl.int64) * N, SWAP) + along(n, 1 - SWAP)
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=along(valid, SWAP) & along(n < N, 1 - SWAP))


@triton.jit(do_not_specialize=["num_pairs", "group_tiles"])
def product_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, route_ptr, order, h_ptr, data_ptr, plan, num_pairs, max_rank, h_stride,
    group_tiles, alpha, beta, limit, K: tl.constexpr, N: tl.constexpr, STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr, ROWS_PER_X: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTE: tl.constexpr, LORA: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """See `moe.grouped_product`. WAIT 0: no dependent launch; 1: wait first; 2: before h is read; 3: before x."""
    if WAIT == 1:
        tl.extra.cuda.gdc_wait()
    if WAIT > 0:
        tl.extra.cuda.gdc_launch_dependents()
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = program // (group_tiles * TILES_N) * group_tiles + program % group_tiles
    # Read beside the number of live tiles, not after it: there is room for any tile, and a dead one is not used.
    expert, first = tl.load(order.tile_expert + tile), tl.load(order.tile_start + tile)
    end = tl.load(order.tile_end + tile)
    if tile < tl.load(order.counts):
        _product_tile(expert.to(tl.int64), first, end, program % (group_tiles * TILES_N) // group_tiles * BLOCK_N,
                      x_ptr, w_ptr, bias_ptr, out_ptr, route_ptr, order, h_ptr, data_ptr, plan, num_pairs, max_rank,
                      h_stride, alpha, beta, limit, K, N, STRIDE_E, STRIDE_N, STRIDE_K, ROWS_PER_X, GATED, KIND,
                      HAS_BIAS, HAS_ROUTE, LORA, UNIT, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, GROUP, AHEAD, SWAP,
                      PRECISION, WAIT)  # fmt: skip
