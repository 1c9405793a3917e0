"""Attention on CUDA by Triton: decodes, whole prefills and chunks of them in one step, straight from the pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorry.attention.base import ATTENTION_BACKENDS, AttentionBatch, AttentionParams, DecodeBatch, PaddedBatch
from lorry.config import PAGE_SIZE
from lorry.kernels.paged_attention import paged_decode, write_kv
from lorry.kernels.prefill_attention import PrefillBatch, paged_prefill, prefill_tile, prefill_work
from lorry.kv.pool import LayerKV
from lorry.upload import FixedArrays, upload

IntArray = NDArray[np.int32]

Cut = tuple[int, int]
"""How layers cut prefill into tiles: query heads to a KV head, rows of a tile."""


@dataclass(frozen=True)
class _Step:
    """What the layers of a step read, on the device. `rows` [D] int32: the packed rows of `decodes` (None: all)."""

    write_slots: Tensor
    decodes: DecodeBatch | None
    rows: Tensor | None
    prefills: dict[Cut, PrefillBatch] | None


class TritonAttention:
    """A step of decodes needs nothing but its page table and lengths on the device.

    Other steps are described by one copy from pinned memory: the sequences with one row go to the decode kernel, the
    others to the prefill kernel. For captured steps it goes to fixed addresses, each sequence has a place in both
    kernels, and lists of tiles are as long as they can get. The host never waits for the device.
    """

    name = "triton"

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._step: _Step | None = None
        self._cuts: set[Cut] = set()  # those of the model's layers, known once each of them has seen a prefill
        self._fixed: FixedArrays | None = None  # what captured steps with prefill read, for the cuts known by then
        self._fixed_cuts: list[Cut] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._step = upload_step(batch, self._cuts)

    def plan_decode(self, batch: DecodeBatch) -> None:
        """As `plan`, for a step of decodes whose description is on the device already."""
        self._batch = None
        self._step = _Step(batch.write_slots, batch, None, None)

    def reserve(self, max_requests: int, max_rows: int, device: torch.device) -> None:
        self._fixed_cuts = sorted(self._cuts)
        tiles = [2 * _max_tiles(cut, max_requests, max_rows) for cut in self._fixed_cuts]
        self._fixed = FixedArrays([max_requests, max_requests, 4 * (max_requests + 2), *tiles], device)

    def plan_padded(self, batch: PaddedBatch) -> None:
        assert self._fixed is not None, "reserve comes first"
        rows, lens, seqs, *works = self._fixed.fill(_padded_arrays(batch, self._fixed_cuts))
        pages = batch.pages.view(-1)
        prefills = {
            cut: PrefillBatch(seqs, pages, work, cut[1]) for cut, work in zip(self._fixed_cuts, works, strict=True)
        }
        self._batch = None
        self._step = _Step(batch.write_slots, DecodeBatch(batch.pages, lens, batch.write_slots), rows, prefills)

    @property
    def write_slots(self) -> Tensor:
        assert self._step is not None, "plan comes first"
        return self._step.write_slots

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: LayerKV, params: AttentionParams) -> Tensor:
        step = self._step
        assert step is not None, "plan comes first"
        num_rows = len(step.write_slots)
        if k is not None and v is not None:
            write_kv(k[:num_rows], v[:num_rows], kv.keys, kv.values, step.write_slots)
        out = q.new_empty(q.shape[0], q.shape[1], kv.values.shape[2])
        if num_rows < len(out):
            out[num_rows:].zero_()
        options = (params.scale, PAGE_SIZE, params.sliding_window, params.softcap, params.sinks)
        if step.decodes is not None:
            table, lens = step.decodes.pages, step.decodes.context_lens
            paged_decode(q, kv.keys, kv.values, table, lens, *options, rows=step.rows, out=out)
        if step.prefills is not None:
            tile = prefill_tile(kv.keys.shape[2], kv.values.shape[2], kv.keys.dtype, kv.keys.device)
            prefill = self._prefill((q.shape[1] // kv.keys.shape[1], tile.rows), step.prefills)
            paged_prefill(q, kv.keys, kv.values, prefill, out, *options, tile=tile)
        return out

    def _prefill(self, cut: Cut, known: dict[Cut, PrefillBatch]) -> PrefillBatch:
        if cut not in known:
            assert self._batch is not None
            self._cuts.add(cut)
            added = upload_step(self._batch, {cut}).prefills
            assert added is not None
            known |= added
        return known[cut]


def upload_step(batch: AttentionBatch, cuts: Collection[Cut]) -> _Step:
    """Describe a step on the device: its decodes, and its prefills for each cut."""
    query_lens = np.array(batch.query_lens, dtype=np.int32)
    context_lens = np.array(batch.context_lens, dtype=np.int32)
    first_rows = np.cumsum(query_lens) - query_lens
    single = query_lens == 1
    decodes, prefills = np.flatnonzero(single), np.flatnonzero(~single)
    decode_pages = [batch.pages[i] for i in decodes]
    prefill_pages = [batch.pages[i] for i in prefills]
    page_counts = np.array([len(pages) for pages in prefill_pages], dtype=np.int32)
    page_starts = np.cumsum(page_counts) - page_counts
    query_lens, context, decode_lens = query_lens[prefills], context_lens[prefills], context_lens[decodes]
    seqs = np.stack([first_rows[prefills], query_lens, context, page_starts], axis=1)
    work = [prefill_work(query_lens, context, group, rows) for group, rows in cuts]
    parts = [first_rows[decodes], decode_lens, _table(decode_pages), seqs, _flat(prefill_pages), *work]
    rows, lens, table, seqs_on_device, pages, *tiles = upload(parts, batch.write_slots.device)
    return _Step(
        batch.write_slots,
        DecodeBatch(table, lens, batch.write_slots) if len(decodes) else None,
        rows,
        {cut: PrefillBatch(seqs_on_device, pages, tile, cut[1]) for cut, tile in zip(cuts, tiles, strict=True)}
        if len(prefills)
        else None,
    )


def _max_tiles(cut: Cut, max_requests: int, max_rows: int) -> int:
    """Most tiles of a padded step: sequences and the padding behind them each have one that is not whole."""
    group, rows = cut
    return max_rows * group // rows + max_requests + 1


def _padded_arrays(batch: PaddedBatch, cuts: Collection[Cut]) -> list[IntArray]:
    """`rows` (-1: no decode) and `context_lens` of decodes, `seqs` of prefills, `work` for each cut.

    Behind the sequences stands one of no context whose rows are the padding, and one without rows, which the unused
    places of `work` name.
    """
    max_requests, max_rows, count = len(batch.pages), len(batch.write_slots), len(batch.query_lens)
    query_lens = np.array(batch.query_lens, dtype=np.int32)
    context_lens = np.array(batch.context_lens, dtype=np.int32)
    first_rows = np.cumsum(query_lens, dtype=np.int32) - query_lens
    num_rows = int(query_lens.sum())
    single = query_lens == 1
    rows, lens = np.full(max_requests, -1, dtype=np.int32), np.zeros(max_requests, dtype=np.int32)
    rows[:count][single], lens[:count][single] = first_rows[single], context_lens[single]
    seqs = np.zeros((max_requests + 2, 4), dtype=np.int32)
    seqs[:count] = np.stack(
        [first_rows, np.where(single, 0, query_lens), context_lens, np.arange(count) * batch.pages.shape[1]], axis=1
    )
    seqs[max_requests, :2] = num_rows, max_rows - num_rows
    works = []
    for cut in cuts:
        work = np.full((_max_tiles(cut, max_requests, max_rows), 2), (max_requests + 1, 0), dtype=np.int32)
        live = prefill_work(seqs[:, 1], seqs[:, 2], *cut)
        work[: len(live)] = live
        works.append(work)
    return [rows, lens, seqs, *works]


def _flat(pages: Sequence[tuple[int, ...]]) -> IntArray:
    return np.fromiter(chain.from_iterable(pages), dtype=np.int32)


def _table(pages: Sequence[tuple[int, ...]]) -> IntArray:
    """[sequences, most pages]; what is behind the pages of a sequence is 0 and never read."""
    counts = np.array([len(own) for own in pages], dtype=np.int32)
    table = np.zeros((len(pages), counts.max(initial=1)), dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = _flat(pages)
    return table


ATTENTION_BACKENDS["triton"] = TritonAttention
