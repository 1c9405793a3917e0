"""Triton kernels of dense LoRA, launched by `dense`, and what they share with those of `dense_fused`.

Every kernel gets its tensors of LoRA as one tuple, that of `dense.lora_pointers`: 0 h, 1 data, 2 a_offset,
3 b_offset, 4 rank, 5 scale, 6 indptr, 7 slots, 8 permutation, 9 token_slots.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its interpreter, on the CPU."""

# The interpreter would multiply the bits of bfloat16 as integers: its products are of float32.
FLOAT32_OPERANDS = tl.constexpr(INTERPRETED)


@triton.jit
def by_slice(slice_, value0, value1, value2):
    """The value of slice 0, 1 or 2."""
    return tl.where(slice_ == 0, value0, tl.where(slice_ == 1, value1, value2))


@triton.jit
def rows_at(positions, stop, permutation_ptr, HAS_PERMUTATION: tl.constexpr):
    """(rows, which of them there are) at positions of a segment that ends at `stop`."""
    ok = positions < stop
    rows = positions
    if HAS_PERMUTATION:
        rows = tl.load(permutation_ptr + positions, mask=ok, other=0)
    return rows, ok


@triton.jit
def shrink_segment(
    segment, tile, num_tiles, work, lora, x_ptr, site0, site1, site2, num_slots,
    in_features, x_stride, h_split_stride, h_stride, max_rank,
    JOIN: tl.constexpr, COLUMNS: tl.constexpr, RANK_PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
    SERIAL: tl.constexpr, HAS_PERMUTATION: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A segment's rows against rank rows of JOIN slices: one of the SPLITS parts of the K axis, or all of them one
    after the other (SERIAL), which gives the same sum."""
    slot = tl.load(lora[7] + segment)
    if slot >= 0:
        start = tl.load(lora[6] + segment)
        stop = tl.load(lora[6] + segment + 1)
        PROGRAMS: tl.constexpr = 1 if SERIAL else SPLITS
        split = work % PROGRAMS
        rank_program = work // PROGRAMS % RANK_PROGRAMS
        column = tl.arange(0, COLUMNS)
        slice_ = work // (PROGRAMS * RANK_PROGRAMS) * JOIN + column // BLOCK_R
        table = by_slice(slice_, site0, site1, site2) * num_slots + slot
        rank = tl.load(lora[4] + table, mask=column < JOIN * BLOCK_R, other=0)
        a_offset = tl.multiple_of(tl.load(lora[2] + table), 16)
        largest_rank = tl.max(rank, 0)
        operand = tl.float32 if FLOAT32_OPERANDS else x_ptr.dtype.element_ty
        part_len = (in_features + SPLITS * SPLIT_UNIT - 1) // (SPLITS * SPLIT_UNIT) * SPLIT_UNIT
        k_start = split * part_len
        k_stop = in_features if SERIAL else tl.minimum(k_start + part_len, in_features)
        for row0 in range(start + tile * BLOCK_M, stop, num_tiles * BLOCK_M):
            row, row_ok = rows_at(row0 + tl.arange(0, BLOCK_M), stop, lora[8], HAS_PERMUTATION)
            x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
            h_rows = lora[0] + split * h_split_stride + row.to(tl.int64)[:, None] * h_stride
            for r0 in range(rank_program * BLOCK_R, largest_rank, RANK_PROGRAMS * BLOCK_R):
                r = r0 + column % BLOCK_R
                r_ok = r < rank
                a_columns = lora[1] + (a_offset + r * in_features)[None, :]
                total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
                acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
                for k0 in range(k_start, k_stop, BLOCK_K):
                    k = k0 + tl.arange(0, BLOCK_K)
                    x_ok = row_ok[:, None]
                    a_ok = r_ok[None, :]
                    if not EVEN_K:
                        x_ok = x_ok & (k < in_features)[None, :]
                        a_ok = a_ok & (k < in_features)[:, None]
                    x = tl.load(x_rows + k[None, :], mask=x_ok, other=0.0)
                    a = tl.load(a_columns + k[:, None], mask=a_ok, other=0.0)
                    acc = tl.dot(x.to(operand), a.to(operand), acc, input_precision="ieee")
                    if SERIAL and SPLITS > 1:
                        part_ends = (k0 + BLOCK_K) % part_len == 0
                        total += tl.where(part_ends, acc, 0.0)
                        acc = tl.where(part_ends, 0.0, acc)
                total += acc
                h_ok = row_ok[:, None] & (r < (rank + 15) // 16 * 16)[None, :]
                tl.store(h_rows + (slice_ * max_rank + r)[None, :], total, mask=h_ok)


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots"])
def shrink_kernel(
    lora, x_ptr, site0, site1, site2, num_slots, in_features, x_stride, h_split_stride, h_stride, max_rank,
    JOIN: tl.constexpr, COLUMNS: tl.constexpr, RANK_PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
    SERIAL: tl.constexpr, HAS_PERMUTATION: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: segments, tiles of a segment, what `shrink_segment` calls work."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    shrink_segment(
        tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.program_id(2),
        lora, x_ptr, site0, site1, site2, num_slots, in_features, x_stride, h_split_stride, h_stride, max_rank,
        JOIN, COLUMNS, RANK_PROGRAMS, SPLITS, SERIAL, HAS_PERMUTATION, EVEN_K, SPLIT_UNIT, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip


@triton.jit
def sum_parts(h, mask, split_stride, PARTS: tl.constexpr):
    """h at the pointers `h`: the parts of the K axis summed in order; zero where not `mask`."""
    value = tl.load(h, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(h + part * split_stride, mask=mask, other=0.0)
    return value


@triton.jit
def load_h(h, ok, r, rank, split_stride, PARTS: tl.constexpr):
    """h of rank rows r, where `ok`. Zero from the rank to the next multiple of 16."""
    return sum_parts(h, ok & (r < (rank + 15) // 16 * 16), split_stride, PARTS)


@triton.jit
def dot_h(h, b, acc):
    """acc + h b for h [rows, ranks] float32, rounded to b's type; no row of h is too large for float16."""
    if b.dtype == tl.float16:
        factor = tl.maximum(tl.max(tl.abs(h), 1) * 2.0**-15, 1.0)[:, None]
        return acc + tl.dot((h / factor).to(tl.float16), b) * factor
    return tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots"])
def expand_kernel(
    lora, y_ptr, site0, site1, site2, num_slots, width0, width1, width2, y_stride,
    h_split_stride, h_stride, max_rank,
    PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST_R: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: segments, tiles of a segment, blocks of BLOCK_N columns of the slices one after another.

    The first FIRST_R rank rows are read early and need no loop; more come BLOCK_R at a time.
    """
    segment = tl.program_id(0)
    blocks0 = tl.cdiv(width0, BLOCK_N)
    blocks1 = tl.cdiv(width1, BLOCK_N)
    block = tl.program_id(2)
    slice_ = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    width = by_slice(slice_, width0, width1, width2)
    n = (block - by_slice(slice_, 0, blocks0, blocks0 + blocks1)) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < width
    slot = tl.load(lora[7] + segment)
    table = by_slice(slice_, site0, site1, site2) * num_slots + slot
    rank = tl.load(lora[4] + table, mask=slot >= 0, other=0)
    # Weights do not depend on the kernel before this one, so the first of them are read while it still runs.
    b_offset = tl.multiple_of(tl.load(lora[3] + table, mask=slot >= 0, other=0), 16)
    b_columns = lora[1] + b_offset + n[None, :]
    r = tl.arange(0, FIRST_R)
    operand = tl.float32 if FLOAT32_OPERANDS else y_ptr.dtype.element_ty
    first_b = tl.load(b_columns + (r * width)[:, None], mask=(r < rank)[:, None] & n_ok[None, :], other=0.0)
    first_b = first_b.to(operand)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if rank == 0:
        return
    scale = tl.load(lora[5] + table)
    start = tl.load(lora[6] + segment)
    stop = tl.load(lora[6] + segment + 1)
    y_columns = y_ptr + (by_slice(slice_, 0, width0, width0 + width1) + n)[None, :]
    for row0 in range(start + tl.program_id(1) * BLOCK_M, stop, tl.num_programs(1) * BLOCK_M):
        row, row_ok = rows_at(row0 + tl.arange(0, BLOCK_M), stop, lora[8], HAS_PERMUTATION)
        ok = row_ok[:, None]
        y_block = y_columns + row.to(tl.int64)[:, None] * y_stride
        y = tl.load(y_block, mask=ok & n_ok[None, :], other=0.0)
        h_rows = lora[0] + row.to(tl.int64)[:, None] * h_stride + slice_ * max_rank
        h = load_h(h_rows + r[None, :], ok, r[None, :], rank, h_split_stride, PARTS)
        acc = dot_h(h, first_b, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        for r0 in range(FIRST_R, rank, BLOCK_R):
            more = r0 + tl.arange(0, BLOCK_R)
            more_h = load_h(h_rows + more[None, :], ok, more[None, :], rank, h_split_stride, PARTS)
            b_ok = (more < rank)[:, None] & n_ok[None, :]
            b = tl.load(b_columns + (more * width)[:, None], mask=b_ok, other=0.0)
            acc = dot_h(more_h, b.to(operand), acc)
        tl.store(y_block, (y.to(tl.float32) + acc * scale).to(y.dtype), mask=ok & n_ok[None, :])
