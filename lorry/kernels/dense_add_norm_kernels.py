"""Triton kernels that add a projection and its LoRA to the residual and take the norm; launched by `dense_fused`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from lorry.kernels.dense_kernels import load_h, sum_parts
from lorry.kernels.dense_tiles import rows_of_tile, tile_of_rows


@triton.jit(do_not_specialize=["num_segments", "site0", "site1", "site2", "num_slots"])
def add_norm_row_kernel(
    y_ptr, residual_ptr, parts_ptr, parts_stride, norm_ptr, eps, width,
    lora, num_segments, site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One row, all in registers. The first rank rows of B are read while the product still runs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    ok = n < width
    if LORA:
        slot = tl.load(lora[9] + row)
        table = site0 * num_slots + slot
        rank = tl.load(lora[4] + table, mask=slot >= 0, other=0)
        scale = tl.load(lora[5] + table, mask=slot >= 0, other=0.0)
        b_offset = tl.multiple_of(tl.load(lora[3] + table, mask=slot >= 0, other=0), 16)
        r = tl.arange(0, BLOCK_R)
        weight = lora[1] + b_offset + (r * width)[:, None] + n[None, :]
        b = tl.load(weight, mask=(r < rank)[:, None] & ok[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(residual_ptr + row * width + n, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts_ptr + part * parts_stride + row * width + n, mask=ok, other=0.0).to(tl.float32)
    if LORA:
        h_row = lora[0] + row * h_stride
        h = load_h(h_row + r, r >= 0, r, rank, h_split_stride, H_PARTS) * scale
        value += tl.sum(h[:, None] * b.to(tl.float32), 0)
        for r0 in range(BLOCK_R, rank, BLOCK_R):
            more = r0 + r
            h = load_h(h_row + more, r >= 0, more, rank, h_split_stride, H_PARTS) * scale
            b = tl.load(weight + r0 * width, mask=(more < rank)[:, None] & ok[None, :], other=0.0)
            value += tl.sum(h[:, None] * b.to(tl.float32), 0)
    norm = tl.load(norm_ptr + n, mask=ok, other=0.0)[None, :]
    at = (row * width + n)[None, :]
    store_norm(value[None, :], ok[None, :], residual_ptr + at, y_ptr + at, norm, eps, width)


@triton.jit
def store_norm(value, ok, residual, y, norm, eps, width):
    """Rows of the residual, and their norm times `norm`; as transformers rounds."""
    dtype = residual.dtype.element_ty
    rounded = value.to(dtype)
    tl.store(residual, rounded, mask=ok)
    value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    tl.store(y, ((value * inverse).to(dtype).to(tl.float32) * norm.to(tl.float32)).to(dtype), mask=ok)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "site0", "site1", "site2", "num_slots"])
def add_norm_tile_kernel(
    y_ptr, residual_ptr, x_ptr, norm_ptr, eps, width, num_rows,
    lora, num_segments, site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a segment, or the base rows among BLOCK_M rows, all in registers.

    A thread has the same columns of all rows, so it reads B once, BLOCK_R rank rows at a time, a divisor of 16.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, start, stop, step = tile_of_rows(
        tl.program_id(1), tl.program_id(0), tl.num_programs(0), num_rows, num_segments, lora, LORA, BLOCK_M
    )
    n = tl.arange(0, BLOCK_N)
    n_ok = n < width
    norm = tl.load(norm_ptr + n, mask=n_ok, other=0.0)[None, :]
    if LORA:
        table = site0 * num_slots + tl.maximum(slot, 0)
        rank = tl.where(slot < 0, 0, tl.load(lora[4] + table))
        scale = tl.load(lora[5] + table)
        b_row = lora[1] + tl.multiple_of(tl.load(lora[3] + table), 16) + n
    for row0 in range(start, stop, step):
        row, row_ok = rows_of_tile(row0 + tl.arange(0, BLOCK_M), stop, slot, lora, LORA, HAS_PERMUTATION)
        if tl.max(row_ok.to(tl.int32), 0) > 0:
            ok = row_ok[:, None] & n_ok[None, :]
            wide_row = row.to(tl.int64)
            at = (wide_row * width)[:, None] + n[None, :]
            value = tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
            value += tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
            if LORA:
                for r0 in range(0, rank, BLOCK_R):
                    for i in tl.static_range(BLOCK_R):
                        r = r0 + i
                        b = tl.load(b_row + r * width, mask=n < tl.where(r < rank, width, 0), other=0.0).to(
                            tl.float32
                        )
                        h = sum_parts(lora[0] + wide_row * h_stride + r, row_ok, h_split_stride, H_PARTS)
                        value += (h * scale)[:, None] * b[None, :]
            store_norm(value, ok, residual_ptr + at, y_ptr + at, norm, eps, width)
