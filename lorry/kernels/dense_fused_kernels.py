"""Triton kernels of a decode layer's projections with LoRA and no launch of its own; launched by `dense_fused`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102  (what depends on a constexpr must stand in an if of its own to be left out)

import triton
import triton.language as tl

from lorry.kernels.dense_kernels import FLOAT32_OPERANDS, load_h, load_h_row, shrink_segment


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots", "num_rows", "num_segments", "num_shrink"])
def product_kernel(
    parts_ptr,
    x_ptr,
    weight_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    parts_stride,
    num_segments,
    num_shrink,
    h_ptr,
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
    h_split_stride,
    h_stride,
    max_rank,
    LORA: tl.constexpr,
    H_PARTS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    SHRINK_M: tl.constexpr,
    SHRINK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs below `num_shrink` shrink; the others each compute BLOCK_N columns over one part of the K axis."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if LORA:
        if pid < num_shrink:
            # fmt: off
            shrink_segment(
                pid % num_segments, 0, 1, pid // num_segments,
                h_ptr, x_ptr, data_ptr, a_offset_ptr, rank_ptr, indptr_ptr, slots_ptr, permutation_ptr,
                site0, site1, site2, num_slots, in_features, x_stride, h_split_stride, h_stride, max_rank,
                1, 16, 1, H_PARTS, False, HAS_PERMUTATION, EVEN_K, SPLIT_UNIT, SHRINK_M, 16, SHRINK_K,
            )
            # fmt: on
    if pid >= num_shrink:
        tile = pid - num_shrink
        row_tiles = tl.cdiv(num_rows, BLOCK_M)
        column_tiles = tl.cdiv(out_features, BLOCK_N)
        part = tile // row_tiles // column_tiles
        row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile // row_tiles % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok = row < num_rows
        n_ok = n < out_features
        operand = tl.float32 if FLOAT32_OPERANDS else x_ptr.dtype.element_ty
        part_len = (in_features + SPLITS * SPLIT_UNIT - 1) // (SPLITS * SPLIT_UNIT) * SPLIT_UNIT
        k_start = part * part_len
        x_rows = x_ptr + row.to(tl.int64)[None, :] * x_stride
        weight_rows = weight_ptr + n.to(tl.int64)[:, None] * in_features
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k0 in range(k_start, min(k_start + part_len, in_features), BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x_ok = row_ok[None, :]
            weight_ok = n_ok[:, None]
            if not EVEN_K:
                x_ok = x_ok & (k < in_features)[:, None]
                weight_ok = weight_ok & (k < in_features)[None, :]
            weight = tl.load(weight_rows + k[None, :], mask=weight_ok, other=0.0)
            x = tl.load(x_rows + k[:, None], mask=x_ok, other=0.0)
            acc = tl.dot(weight.to(operand), x.to(operand), acc, input_precision="ieee")
        target = parts_ptr + part.to(tl.int64) * parts_stride + row.to(tl.int64)[None, :] * out_features + n[:, None]
        tl.store(target, acc, mask=row_ok[None, :] & n_ok[:, None])


@triton.jit
def norm_and_rotate(a, b, ok, norm_ptr, cos, sin, eps, dtype, NORM: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm over the last axis of the halves a, b [rows, HALF] (rounded as transformers rounds), then rotary."""
    if NORM:
        c = tl.arange(0, HALF)
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(norm_ptr + c).to(tl.float32)[None, :]
        weight_b = tl.load(norm_ptr + HALF + c).to(tl.float32)[None, :]
        a = ((a * inverse).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * inverse).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    cos_a = tl.load(cos, mask=ok, other=0.0).to(tl.float32)
    sin_a = tl.load(sin, mask=ok, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + HALF, mask=ok, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + HALF, mask=ok, other=0.0).to(tl.float32)
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def store_head(
    a, b, row, row_ok, head, q_ptr, keys_ptr, values_ptr, write_slots_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    eps, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Halves a, b [rows, HALF] of one head of q, k or v to where they go."""
    WIDTH: tl.constexpr = 2 * HALF
    dtype = q_ptr.dtype.element_ty
    ok = row_ok[:, None]
    c = tl.arange(0, HALF)[None, :]
    wide_row = row.to(tl.int64)[:, None]
    slot = tl.load(write_slots_ptr + row, mask=row_ok, other=-1).to(tl.int64)[:, None]
    pool_row = slot * (KV_HEADS * WIDTH)
    write = ok & (slot >= 0)
    if head >= Q_HEADS + KV_HEADS:
        target = values_ptr + pool_row + (head - Q_HEADS - KV_HEADS) * WIDTH + c
    else:
        norm_ptr = k_norm_ptr
        target = keys_ptr + pool_row + (head - Q_HEADS) * WIDTH + c
        if head < Q_HEADS:
            norm_ptr = q_norm_ptr
            write = ok
            target = q_ptr + wide_row * (Q_HEADS * WIDTH) + head * WIDTH + c
        angle = wide_row * WIDTH + c
        a, b = norm_and_rotate(a, b, ok, norm_ptr, cos_ptr + angle, sin_ptr + angle, eps, dtype, NORM, HALF)
    tl.store(target, a.to(dtype), mask=write)
    tl.store(target + HALF, b.to(dtype), mask=write)


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots"])
def qkv_row_kernel(
    q_ptr, keys_ptr, values_ptr, parts_ptr, parts_stride, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    write_slots_ptr, token_slots_ptr, h_ptr, data_ptr, b_offset_ptr, rank_ptr, scale_ptr,
    site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One head of one row. The first BLOCK_R rank rows of B are read while the product still runs."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    c = tl.arange(0, HALF)
    WIDTH: tl.constexpr = 2 * HALF
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    if LORA:
        own_head = head - tl.where(is_v, Q_HEADS + KV_HEADS, tl.where(is_q, 0, Q_HEADS))
        slot = tl.load(token_slots_ptr + row)
        table = tl.where(is_v, site2, tl.where(is_q, site0, site1)) * num_slots + slot
        rank = tl.load(rank_ptr + table, mask=slot >= 0, other=0)
        scale = tl.load(scale_ptr + table, mask=slot >= 0, other=0.0)
        b_offset = tl.multiple_of(tl.load(b_offset_ptr + table, mask=slot >= 0, other=0), 16)
        width = tl.where(is_q, Q_HEADS, KV_HEADS) * WIDTH
        r = tl.arange(0, BLOCK_R)
        weight = data_ptr + b_offset + own_head * WIDTH + (r * width)[:, None] + c[None, :]
        weight_a = tl.load(weight, mask=(r < rank)[:, None], other=0.0)
        weight_b = tl.load(weight + HALF, mask=(r < rank)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = parts_ptr + row.to(tl.int64) * ((Q_HEADS + 2 * KV_HEADS) * WIDTH) + head * WIDTH + c
    a = tl.load(source).to(tl.float32)
    b = tl.load(source + HALF).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        a += tl.load(source + part * parts_stride)
        b += tl.load(source + part * parts_stride + HALF)
    if LORA:
        h_row = h_ptr + row.to(tl.int64) * h_stride + tl.where(is_v, 2, tl.where(is_q, 0, 1)) * max_rank
        h = load_h_row(h_row + r, r, rank, h_split_stride, H_PARTS) * scale
        a += tl.sum(h[:, None] * weight_a.to(tl.float32), 0)
        b += tl.sum(h[:, None] * weight_b.to(tl.float32), 0)
        for r0 in range(BLOCK_R, rank, BLOCK_R):
            more = r0 + r
            h = load_h_row(h_row + more, more, rank, h_split_stride, H_PARTS) * scale
            weight_a = tl.load(weight + r0 * width, mask=(more < rank)[:, None], other=0.0)
            weight_b = tl.load(weight + r0 * width + HALF, mask=(more < rank)[:, None], other=0.0)
            a += tl.sum(h[:, None] * weight_a.to(tl.float32), 0)
            b += tl.sum(h[:, None] * weight_b.to(tl.float32), 0)
    rows = row + tl.arange(0, 1)
    store_head(
        a[None, :], b[None, :], rows, rows >= 0, head, q_ptr, keys_ptr, values_ptr, write_slots_ptr,
        q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, eps, Q_HEADS, KV_HEADS, NORM, HALF,
    )  # fmt: skip


@triton.jit(do_not_specialize=["site0", "site1", "site2", "num_slots", "num_rows", "num_segments"])
def qkv_tile_kernel(
    q_ptr, keys_ptr, values_ptr, parts_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    write_slots_ptr, num_rows, num_segments, token_slots_ptr,
    h_ptr, data_ptr, b_offset_ptr, rank_ptr, scale_ptr, indptr_ptr, slots_ptr, permutation_ptr,
    site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, LORA: tl.constexpr,
    H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One head of BLOCK_M rows of a segment at a time, or of the base rows among BLOCK_M rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    group = tl.program_id(1)
    c = tl.arange(0, HALF)[None, :]
    WIDTH: tl.constexpr = 2 * HALF
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    own_head = head - tl.where(is_v, Q_HEADS + KV_HEADS, tl.where(is_q, 0, Q_HEADS))
    slot = tl.full([], -1, tl.int32)
    start = group * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, num_rows)
    if LORA:
        if group < num_segments:
            slot = tl.load(slots_ptr + group)
            start = tl.load(indptr_ptr + group)
            stop = tl.where(slot < 0, start, tl.load(indptr_ptr + group + 1))
        else:
            start -= num_segments * BLOCK_M
            stop = tl.minimum(start + BLOCK_M, num_rows)
    for row0 in range(start, stop, BLOCK_M):
        row = row0 + tl.arange(0, BLOCK_M)
        row_ok = row < stop
        if LORA:
            if slot < 0:
                row_ok = row_ok & (tl.load(token_slots_ptr + row, mask=row_ok, other=0) < 0)
            elif HAS_PERMUTATION:
                row = tl.load(permutation_ptr + row, mask=row_ok, other=0)
        wide_row = row.to(tl.int64)[:, None]
        source = parts_ptr + wide_row * ((Q_HEADS + 2 * KV_HEADS) * WIDTH) + head * WIDTH + c
        a = tl.load(source, mask=row_ok[:, None], other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=row_ok[:, None], other=0.0).to(tl.float32)
        if LORA:
            if slot >= 0:
                operand = tl.float32 if FLOAT32_OPERANDS else data_ptr.dtype.element_ty
                table = tl.where(is_v, site2, tl.where(is_q, site0, site1)) * num_slots + slot
                rank = tl.load(rank_ptr + table)
                width = tl.where(is_q, Q_HEADS, KV_HEADS) * WIDTH
                weight = data_ptr + tl.multiple_of(tl.load(b_offset_ptr + table), 16) + own_head * WIDTH + c
                h_rows = h_ptr + wide_row * h_stride + tl.where(is_v, 2, tl.where(is_q, 0, 1)) * max_rank
                for r0 in range(0, rank, BLOCK_R):
                    r = r0 + tl.arange(0, BLOCK_R)
                    h = load_h(h_rows, row_ok, r, rank, h_split_stride, H_PARTS) * tl.load(scale_ptr + table)
                    weight_a = tl.load(weight + (r * width)[:, None], mask=(r < rank)[:, None], other=0.0)
                    weight_b = tl.load(weight + (r * width)[:, None] + HALF, mask=(r < rank)[:, None], other=0.0)
                    a = tl.dot(h.to(operand), weight_a.to(operand), a, input_precision="ieee")
                    b = tl.dot(h.to(operand), weight_b.to(operand), b, input_precision="ieee")
        store_head(
            a, b, row, row_ok, head, q_ptr, keys_ptr, values_ptr, write_slots_ptr,
            q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, eps, Q_HEADS, KV_HEADS, NORM, HALF,
        )  # fmt: skip
