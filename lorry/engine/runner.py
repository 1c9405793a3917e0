"""Runs planned steps on the device: packs the batch, calls the model, samples."""

from __future__ import annotations

import torch
from torch import Tensor

from lorry.attention.base import AttentionBackend, AttentionBatch
from lorry.config import PAGE_SIZE
from lorry.engine.graphs import DecodeGraphs
from lorry.engine.sampler import Sampled, sample
from lorry.engine.sequence import StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager
from lorry.lora.reference import invariant_rows
from lorry.models.loader import LoadedModel


class ModelRunner:
    """One forward for a plan: all its rows as one packed sequence [1, T], logits only of the rows that sample."""

    graphs: DecodeGraphs | None = None
    """Captured decode steps, where there are any."""

    def __init__(self, loaded: LoadedModel, attention: AttentionBackend, lora: LoRAManager) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._attention = attention
        self._lora = lora
        self._min_rows = invariant_rows(loaded.dtype, loaded.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled:
        """Run a plan; the result has one token for each chunk that samples, in the order of the chunks."""
        last_rows, row = [], 0
        for chunk in plan.chunks:
            row += chunk.num_tokens
            if chunk.samples:
                last_rows.append(row - 1)
        if self.graphs is not None and self.graphs.fits(plan):
            logits = self.graphs.replay(plan, _routing(plan))
        else:
            logits = self.forward(plan, last_rows)
        return sample(logits, [chunk.sequence for chunk in plan.chunks if chunk.samples])

    @torch.inference_mode()
    def forward(self, plan: StepPlan, logit_rows: list[int]) -> Tensor:
        """Logits [len(logit_rows), vocab] of the given rows of a plan; keys and values of all rows are written."""
        token_ids: list[int] = []
        positions: list[int] = []
        write_slots: list[int] = []
        for chunk in plan.chunks:
            stop = chunk.start + chunk.num_tokens
            token_ids += chunk.sequence.token_ids[chunk.start : stop]
            positions += range(chunk.start, stop)
            pages = chunk.sequence.pages
            write_slots += [pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(chunk.start, stop)]
        self._attention.plan(
            AttentionBatch(
                query_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
                context_lens=tuple(chunk.start + chunk.num_tokens for chunk in plan.chunks),
                pages=tuple(tuple(chunk.sequence.pages) for chunk in plan.chunks),
                write_slots=self._int64(write_slots),
            )
        )
        padding = max(0, self._min_rows - plan.num_tokens)
        self._lora.prepare_lora_batch(_routing(plan), plan.num_tokens + padding if padding else None)
        output = self._model(
            input_ids=self._int64(token_ids + [0] * padding)[None],
            position_ids=self._int64(positions + [0] * padding)[None],
            use_cache=False,
            logits_to_keep=self._int64(logit_rows + [0] * (self._min_rows - len(logit_rows))),
        )
        logits: Tensor = output.logits[0, : len(logit_rows)]
        return logits

    def _int64(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _routing(plan: StepPlan) -> RequestRouting:
    return RequestRouting(
        seq_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
        slots=tuple(chunk.sequence.slot for chunk in plan.chunks),
    )
