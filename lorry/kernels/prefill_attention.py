"""Prefill attention over a paged KV pool: whole prompts, or chunks behind a context that is in the pool already."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from lorry.kernels.paged_attention import dot_precision

_LOG2E = 1.4426950408889634
_HOPPER_SHARED_MEMORY = 227 * 1024


@triton.jit
def _prefill_kernel(
    q_ptr, keys_ptr, values_ptr, sinks_ptr, out_ptr, work_ptr, seqs_ptr, pages_ptr, q_row, q_head, scale, cap, window,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DR: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows (token, head of the group) of one sequence and KV head, over all keys they see.

    Softmax runs in base 2. Blocks of keys start at multiples of BLOCK_N of the context. Of the three loops the middle
    one is over blocks that every row sees whole, and masks nothing. Keys are DK = BLOCK_DK + up to BLOCK_DR wide.
    """
    item, kv_head = tl.program_id(0) // HEADS_KV, tl.program_id(0) % HEADS_KV
    seq, q_block = tl.load(work_ptr + 2 * item), tl.load(work_ptr + 2 * item + 1)
    first_row, query_len = tl.load(seqs_ptr + 4 * seq), tl.load(seqs_ptr + 4 * seq + 1)
    context, page_start = tl.load(seqs_ptr + 4 * seq + 2), tl.load(seqs_ptr + 4 * seq + 3)
    m = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = m // GROUP, kv_head * GROUP + m % GROUP
    in_m = token < query_len
    position = context - query_len + token
    dk, dr, dv = tl.arange(0, BLOCK_DK), BLOCK_DK + tl.arange(0, BLOCK_DR), tl.arange(0, BLOCK_DV)
    q_place = (first_row + token).to(tl.int64) * q_row + head.to(tl.int64) * q_head
    q = tl.load(q_ptr + q_place[:, None] + dk[None, :], mask=in_m[:, None] & (dk < DK)[None, :], other=0.0)
    if DK > BLOCK_DK:
        q_rest = tl.load(q_ptr + q_place[:, None] + dr[None, :], mask=in_m[:, None] & (dr < DK)[None, :], other=0.0)

    first_pos = context - query_len + q_block * BLOCK_M // GROUP
    last_pos = context - query_len + tl.minimum((q_block * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    high = last_pos + 1
    low = tl.maximum(first_pos - window + 1, 0) if HAS_WINDOW else 0
    begin = low // BLOCK_N * BLOCK_N
    whole = begin
    if HAS_WINDOW:
        whole = tl.minimum(tl.cdiv(tl.maximum(last_pos - window + 1, 0), BLOCK_N), tl.cdiv(high, BLOCK_N)) * BLOCK_N
    whole_end = tl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, whole)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):
        start = begin if phase == 0 else (whole if phase == 1 else whole_end)
        stop = whole if phase == 0 else (whole_end if phase == 1 else high)
        for block in range(start, stop, BLOCK_N):
            n = block + tl.arange(0, BLOCK_N)
            valid = (n >= low) & (n < high) if phase != 1 else n >= 0
            page = tl.load(pages_ptr + page_start + n // PAGE, mask=valid, other=0).to(tl.int64)
            place = (page * PAGE + n % PAGE) * HEADS_KV + kv_head
            k_ptrs = keys_ptr + place[None, :] * DK
            k = tl.load(k_ptrs + dk[:, None], mask=valid[None, :] & (dk < DK)[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if DK > BLOCK_DK:
                k_rest = tl.load(k_ptrs + dr[:, None], mask=valid[None, :] & (dr < DK)[:, None], other=0.0)
                scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
            if HAS_CAP:
                scores = cap * (1 - 2 / (1 + tl.exp2(scores * scale)))
            if phase != 1:
                seen = (n[None, :] <= position[:, None]) & (n < high)[None, :]
                if HAS_WINDOW:
                    seen &= n[None, :] > position[:, None] - window
                scores = tl.where(seen, scores, float("-inf"))
            highest = tl.max(scores, 1) if HAS_CAP else tl.max(scores, 1) * scale
            higher = tl.maximum(best, highest)
            origin = higher
            if HAS_WINDOW and phase != 1:  # a row may not have seen any key yet
                origin = tl.where(higher > float("-inf"), higher, 0.0)
            rescale = tl.exp2(best - origin)
            exponents = scores - origin[:, None] if HAS_CAP else scores * scale - origin[:, None]
            weights = tl.exp2(exponents)
            total = total * rescale + tl.sum(weights, 1)
            v_mask = valid[:, None] & (dv < DV)[None, :]
            v = tl.load(values_ptr + place[:, None] * DV + dv[None, :], mask=v_mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            best = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_place = ((first_row + token).to(tl.int64) * (HEADS_KV * GROUP) + head) * DV
    out_mask = in_m[:, None] & (dv < DV)[None, :]
    tl.store(out_ptr + out_place[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True)
class Tile:
    """Rows (token, head of a group) and keys of one product, and how it is run."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=64)
def prefill_tile(key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The largest tile whose queries and two or three buffers of keys and values fit the device's shared memory.

    A place in the pool is loaded before the row at that place: a buffer of rows takes two stages of the pipeline.
    """
    limit = _HOPPER_SHARED_MEMORY
    if device.type == "cuda":
        limit = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    key_width, value_width = sum(_key_blocks(key_dim)), max(16, triton.next_power_of_2(value_dim))
    wide = dtype == torch.float32
    rows, num_warps, itemsize = (64, 4, 8) if wide else (128, 8, 2)  # float32: in two parts of 4 bytes each
    for keys, buffers in ((32, 2), (16, 2)) if wide else ((64, 3), (64, 2), (32, 2), (16, 2)):
        if (rows * key_width + buffers * keys * (key_width + value_width)) * itemsize + 4096 <= limit:
            break
    return Tile(rows, keys, num_warps, 2 * buffers - 1)


@dataclass(frozen=True)
class PrefillBatch:
    """Sequences of a step on the device, all int32, and the tiles of `tile_rows` rows they are cut into.

    `seqs` [S, 4]: first packed row, number of query rows, context length with these, start of its own in `pages`.
    Rows of a sequence without any context are padding: their result is zero.
    `pages` [P]: pages of all sequences. `work` [W, 2]: index of the sequence, index of the tile in it.
    """

    seqs: Tensor
    pages: Tensor
    work: Tensor
    tile_rows: int


def prefill_work(
    query_lens: NDArray[np.int32], context_lens: NDArray[np.int32], group: int, tile_rows: int
) -> NDArray[np.int32]:
    """`work` [W, 2] of a `PrefillBatch` for `group` query heads to a KV head: the tiles with most keys first.

    The cut of a sequence depends on its own length alone, and so does the result of its rows.
    """
    counts = -(-query_lens * group // tile_rows)
    seq = np.repeat(np.arange(len(counts)), counts)
    block = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    last_token = np.minimum(((block + 1) * tile_rows - 1) // group, query_lens[seq] - 1)
    num_keys = (context_lens - query_lens)[seq] + last_token + 1
    order = np.argsort(-num_keys, kind="stable")
    return np.stack([seq[order], block[order]], axis=1).astype(np.int32)


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PrefillBatch,
    out: Tensor,
    scale: float,
    page_size: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """out[t] = softmax(scale * q[t] K^T) V over the keys of t's sequence up to its own, for all rows of `batch`.

    q [T, H, DK] (rows and heads may be strided), keys [rows, Hkv, DK], values [rows, Hkv, DV] with those of the batch
    written already, out [T, H, DV] contiguous; rows of `out` that are not of the batch are left as they are. The
    queries of a sequence are the last of its context. `sliding_window` w: only the last w keys. `softcap` c: scores
    become c tanh(s / c). `sinks` [H] are further logits of the softmax without a value. Products accumulate in
    float32. A row's keys are cut at multiples of `tile.keys` whatever the step, so its result depends neither on the
    other sequences nor on how its own was cut into chunks. No synchronisation; safe under graph capture for a fixed
    `work`. `batch.tile_rows` must be the tile's. Source: FlashAttention-2 (Dao 2023).
    """
    num_heads, key_dim, num_kv, value_dim = q.shape[1], q.shape[2], keys.shape[1], values.shape[2]
    tile = tile or prefill_tile(key_dim, value_dim, keys.dtype, keys.device)
    assert tile.rows == batch.tile_rows
    q = q if q.stride(2) == 1 else q.contiguous()
    block_dk, block_dr = _key_blocks(key_dim)
    _prefill_kernel[(batch.work.shape[0] * num_kv,)](
        q, keys, values, q if sinks is None else sinks, out, batch.work, batch.seqs, batch.pages,
        q.stride(0), q.stride(1), scale * _LOG2E if softcap is None else 2 * _LOG2E * scale / softcap,
        (softcap or 1.0) * _LOG2E, sliding_window or 0,
        HEADS_KV=num_kv, GROUP=num_heads // num_kv, DK=key_dim, DV=value_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        BLOCK_DK=block_dk, BLOCK_DR=max(16, block_dr), BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        PAGE=page_size, HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None, PRECISION=dot_precision(keys.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _key_blocks(key_dim: int) -> tuple[int, int]:
    """Powers of two, at least 16, that together hold a key: 192 is 128 + 64 and not 256. The second may be 0."""
    first = max(16, 1 << (key_dim.bit_length() - 1))
    rest = key_dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
