"""The integers of a step for its forward: packed on the host, and for captured steps copied to fixed addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorry.config import PAGE_SIZE
from lorry.engine.sequence import StepPlan
from lorry.upload import upload

_Ints = npt.NDArray[np.int32]


class PackedRows(NamedTuple):
    """Of each row [T] int32: where its token is, its token, its position, and the row of the pool that it writes.

    `sources` are places in the tokens that the last step sampled with `token_ids` behind them.
    """

    sources: _Ints
    token_ids: _Ints
    positions: _Ints
    write_slots: _Ints


def pack_rows(plan: StepPlan, num_rows: int, num_sampled: int) -> PackedRows:
    """The rows of a plan, followed by padding up to `num_rows`: token 0 at position 0, written nowhere (-1)."""
    packed = PackedRows(*np.zeros((4, num_rows), dtype=np.int32))
    packed.sources[:] = np.arange(num_sampled, num_sampled + num_rows)
    packed.write_slots[:] = -1
    if not plan.chunks:
        return packed
    token_ids: list[int] = []
    pages: list[int] = []
    shape = []
    for chunk in plan.chunks:
        stop = chunk.start + chunk.num_tokens
        first_page = chunk.start // PAGE_SIZE
        shape.append((chunk.num_tokens, chunk.start, len(pages) - first_page))
        pages += chunk.sequence.pages[first_page : (stop - 1) // PAGE_SIZE + 1]
        if chunk.source < 0:
            token_ids += chunk.sequence.token_ids[chunk.start : stop]
        else:
            packed.sources[len(token_ids)] = chunk.source
            token_ids.append(0)
    counts, starts, page_shifts = np.array(shape, dtype=np.int64).T
    total = len(token_ids)
    own = np.arange(total) + np.repeat(starts - (counts.cumsum() - counts), counts)
    page_of_row = np.array(pages, dtype=np.int64)[own // PAGE_SIZE + np.repeat(page_shifts, counts)]
    packed.token_ids[:total] = token_ids
    packed.positions[:total] = own
    packed.write_slots[:total] = page_of_row * PAGE_SIZE + own % PAGE_SIZE
    return packed


def sampling_rows(plan: StepPlan) -> list[int]:
    """The last rows of the chunks that sample."""
    rows, row = [], -1
    for chunk in plan.chunks:
        row += chunk.num_tokens
        if chunk.samples:
            rows.append(row)
    return rows


class FixedInputs:
    """What captured steps read, at fixed addresses, filled by copies as large as what is new in the step.

    `sources`, `token_ids`, `positions` and `write_slots` [max_rows] are those of `PackedRows`; of each sequence there
    are `context_lens`, `logit_rows` [max_requests] and `pages` [max_requests, max_pages]. `pages` keeps what earlier
    steps wrote: a sequence that stays in its row adds a page in one step of 16.
    """

    def __init__(self, sampled: Tensor, max_rows: int, max_pages: int) -> None:
        """`sampled` [max_requests] int32: where every step leaves the tokens that it sampled."""
        max_requests, device = len(sampled), sampled.device
        self._sampled = sampled
        self._rows = torch.zeros(4, max_rows, dtype=torch.int32, device=device)
        self._requests = torch.zeros(2, max_requests, dtype=torch.int32, device=device)
        self._owners: list[list[int] | None] = [None] * max_requests
        self._counts = [0] * max_requests
        self.sources, self.token_ids, self.positions, self.write_slots = self._rows
        self.context_lens, self.logit_rows = self._requests
        self.pages = torch.zeros(max_requests, max_pages, dtype=torch.int32, device=device)

    def fill(self, plan: StepPlan, num_rows: int) -> None:
        """Give the step its plan, padded to `num_rows`; a plan without chunks is padding alone."""
        packed = np.stack(pack_rows(plan, num_rows, len(self._sampled)))
        requests = np.zeros(self._requests.shape, dtype=np.int32)
        logit_rows = sampling_rows(plan)
        requests[0, : len(plan.chunks)] = [chunk.start + chunk.num_tokens for chunk in plan.chunks]
        requests[1, : len(logit_rows)] = logit_rows
        rows, of_requests, *new_pages = upload([packed, requests, *self._new_pages(plan)], self._rows.device)
        self._rows[:, :num_rows].copy_(rows)
        self._requests.copy_(of_requests)
        if new_pages:
            self.pages.view(-1).index_copy_(0, *new_pages)

    def input_ids(self, num_rows: int) -> Tensor:
        """Token ids [num_rows] int64 of the step; part of its graph."""
        known = torch.cat([self._sampled, self.token_ids[:num_rows]])
        return known.index_select(0, self.sources[:num_rows]).long()

    def _new_pages(self, plan: StepPlan) -> list[npt.NDArray[Any]]:
        """Places (int64) and numbers (int32) of the pages that are new in their row; empty where none are.

        A sequence's list of pages only grows, and is another list once the sequence has lost its pages: the list
        itself tells whether a row still holds what was written.
        """
        places, new = [], []
        for i, chunk in enumerate(plan.chunks):
            pages = chunk.sequence.pages
            start = self._counts[i] if self._owners[i] is pages else 0
            if start < len(pages):
                first = i * self.pages.shape[1]
                places.append(np.arange(first + start, first + len(pages)))
                new += pages[start:]
            self._owners[i], self._counts[i] = pages, len(pages)
        return [np.concatenate(places), np.array(new, dtype=np.int32)] if new else []
