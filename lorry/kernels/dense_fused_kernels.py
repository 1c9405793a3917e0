"""Triton kernels of a decode layer's projections with LoRA and no launch of its own; launched by `dense_fused`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102  (what depends on a constexpr must stand in an if of its own to be left out)

import triton
import triton.language as tl

from lorry.kernels.dense_kernels import FLOAT32_OPERANDS, by_slice, dot_h, load_h, shrink_segment
from lorry.kernels.dense_tiles import rows_of_tile, tile_of_rows


@triton.jit(do_not_specialize=["num_rows", "num_segments", "num_shrink", "site0", "site1", "site2", "num_slots"])
def product_kernel(
    parts_ptr, x_ptr, weight_ptr, num_rows, in_features, out_features, x_stride, parts_stride, num_shrink,
    lora, num_segments, site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT_UNIT: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_K: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Programs below `num_shrink` shrink; the others each compute BLOCK_N columns over one part of the K axis."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if LORA:
        if pid < num_shrink:
            shrink_segment(
                pid % num_segments, 0, 1, pid // num_segments,
                lora, x_ptr, site0, site1, site2, num_slots,
                in_features, x_stride, h_split_stride, h_stride, max_rank,
                1, 16, 1, H_PARTS, False, HAS_PERMUTATION, EVEN_K, SPLIT_UNIT, SHRINK_M, 16, SHRINK_K,
            )  # fmt: skip
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
def norm_and_rotate(a, b, norm_a, norm_b, cos, sin, eps, dtype, NORM: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm over the last axis of the halves a, b [rows, HALF] (rounded as transformers rounds), then rotary."""
    if NORM:
        inverse = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a = ((a * inverse).to(dtype).to(tl.float32) * norm_a.to(tl.float32)).to(dtype).to(tl.float32)
        b = ((b * inverse).to(dtype).to(tl.float32) * norm_b.to(tl.float32)).to(dtype).to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def targets(
    slice_, row, row_ok, q_ptr, keys_ptr, values_ptr, write_slots_ptr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(where head 0 of q, k or v of each row goes, whether it does), both [rows, 1]."""
    slot = tl.load(write_slots_ptr + row, mask=row_ok, other=-1).to(tl.int64)
    place = tl.where(slice_ == 0, row.to(tl.int64), slot)
    base = by_slice(slice_, q_ptr, keys_ptr, values_ptr)
    target = base + tl.multiple_of(place * by_slice(slice_, Q_HEADS, KV_HEADS, KV_HEADS) * WIDTH, 8)
    return target[:, None], (row_ok & (place >= 0))[:, None]


@triton.jit
def rotary(slice_, row, row_ok, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, HALF: tl.constexpr, NORM: tl.constexpr):
    """(norm weights of both halves [1, HALF], cos and sin of one half [rows, HALF]) of q or k."""
    c = tl.arange(0, HALF)[None, :]
    norm_ptr = q_norm_ptr
    if slice_ == 1:
        norm_ptr = k_norm_ptr
    norm_a = 1.0
    norm_b = 1.0
    if NORM:
        norm_a = tl.load(norm_ptr + c)
        norm_b = tl.load(norm_ptr + HALF + c)
    angle = row.to(tl.int64)[:, None] * (2 * HALF) + c
    ok = row_ok[:, None]
    return norm_a, norm_b, tl.load(cos_ptr + angle, mask=ok, other=0.0), tl.load(sin_ptr + angle, mask=ok, other=0.0)


@triton.jit(do_not_specialize=["num_segments", "site0", "site1", "site2", "num_slots"])
def qkv_row_kernel(
    q_ptr, keys_ptr, values_ptr, parts_ptr, parts_stride, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    write_slots_ptr,
    lora, num_segments, site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One head of one row. The first BLOCK_R rank rows of B are read while the product still runs."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    c = tl.arange(0, HALF)
    WIDTH: tl.constexpr = 2 * HALF
    slice_ = (head >= Q_HEADS).to(tl.int32) + (head >= Q_HEADS + KV_HEADS).to(tl.int32)
    own_head = head - by_slice(slice_, 0, Q_HEADS, Q_HEADS + KV_HEADS)
    if LORA:
        slot = tl.load(lora[9] + row)
        table = by_slice(slice_, site0, site1, site2) * num_slots + slot
        rank = tl.load(lora[4] + table, mask=slot >= 0, other=0)
        scale = tl.load(lora[5] + table, mask=slot >= 0, other=0.0)
        b_offset = tl.multiple_of(tl.load(lora[3] + table, mask=slot >= 0, other=0), 16)
        width = by_slice(slice_, Q_HEADS, KV_HEADS, KV_HEADS) * WIDTH
        r = tl.arange(0, BLOCK_R)
        weight = lora[1] + b_offset + own_head * WIDTH + (r * width)[:, None] + c[None, :]
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
        h_row = lora[0] + row.to(tl.int64) * h_stride + slice_ * max_rank
        h = load_h(h_row + r, r >= 0, r, rank, h_split_stride, H_PARTS) * scale
        a += tl.sum(h[:, None] * weight_a.to(tl.float32), 0)
        b += tl.sum(h[:, None] * weight_b.to(tl.float32), 0)
        for r0 in range(BLOCK_R, rank, BLOCK_R):
            more = r0 + r
            h = load_h(h_row + more, r >= 0, more, rank, h_split_stride, H_PARTS) * scale
            weight_a = tl.load(weight + r0 * width, mask=(more < rank)[:, None], other=0.0)
            weight_b = tl.load(weight + r0 * width + HALF, mask=(more < rank)[:, None], other=0.0)
            a += tl.sum(h[:, None] * weight_a.to(tl.float32), 0)
            b += tl.sum(h[:, None] * weight_b.to(tl.float32), 0)
    rows = row + tl.arange(0, 1)
    ok = rows >= 0
    target, write = targets(slice_, rows, ok, q_ptr, keys_ptr, values_ptr, write_slots_ptr, Q_HEADS, KV_HEADS, WIDTH)
    norm_a, norm_b, cos, sin = rotary(slice_, rows, ok, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, HALF, NORM)
    a, b = finish_head(
        slice_, a[None, :], b[None, :], norm_a, norm_b, cos, sin, eps, q_ptr.dtype.element_ty, NORM, HALF
    )
    tl.store(target + own_head * WIDTH + c[None, :], a, mask=write)
    tl.store(target + own_head * WIDTH + HALF + c[None, :], b, mask=write)


@triton.jit
def finish_head(slice_, a, b, norm_a, norm_b, cos, sin, eps, dtype, NORM: tl.constexpr, HALF: tl.constexpr):
    """Halves of a head as they are stored: v as it is, q and k normed and rotated.

    Without a branch, so that in a loop over heads what it does to cos and sin is done once.
    """
    new_a, new_b = norm_and_rotate(a, b, norm_a, norm_b, cos, sin, eps, dtype, NORM, HALF)
    return tl.where(slice_ == 2, a, new_a).to(dtype), tl.where(slice_ == 2, b, new_b).to(dtype)


@triton.jit
def finish_heads(
    slice_, source, ok, target, write, turn, eps, h_rows, h_split_stride, weight, width, rank, scale,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Heads from `source` to `target` [rows, HALF], with LoRA if any. All of a head is read before any of it is used.

    Base rows take the way without LoRA whatever the kernel, so that their sums are the same.
    """
    r = tl.arange(0, BLOCK_R)
    if LORA:
        operand = tl.float32 if FLOAT32_OPERANDS else weight.dtype.element_ty
        h = load_h(h_rows + r[None, :], ok, r[None, :], rank, h_split_stride, H_PARTS) * scale
    for head in range(HEADS):
        if LORA:
            own_weight = weight + head * 2 * HALF
            weight_a = tl.load(own_weight + (r * width)[:, None], mask=(r < rank)[:, None], other=0.0)
            weight_b = tl.load(own_weight + (r * width)[:, None] + HALF, mask=(r < rank)[:, None], other=0.0)
        a = tl.load(source + head * 2 * HALF, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(source + head * 2 * HALF + HALF, mask=ok, other=0.0).to(tl.float32)
        if LORA:
            a = dot_h(h, weight_a.to(operand), a)
            b = dot_h(h, weight_b.to(operand), b)
            for r0 in range(BLOCK_R, rank, BLOCK_R):
                more = r0 + r
                more_h = load_h(h_rows + more[None, :], ok, more[None, :], rank, h_split_stride, H_PARTS) * scale
                more_ok = (more < rank)[:, None]
                weight_a = tl.load(own_weight + (more * width)[:, None], mask=more_ok, other=0.0)
                weight_b = tl.load(own_weight + (more * width)[:, None] + HALF, mask=more_ok, other=0.0)
                a = dot_h(more_h, weight_a.to(operand), a)
                b = dot_h(more_h, weight_b.to(operand), b)
        dtype = target.dtype.element_ty
        a, b = finish_head(slice_, a, b, turn[0], turn[1], turn[2], turn[3], eps, dtype, NORM, HALF)
        tl.store(target + head * 2 * HALF, a, mask=write)
        tl.store(target + head * 2 * HALF + HALF, b, mask=write)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "site0", "site1", "site2", "num_slots"])
