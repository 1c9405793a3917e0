"""Launches planned steps on the device: packs the batch, calls the model, samples. The host never waits here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorry.attention.base import AttentionBackend, AttentionBatch
from lorry.config import PAGE_SIZE
from lorry.engine.graphs import DecodeGraphs
from lorry.engine.sampler import PendingSample, Sampler
from lorry.engine.sequence import StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager
from lorry.lora.reference import invariant_rows
from lorry.models.loader import LoadedModel
from lorry.upload import upload

_Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose tokens have not been read."""

    plan: StepPlan
    sample: PendingSample


class ModelRunner:
    """One forward for a plan: all its rows as one packed sequence [1, T], logits only of the rows that sample.

    Everything is launched on the current stream; a step finds there what the steps before it wrote: keys and values,
    the tokens they sampled, and the tables of adapters.
    """

    graphs: DecodeGraphs | None = None
    """Captured decode steps, where there are any."""

    def __init__(
        self, loaded: LoadedModel, attention: AttentionBackend, lora: LoRAManager, max_running_requests: int
    ) -> None:
        self.sampler = Sampler(max_running_requests, loaded.device)
        self._model = loaded.model
        self._device = loaded.device
        self._attention = attention
        self._lora = lora
        self._min_rows = invariant_rows(loaded.dtype, loaded.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a plan; its sample has one token for each chunk that samples, in the order of the chunks."""
        sampling = plan.sampling
        if self.graphs is not None and self.graphs.fits(plan):
            logits = self.graphs.replay(plan, _routing(plan))
            if len(sampling) < len(plan.chunks):
                rows = np.flatnonzero([chunk.samples for chunk in plan.chunks])
                logits = logits.index_select(0, upload([rows], self._device)[0])
        else:
            last_rows, row = [], 0
            for chunk in plan.chunks:
                row += chunk.num_tokens
                if chunk.samples:
                    last_rows.append(row - 1)
            logits = self.forward(plan, last_rows)
        return LaunchedStep(plan, self.sampler.launch(logits, sampling))

    @torch.inference_mode()
    def forward(self, plan: StepPlan, logit_rows: Seq[int]) -> Tensor:
        """Logits [len(logit_rows), vocab] of the given rows of a plan; keys and values of all rows are written."""
        padding = max(0, self._min_rows - plan.num_tokens)
        rows = np.zeros(max(self._min_rows, len(logit_rows)), dtype=np.int64)
        rows[: len(logit_rows)] = logit_rows
        *arrays, sources = _pack(plan, padding, len(self.sampler.tokens))
        token_ids, positions, write_slots, logits_to_keep, *rest = upload(
            [*arrays, rows] if sources is None else [*arrays, rows, sources], self._device
        )
        if rest:
            token_ids = torch.cat([self.sampler.tokens, token_ids]).index_select(0, rest[0])
        self._attention.plan(
            AttentionBatch(
                query_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
                context_lens=tuple(chunk.start + chunk.num_tokens for chunk in plan.chunks),
                pages=tuple(tuple(chunk.sequence.pages) for chunk in plan.chunks),
                write_slots=write_slots,
            )
        )
        self._lora.prepare_lora_batch(_routing(plan), plan.num_tokens + padding if padding else None)
        output = self._model(
            input_ids=token_ids.long()[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
        )
        logits: Tensor = output.logits[0, : len(logit_rows)]
        return logits


def _pack(plan: StepPlan, padding: int, num_sampled: int) -> tuple[_Ints, _Ints, _Ints, _Ints | None]:
    """Token ids (int32) and positions with `padding` zeros behind them, the pool rows to write; and sources.

    Sources say where the token of each row is in what the last step sampled, [num_sampled], with the token ids behind
    it; None where all tokens are known.
    """
    token_ids: list[int] = []
    pages: list[int] = []
    shape = []
    for chunk in plan.chunks:
        stop = chunk.start + chunk.num_tokens
        token_ids += chunk.sequence.token_ids[chunk.start : stop] if chunk.source < 0 else (0,)
        first_page = chunk.start // PAGE_SIZE
        shape.append((chunk.num_tokens, chunk.start, len(pages) - first_page))
        pages += chunk.sequence.pages[first_page : (stop - 1) // PAGE_SIZE + 1]
    counts, starts, page_shifts = np.array(shape, dtype=np.int64).T
    ends = counts.cumsum()
    total = len(token_ids)
    positions = np.zeros(total + padding, dtype=np.int64)
    positions[:total] = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    own = positions[:total]
    page_of_row = np.array(pages, dtype=np.int64)[own // PAGE_SIZE + np.repeat(page_shifts, counts)]
    sources = None
    given = [(end - 1, chunk.source) for end, chunk in zip(ends, plan.chunks, strict=True) if chunk.source >= 0]
    if given:
        sources = np.arange(num_sampled, num_sampled + total + padding)
        rows, places = np.array(given, dtype=np.int64).T
        sources[rows] = places
    ids = np.zeros(total + padding, dtype=np.int32)
    ids[:total] = token_ids
    return ids, positions, page_of_row * PAGE_SIZE + own % PAGE_SIZE, sources


def _routing(plan: StepPlan) -> RequestRouting:
    return RequestRouting(
        seq_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
        slots=tuple(chunk.sequence.slot for chunk in plan.chunks),
    )
