"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.engine.sequence import Sequence
from lorry.types import TokenLogprobs

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Sampled:
    """Token of each sampled row, and its log probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, sequences: Seq[Sequence]) -> Sampled:
    """logits [n, vocab], one row for each sequence. A row depends on nothing but its own sequence.

    Order of work, as in vLLM: penalties, temperature, top-k, top-p, min-p. Log probabilities are of the logits
    as the model gave them. Not in place.
    """
    if not sequences:
        return Sampled([], [])
    raw = logits.float()
    adjusted = torch.stack([_penalise(row, s) for row, s in zip(raw, sequences, strict=True)])
    greedy = adjusted.argmax(dim=-1)
    tokens = [int(greedy[i]) if s.params.temperature == 0 else _draw(adjusted[i], s) for i, s in enumerate(sequences)]
    logprobs = [
        None if s.params.logprobs is None else _logprobs(raw[i], tokens[i], s.params.logprobs)
        for i, s in enumerate(sequences)
    ]
    return Sampled(tokens, logprobs)


def _penalise(row: Tensor, sequence: Sequence) -> Tensor:
    """Repetition penalty over prompt and output (CTRL, Keskar et al. 2019); the other two over output only."""
    p = sequence.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=row.device)
        values = row[seen]
        penalised = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        row = row.index_copy(0, seen, penalised)
    output = sequence.output_ids
    if output and (p.presence_penalty or p.frequency_penalty):
        counts = torch.bincount(torch.tensor(output, device=row.device), minlength=len(row)).to(row.dtype)
        row = row - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    return row


def _draw(row: Tensor, sequence: Sequence) -> int:
    """Draw from the filtered distribution, by a generator that only seed and position determine."""
    p = sequence.params
    probabilities, ids = (row / p.temperature).softmax(dim=-1).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if p.top_k > 0:
        keep[p.top_k :] = False
        probabilities = probabilities / probabilities[: p.top_k].sum()
    if p.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        keep &= before < p.top_p
    if p.min_p > 0.0:
        keep &= probabilities >= p.min_p * probabilities[0]
    keep[0] = True
    probabilities = probabilities * keep
    uniform = torch.rand(1, generator=_generator(sequence), dtype=torch.float64).item()
    cumulative = probabilities.double().cumsum(dim=-1)
    place = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return int(ids[place.clamp(max=int(keep.nonzero()[-1]))])


def _generator(sequence: Sequence) -> torch.Generator:
    """Equal for equal seeds at equal positions, whatever the batch, preemption or device."""
    mixed = (sequence.seed * _GOLDEN + len(sequence.output_ids) * 0xBF58476D1CE4E5B9) % 2**63
    return torch.Generator().manual_seed(mixed)


def _logprobs(row: Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprobs = row.log_softmax(dim=-1)
    values, ids = logprobs.topk(num_top)
    return TokenLogprobs(logprobs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