def qkv_tile_kernel(
    q_ptr, keys_ptr, values_ptr, parts_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, write_slots_ptr, num_rows,
    lora, num_segments, site0, site1, site2, num_slots, h_split_stride, h_stride, max_rank,
    LORA: tl.constexpr, H_PARTS: tl.constexpr, HAS_PERMUTATION: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """HEADS heads of q, of k or of v, for BLOCK_M rows of a segment, or for the base rows among BLOCK_M rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = 2 * HALF
    head0 = tl.program_id(0) * HEADS
    slot, start, stop, step = tile_of_rows(
        tl.program_id(2), tl.program_id(1), tl.num_programs(1), num_rows, num_segments, lora, LORA, BLOCK_M
    )
    slice_ = (head0 >= Q_HEADS).to(tl.int32) + (head0 >= Q_HEADS + KV_HEADS).to(tl.int32)
    own_head0 = head0 - by_slice(slice_, 0, Q_HEADS, Q_HEADS + KV_HEADS)
    c = tl.arange(0, HALF)[None, :]
    width = by_slice(slice_, Q_HEADS, KV_HEADS, KV_HEADS) * WIDTH
    table = by_slice(slice_, site0, site1, site2) * num_slots + tl.maximum(slot, 0)
    for row0 in range(start, stop, step):
        row, row_ok = rows_of_tile(row0 + tl.arange(0, BLOCK_M), stop, slot, lora, LORA, HAS_PERMUTATION)
        wide_row = row.to(tl.int64)[:, None]
        source = parts_ptr + wide_row * ((Q_HEADS + 2 * KV_HEADS) * WIDTH) + head0 * WIDTH + c
        target, write = targets(
            slice_, row, row_ok, q_ptr, keys_ptr, values_ptr, write_slots_ptr, Q_HEADS, KV_HEADS, WIDTH
        )
        target += own_head0 * WIDTH + c
        turn = rotary(slice_, row, row_ok, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, HALF, NORM)
        if LORA:
            if slot >= 0:
                weight = lora[1] + tl.multiple_of(tl.load(lora[3] + table), 16) + own_head0 * WIDTH + c
                finish_heads(
                    slice_, source, row_ok[:, None], target, write, turn, eps,
                    lora[0] + wide_row * h_stride + slice_ * max_rank, h_split_stride, weight, width,
                    tl.load(lora[4] + table), tl.load(lora[5] + table), True, H_PARTS, NORM, HALF, HEADS, BLOCK_R,
                )  # fmt: skip
        if slot < 0:
            finish_heads(
                slice_, source, row_ok[:, None], target, write, turn, eps, source, 0, source, width, 0, 1.0,
                False, 1, NORM, HALF, HEADS, BLOCK_R,
            )  # fmt: skip
