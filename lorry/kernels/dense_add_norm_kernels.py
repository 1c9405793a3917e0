"""Triton kernels that add a projection and its LoRA to the residual and take the norm; launched by `dense_fused`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from lorry.kernels.dense_kernels import FLOAT32_OPERANDS, load_h, load_h_row


@triton.jit(do_not_specialize=["site0", "num_slots"])
def add_norm_row_kernel(
    y_ptr,
    residual_ptr,
    parts_ptr,
    parts_stride,
    norm_ptr,
    eps,
    width,
    token_slots_ptr,
    h_ptr,
    data_ptr,
    b_offset_ptr,
    rank_ptr,
    scale_ptr,
    site0,
    num_slots,
    h_split_stride,
    h_stride,
    PARTS: tl.constexpr,
    LORA: tl.constexpr,
    H_PARTS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One row, all in registers. The first rank rows of B are read while the product still runs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    ok = n < width
    if LORA:
        slot = tl.load(token_slots_ptr + row)
        table = site0 * num_slots + slot
        rank = tl.load(rank_ptr + table, mask=slot >= 0, other=0)
        scale = tl.load(scale_ptr + table, mask=slot >= 0, other=0.0)
        b_offset = tl.multiple_of(tl.load(b_offset_ptr + table, mask=slot >= 0, other=0), 16)
        r = tl.arange(0, BLOCK_R)
        weight = data_ptr + b_offset + (r * width)[:, None] + n[None, :]
        b = tl.load(weight, mask=(r < rank)[:, None] & ok[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = residual_ptr.dtype.element_ty
    value = tl.load(residual_ptr + row * width + n, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts_ptr + part * parts_stride + row * width + n, mask=ok, other=0.0).to(tl.float32)
    if LORA:
        h_row = h_ptr + row * h_stride
        h = load_h_row(h_row + r, r, rank, h_split_stride, H_PARTS) * scale
        value += tl.sum(h[:, None] * b.to(tl.float32), 0)
        for r0 in range(BLOCK_R, rank, BLOCK_R):
            more = r0 + r
            h = load_h_row(h_row + more, more, rank, h_split_stride, H_PARTS) * scale
            b = tl.load(weight + r0 * width, mask=(more < rank)[:, None] & ok[None, :], other=0.0)
            value += tl.sum(h[:, None] * b.to(tl.float32), 0)
    rounded = value.to(dtype)
    tl.store(residual_ptr + row * width + n, rounded, mask=ok)
    value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    norm = tl.load(norm_ptr + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + n, ((value * inverse).to(dtype).to(tl.float32) * norm).to(dtype), mask=ok)


@triton.jit(do_not_specialize=["site0", "num_slots", "num_rows", "num_segments"])
def add_norm_tile_kernel(
    y_ptr,
    residual_ptr,
    x_ptr,
    norm_ptr,
    eps,
    width,
    num_rows,
    num_segments,
    token_slots_ptr,
    h_ptr,
    data_ptr,
    b_offset_ptr,
    rank_ptr,
    scale_ptr,
    indptr_ptr,
    slots_ptr,
    permutation_ptr,
    site0,
    num_slots,
    h_split_stride,
    h_stride,
    LORA: tl.constexpr,
    H_PARTS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_M rows of a segment, or the base rows among BLOCK_M rows: the sums, then the norm of them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0)
    tile = tl.program_id(1)
    start = (group * tl.num_programs(1) + tile) * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, num_rows)
    step = BLOCK_M
    slot = tl.full([], -1, tl.int32)
    rank = tl.full([], 0, tl.int32)
    scale = tl.full([], 1.0, tl.float32)
    weight_ptr = data_ptr
    if LORA:
        if group < num_segments:
            slot = tl.load(slots_ptr + group)
            start = tl.load(indptr_ptr + group) + tile * BLOCK_M
            stop = tl.where(slot < 0, start, tl.load(indptr_ptr + group + 1))
            step = tl.num_programs(1) * BLOCK_M
            table = site0 * num_slots + tl.maximum(slot, 0)
            rank = tl.load(rank_ptr + table)
            scale = tl.load(scale_ptr + table)
            weight_ptr = data_ptr + tl.load(b_offset_ptr + table)
        else:
            start -= num_segments * tl.num_programs(1) * BLOCK_M
            stop = tl.minimum(start + BLOCK_M, num_rows)
    weight_ptr = tl.multiple_of(weight_ptr, 16)
    dtype = residual_ptr.dtype.element_ty
    for row0 in range(start, stop, step):
        row = row0 + tl.arange(0, BLOCK_M)
        row_ok = row < stop
        if LORA:
            if slot < 0:
                row_ok = row_ok & (tl.load(token_slots_ptr + row, mask=row_ok, other=0) < 0)
            elif HAS_PERMUTATION:
                row = tl.load(permutation_ptr + row, mask=row_ok, other=0)
        wide_row = row.to(tl.int64)[:, None]
        squares = tl.zeros([BLOCK_M], tl.float32)
        for n0 in range(0, width, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            ok = row_ok[:, None] & (n < width)[None, :]
            at = wide_row * width + n[None, :]
            value = tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
            value += tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
            if LORA:
                operand = tl.float32 if FLOAT32_OPERANDS else data_ptr.dtype.element_ty
                for r0 in range(0, rank, BLOCK_R):
                    r = r0 + tl.arange(0, BLOCK_R)
                    h = load_h(h_ptr + wide_row * h_stride, row_ok, r, rank, h_split_stride, H_PARTS) * scale
                    b_ok = (r < rank)[:, None] & (n < width)[None, :]
                    b = tl.load(weight_ptr + (r * width)[:, None] + n[None, :], mask=b_ok, other=0.0)
                    value = tl.dot(h.to(operand), b.to(operand), value, input_precision="ieee")
            rounded = value.to(dtype)
            tl.store(residual_ptr + at, rounded, mask=ok)
            value = rounded.to(tl.float32)
            squares += tl.sum(value * value, 1)
        inverse = tl.rsqrt(squares / width + eps)[:, None]
        tl.debug_barrier()
        for n0 in range(0, width, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            ok = row_ok[:, None] & (n < width)[None, :]
            at = wide_row * width + n[None, :]
            value = tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
            norm = tl.load(norm_ptr + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
            tl.store(y_ptr + at, ((value * inverse).to(dtype).to(tl.float32) * norm).to(dtype), mask=ok)
