"""Triton kernels of dense LoRA, launched by `dense`, which says what they compute."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its interpreter, on the CPU."""

# The interpreter would multiply the bits of bfloat16 as integers: its products are of float32.
FLOAT32_OPERANDS = tl.constexpr(INTERPRETED)


@triton.jit
def shrink_segment(
    segment,
    tile,
    num_tiles,
    work,
    h_ptr,
    x_ptr,
    data_ptr,
    a_offset_ptr,
    rank_ptr,
    indptr_ptr,
    slots_ptr,
    permutation_ptr,
    site0,
    site1,
    site2,
    num_slots,
    in_features,
    x_stride,
    h_split_stride,
    h_stride,
    max_rank,
    JOIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr,
    SERIAL: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A segment's rows against rank rows of JOIN slices: one of the SPLITS parts of the K axis, or all of them one
    after the other (SERIAL), which gives the same sum."""
    slot = tl.load(slots_ptr + segment)
    if slot >= 0:
        start = tl.load(indptr_ptr + segment)
        stop = tl.load(indptr_ptr + segment + 1)
        PROGRAMS: tl.constexpr = 1 if SERIAL else SPLITS
        PARTS: tl.constexpr = SPLITS if SERIAL else 1
        split = work % PROGRAMS
        rank_program = work // PROGRAMS % RANK_PROGRAMS
        column = tl.arange(0, COLUMNS)
        slice_ = work // (PROGRAMS * RANK_PROGRAMS) * JOIN + column // BLOCK_R
        table = tl.where(slice_ == 0, site0, tl.where(slice_ == 1, site1, site2)) * num_slots + slot
        rank = tl.load(rank_ptr + table, mask=column < JOIN * BLOCK_R, other=0)
        a_offset = tl.multiple_of(tl.load(a_offset_ptr + table), 16)
        largest_rank = tl.max(rank, 0)
        operand = tl.float32 if FLOAT32_OPERANDS else x_ptr.dtype.element_ty
        part_len = (in_features + SPLITS * SPLIT_UNIT - 1) // (SPLITS * SPLIT_UNIT) * SPLIT_UNIT
        for row0 in range(start + tile * BLOCK_M, stop, num_tiles * BLOCK_M):
            position = row0 + tl.arange(0, BLOCK_M)
            row_ok = position < stop
            row = position
            if HAS_PERMUTATION:
                row = tl.load(permutation_ptr + position, mask=row_ok, other=0)
            x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
            h_rows = h_ptr + split * h_split_stride + row.to(tl.int64)[:, None] * h_stride
            for r0 in range(rank_program * BLOCK_R, largest_rank, RANK_PROGRAMS * BLOCK_R):
                r = r0 + column % BLOCK_R
                r_ok = r < rank
                a_columns = data_ptr + (a_offset + r * in_features)[None, :]
                total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
                for part in tl.static_range(PARTS):
                    k_start = (split + part) * part_len
                    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
                    for k0 in range(k_start, min(k_start + part_len, in_features), BLOCK_K):
                        k = k0 + tl.arange(0, BLOCK_K)
                        x_ok = row_ok[:, None]
                        a_ok = r_ok[None, :]
                        if not EVEN_K:
                            x_ok = x_ok & (k < in_features)[None, :]
                            a_ok = a_ok & (k < in_features)[:, None]
                        x = tl.load(x_rows + k[None, :], mask=x_ok, other=0.0)
                        a = tl.load(a_columns + k[:, None], mask=a_ok, other=0.0)
                        acc = tl.dot(x.to(operand), a.to(operand), acc, input_precision="ieee")
                    total += acc
                h_ok = row_ok[:, None] & (r < (rank + 15) // 16 * 16)[None, :]
                tl.store(h_rows + (slice_ * max_rank + r)[None, :], total, mask=h_ok)


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots"])
def shrink_kernel(
    h_ptr,
    x_ptr,
    data_ptr,
    a_offset_ptr,
    rank_ptr,
    indptr_ptr,
    slots_ptr,
    permutation_ptr,
    site0,
    site1,
    site2,
    num_slots,
    in_features,
    x_stride,
    h_split_stride,
    h_stride,
    max_rank,
    JOIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr,
    SERIAL: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: segments, tiles of a segment, what `shrink_segment` calls work."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # fmt: off
    shrink_segment(
        tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.program_id(2),
        h_ptr, x_ptr, data_ptr, a_offset_ptr, rank_ptr, indptr_ptr, slots_ptr, permutation_ptr,
        site0, site1, site2, num_slots, in_features, x_stride, h_split_stride, h_stride, max_rank,
        JOIN, COLUMNS, RANK_PROGRAMS, SPLITS, SERIAL, HAS_PERMUTATION, EVEN_K, SPLIT_UNIT, BLOCK_M, BLOCK_R, BLOCK_K,
    )
    # fmt: on


@triton.jit
def load_h(h_rows, row_ok, r, rank, split_stride, PARTS: tl.constexpr):
    """[rows, ranks] of h: the parts of the K axis summed in order. Zero from the rank to the next multiple of 16."""
    mask = row_ok[:, None] & (r < (rank + 15) // 16 * 16)[None, :]
    h = tl.load(h_rows + r[None, :], mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        h += tl.load(h_rows + part * split_stride + r[None, :], mask=mask, other=0.0)
    return h


@triton.jit
def load_h_row(h, r, rank, split_stride, PARTS: tl.constexpr):
    """[ranks] of one row of h, from the pointers h: as `load_h`."""
    mask = r < (rank + 15) // 16 * 16
    total = tl.load(h, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(h + part * split_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots"])
def expand_kernel(
    y_ptr,
    h_ptr,
    data_ptr,
    b_offset_ptr,
    rank_ptr,
    scale_ptr,
    indptr_ptr,
    slots_ptr,
    permutation_ptr,
    site0,
    site1,
    site2,
    width0,
    width1,
    width2,
    num_slots,
    y_stride,
    h_split_stride,
    h_stride,
    max_rank,
    PARTS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: segments, tiles of a segment, blocks of BLOCK_N columns of the slices one after another.

    The first FIRST_R rank rows are read early and need no loop; more come BLOCK_R at a time.
    """
    segment = tl.program_id(0)
    blocks0 = tl.cdiv(width0, BLOCK_N)
    blocks1 = tl.cdiv(width1, BLOCK_N)
    block = tl.program_id(2)
    past0 = block >= blocks0
    past1 = block >= blocks0 + blocks1
    slice_ = past0.to(tl.int32) + past1.to(tl.int32)
    width = tl.where(past1, width2, tl.where(past0, width1, width0))
    first_block = tl.where(past1, blocks0 + blocks1, tl.where(past0, blocks0, 0))
    n = (block - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < width
    slot = tl.load(slots_ptr + segment)
    table = tl.where(past1, site2, tl.where(past0, site1, site0)) * num_slots + slot
    rank = tl.load(rank_ptr + table, mask=slot >= 0, other=0)
    # Weights do not depend on the kernel before this one, so the first of them are read while it still runs.
    b_offset = tl.multiple_of(tl.load(b_offset_ptr + table, mask=slot >= 0, other=0), 16)
    b_columns = data_ptr + b_offset + n[None, :]
    r = tl.arange(0, FIRST_R)
    operand = tl.float32 if FLOAT32_OPERANDS else y_ptr.dtype.element_ty
    first_b = tl.load(b_columns + (r * width)[:, None], mask=(r < rank)[:, None] & n_ok[None, :], other=0.0)
    first_b = first_b.to(operand)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if rank == 0:
        return
    scale = tl.load(scale_ptr + table)
    start = tl.load(indptr_ptr + segment)
    stop = tl.load(indptr_ptr + segment + 1)
    y_columns = y_ptr + (tl.where(past1, width0 + width1, tl.where(past0, width0, 0)) + n)[None, :]
    for row0 in range(start + tl.program_id(1) * BLOCK_M, stop, tl.num_programs(1) * BLOCK_M):
        position = row0 + tl.arange(0, BLOCK_M)
        row_ok = position < stop
        row = position
        if HAS_PERMUTATION:
            row = tl.load(permutation_ptr + position, mask=row_ok, other=0)
        y_block = y_columns + row.to(tl.int64)[:, None] * y_stride
        y_ok = row_ok[:, None] & n_ok[None, :]
        y = tl.load(y_block, mask=y_ok, other=0.0)
        h_rows = h_ptr + row.to(tl.int64)[:, None] * h_stride + slice_ * max_rank
        h = load_h(h_rows, row_ok, r, rank, h_split_stride, PARTS)
        acc = tl.dot(h.to(operand), first_b, input_precision="ieee")
        for r0 in range(FIRST_R, rank, BLOCK_R):
            more = r0 + tl.arange(0, BLOCK_R)
            more_h = load_h(h_rows, row_ok, more, rank, h_split_stride, PARTS)
            b_ok = (more < rank)[:, None] & n_ok[None, :]
            b = tl.load(b_columns + (more * width)[:, None], mask=b_ok, other=0.0)
            acc = tl.dot(more_h.to(operand), b.to(operand), acc, input_precision="ieee")
        tl.store(y_block, (y.to(tl.float32) + acc * scale).to(y.dtype), mask=y_ok)
