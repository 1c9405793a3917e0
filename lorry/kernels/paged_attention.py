"""Decode attention over a paged KV pool, split along the context, and the write of new keys and values to it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_STAGES = 3
"""Depth of the decode kernel's pipeline. A place is loaded before the row at it: 3 hold one block of keys, 5 two."""

_LOG2E: Any = tl.constexpr(1.4426950408889634)


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        column = tl.arange(0, BLOCK_D)[None, :]
        in_k = (head < HEADS) & (column < DK)
        in_v = (head < HEADS) & (column < DV)
        k = tl.load(k_ptr + row * k_row + head * k_head + column, mask=in_k)
        tl.store(keys_ptr + slot * (HEADS * DK) + head * DK + column, k, mask=in_k)
        v = tl.load(v_ptr + row * v_row + head * v_head + column, mask=in_v)
        tl.store(values_ptr + slot * (HEADS * DV) + head * DV + column, v, mask=in_v)


@triton.jit(do_not_specialize=["pages_row", "min_part", "splits"])
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, rows_ptr, pages_ptr, lens_ptr, sinks_ptr, part_ptr, norm_ptr,
    q_row, q_head, pages_row, scale, softcap, window, min_part, splits,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one KV head, one part of the context. Softmax runs in base 2."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    first = tl.maximum(length - window, 0)
    parts = tl.maximum(tl.minimum(tl.cdiv(length - first, min_part), splits), 1)
    chunk = tl.cdiv(tl.cdiv(length - first, parts), BLOCK_N) * BLOCK_N
    low = first + split * chunk
    high = tl.minimum(low + chunk, length)
    g, dk, dv = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    head = kv_head * GROUP + g
    row = seq
    if HAS_ROWS:
        row = tl.load(rows_ptr + seq)
    in_g = g < tl.where(low < high, GROUP, 0)  # a part without keys leaves its place as it is
    q_mask = in_g[:, None] & (dk < DK)[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_row + head[:, None] * q_head + dk[None, :], mask=q_mask, other=0.0)
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    if HAS_SINKS and split == 0:
        best = tl.load(sinks_ptr + head, mask=g < GROUP, other=0.0).to(tl.float32) * _LOG2E
        total = tl.full([BLOCK_G], 1.0, tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < high
        page = tl.load(pages_ptr + seq * pages_row + n // PAGE, mask=valid, other=0).to(tl.int64)
        place = (page * PAGE + n % PAGE) * HEADS_KV + kv_head
        k_mask = valid[None, :] & (dk < DK)[:, None]
        k = tl.load(keys_ptr + place[None, :] * DK + dk[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
        scores = tl.where(valid[None, :], scores * _LOG2E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        rescale = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        v_mask = valid[:, None] & (dv < DV)[None, :]
        v = tl.load(values_ptr + place[:, None] * DV + dv[None, :], mask=v_mask, other=0.0)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    norm = tl.where(total > 0, total, 1.0)
    part = (seq * (HEADS_KV * GROUP) + head) * splits + split
    part_mask = in_g[:, None] & (dv < DV)[None, :]
    tl.store(part_ptr + part.to(tl.int64)[:, None] * DV + dv[None, :], acc / norm[:, None], mask=part_mask)
    norms = tl.where(in_g & (total > 0), best + tl.log2(norm), float("-inf"))
    tl.store(norm_ptr + part, norms, mask=g < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    part_ptr, norm_ptr, rows_ptr, out_ptr, splits,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Weighted sum of the parts of one (sequence, head), in a fixed order. Rows of an empty context are zero.

    A row of -1 is none. BLOCK_S is the most parts there can be whatever the page table's width, so that this does not
    change the order.
    """
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = seq * HEADS + head
    split, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    norms = tl.load(norm_ptr + place * splits + split, mask=split < splits, other=float("-inf"))
    live = norms > float("-inf")
    best = tl.max(norms, 0)
    weights = tl.where(live, tl.exp2(norms - tl.where(best > float("-inf"), best, 0.0)), 0.0)
    weights = weights / tl.where(tl.sum(weights, 0) > 0, tl.sum(weights, 0), 1.0)
    mask = live[:, None] & (dv < DV)[None, :]
    parts = tl.load(part_ptr + (place * splits + split)[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], 0).to(out_ptr.dtype.element_ty)
    row = seq
    if HAS_ROWS:
        row = tl.load(rows_ptr + seq).to(tl.int64)
    if row >= 0:
        tl.store(out_ptr + (row * HEADS + head) * DV + dv, out, mask=dv < DV)


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """keys[slots[t]] = k[t], values[slots[t]] = v[t], in place; rows with slot -1 (padding) are left out.

    k [T, Hkv, DK], v [T, Hkv, DV] (rows and heads may be strided), keys and values [rows, Hkv, D] contiguous,
    slots [T] int32 or int64. Safe under graph capture.
    """
    num_heads, key_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    block_h = min(8, triton.next_power_of_2(num_heads))
    _write_kv_kernel[(k.shape[0], triton.cdiv(num_heads, block_h))](
        k, v, keys, values, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=num_heads, DK=key_dim, DV=value_dim, BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(max(key_dim, value_dim)), num_warps=4,
    )  # fmt: skip


def decode_parts(batch_size: int, num_kv_heads: int) -> tuple[int, int]:
    """(most parts a context is cut into, fewest keys in a part) that keep an H200 busy with that many contexts.

    Measured with 4 KV heads and contexts of 1,000 tokens, which these cut into 32, 16, 4 and 2 parts. Longer ones get
    more, so that one long context among short ones does not run alone at the end.
    """
    contexts = batch_size * num_kv_heads
    for most, parts in ((8, (64, 32)), (64, (32, 64)), (256, (8, 256)), (1024, (4, 640))):
        if contexts <= most:
            return parts
    return 2, 640


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    context_lens: Tensor,
    scale: float,
    page_size: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[b] = softmax(scale * q[b] K_b^T) V_b, one query row for each sequence, over its paged context.

    q [B, H, DK], keys [rows, Hkv, DK], values [rows, Hkv, DV], pages [B, max_pages] int32, context_lens [B] int32
    (the query is the last token; 0: padding, the row is zero) -> [B, H, DV]. With `rows` [B] int32 the query of
    sequence b is q[rows[b]] of q [T, H, DK] and its result is out[rows[b]] of `out` [T, H, DV], contiguous, whose
    other rows are left as they are; a sequence without a query has -1 there, and a context of 0.
    `sliding_window` w: only the last w. `softcap` c: scores become c tanh(s / c).
    `sinks` [H] are further logits of the softmax without a value. Products accumulate in float32. The cut of a
    context into parts depends on its own length and on B, so a row does not depend on its neighbours' contents or
    lengths. The grid is by capacity, and lengths are read on the device: safe under graph capture. Source:
    flash-decoding (Dao et al. 2023).
    """
    batch, (num_heads, key_dim) = len(context_lens), q.shape[1:]
    num_kv, value_dim = keys.shape[1], values.shape[2]
    group, (most_parts, min_part) = num_heads // num_kv, decode_parts(batch, num_kv)
    splits = min(most_parts, triton.cdiv(pages.shape[1] * page_size, min_part))
    q = q if q.stride(2) == 1 else q.contiguous()
    out = q.new_empty(batch, num_heads, value_dim) if out is None else out
    parts = q.new_empty(batch * num_heads * splits, value_dim, dtype=torch.float32)
    norms = q.new_empty(batch * num_heads * splits, dtype=torch.float32)
    block_dv = max(16, triton.next_power_of_2(value_dim))
    block_n = 32 if batch <= 8 or key_dim > 128 else 64
    _decode_kernel[(batch, num_kv, splits)](
        q, keys, values, context_lens if rows is None else rows, pages, context_lens, q if sinks is None else sinks,
        parts, norms, q.stride(0), q.stride(1), pages.stride(0), scale, softcap or 1.0, sliding_window or 2**30,
        min_part, splits,
        HEADS_KV=num_kv, GROUP=group, DK=key_dim, DV=value_dim, BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_DK=max(16, triton.next_power_of_2(key_dim)), BLOCK_DV=block_dv, PAGE=page_size, BLOCK_N=block_n,
        HAS_ROWS=rows is not None, HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None,
        PRECISION=dot_precision(keys.dtype), num_warps=4, num_stages=DECODE_STAGES,
    )  # fmt: skip
    _merge_kernel[(batch, num_heads)](
        parts, norms, context_lens if rows is None else rows, out, splits, HEADS=num_heads, DV=value_dim,
        BLOCK_DV=block_dv, BLOCK_S=most_parts, HAS_ROWS=rows is not None, num_warps=2,
    )  # fmt: skip
    return out


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` treats operands of that type: float32 as sums of TF32 numbers, which keeps its precision."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
