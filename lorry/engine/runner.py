"""Launches planned steps on the device: packs the batch, calls the model, samples. The host never waits here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorry.attention.base import AttentionBackend, AttentionBatch
from lorry.engine.graphs import StepGraphs
from lorry.engine.inputs import pack_rows, sampling_rows
from lorry.engine.sampler import PendingSample, Sampler
from lorry.engine.sequence import StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager
from lorry.lora.reference import invariant_rows
from lorry.models.loader import LoadedModel
from lorry.upload import upload


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

    graphs: StepGraphs | None = None
    """Captured steps, where there are any."""

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
        if self.graphs is not None and self.graphs.fits(plan):
            logits = self.graphs.replay(plan, _routing(plan))
        else:
            logits = self.forward(plan, sampling_rows(plan))
        return LaunchedStep(plan, self.sampler.launch(logits, plan.sampling))

    @torch.inference_mode()
    def forward(self, plan: StepPlan, logit_rows: Seq[int]) -> Tensor:
        """Logits [len(logit_rows), vocab] of the given rows of a plan; keys and values of all rows are written."""
        padding = max(0, self._min_rows - plan.num_tokens)
        rows = np.zeros(max(self._min_rows, len(logit_rows)), dtype=np.int64)
        rows[: len(logit_rows)] = logit_rows
        packed = pack_rows(plan, plan.num_tokens + padding, len(self.sampler.tokens))
        sources, token_ids, positions, write_slots, logits_to_keep = upload([*packed, rows], self._device)
        token_ids = torch.cat([self.sampler.tokens, token_ids]).index_select(0, sources)
        self._attention.plan(
            AttentionBatch(
                query_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
                context_lens=tuple(chunk.start + chunk.num_tokens for chunk in plan.chunks),
                pages=tuple(tuple(chunk.sequence.pages) for chunk in plan.chunks),
                write_slots=write_slots[: plan.num_tokens].long(),
            )
        )
        self._lora.prepare_lora_batch(_routing(plan), plan.num_tokens + padding if padding else None)
        output = self._model(
            input_ids=token_ids.long()[None],
            position_ids=positions.long()[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
        )
        logits: Tensor = output.logits[0, : len(logit_rows)]
        return logits


def _routing(plan: StepPlan) -> RequestRouting:
    return RequestRouting(
        seq_lens=tuple(chunk.num_tokens for chunk in plan.chunks),
        slots=tuple(chunk.sequence.slot for chunk in plan.chunks),
    )
