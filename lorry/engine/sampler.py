"""Chooses the next token of each sequence from its logits, on the device; the host reads the tokens a step later."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorry.engine.draws import draw, filter_sorted, penalise, uniforms
from lorry.engine.sequence import GREEDY, SamplingKind, ScheduledChunk
from lorry.types import MAX_LOGPROBS, TokenLogprobs
from lorry.upload import download, upload

ROWS_AT_ONCE = 64
"""Rows whose distributions exist at the same time: what sampling a step takes in memory does not grow further."""

_MIN_TEMPERATURE = 1e-6
"""Below it the most likely token is as good as certain, and quotients could overflow."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sampled:
    """Token of each sampled row, and its log probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class PendingSample:
    """The tokens of a step that has been launched. On the host once the event is reached."""

    def __init__(self, tokens: Tensor, logprobs: _PendingLogprobs | None) -> None:
        self._tokens = download(tokens)
        self._logprobs = logprobs
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Sampled:
        """Wait until the step is done, then give its tokens in the order of the rows that sampled."""
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            for row, found in self._logprobs.read():
                logprobs[row] = found
        return Sampled(token_ids, logprobs)


@dataclass(frozen=True)
class _PendingLogprobs:
    """Of `rows`, on the host in time: `values` [l, 1 + k], own token first, then the best; `ids` [l, k] of these.

    Row i asks for the first `num_top[i]` of the best.
    """

    rows: list[int]
    num_top: list[int]
    values: Tensor
    ids: Tensor

    def read(self) -> Iterator[tuple[int, TokenLogprobs]]:
        values, ids = self.values.tolist(), self.ids.tolist()
        for row, k, (own, *best), best_ids in zip(self.rows, self.num_top, values, ids, strict=True):
            yield row, TokenLogprobs(own, tuple(zip(best_ids[:k], best[:k], strict=True)))


class Sampler:
    """Order of work, as in vLLM: penalties, temperature, top-k, top-p, min-p. Log probabilities are of the logits as
    the model gave them.

    A row depends on nothing but its own sequence. `tokens` [max_rows] int32 on the device holds what the last step
    sampled, at a fixed address: the next step takes its input from there. Nothing waits for the device.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def launch(self, logits: Tensor, chunks: Seq[ScheduledChunk]) -> PendingSample:
        """Choose a token for each row, and copy the tokens towards the host.

        logits [n, vocab], one row for each chunk; not in place. Chunks may hold tokens that are still pending."""
        if not chunks:
            return PendingSample(self.tokens[:0], None)
        tokens = logits.argmax(dim=-1)
        groups: dict[SamplingKind, list[int]] = {}
        for row, chunk in enumerate(chunks):
            kind = chunk.sequence.sampling_kind
            if kind != GREEDY:
                groups.setdefault(kind, []).append(row)
        for kind, rows in groups.items():
            for start in range(0, len(rows), ROWS_AT_ONCE):
                self._choose(tokens, logits, chunks, rows[start : start + ROWS_AT_ONCE], kind)
        logprobs = _launch_logprobs(logits, tokens, chunks)
        self.tokens[: len(chunks)].copy_(tokens)  # behind the penalties, which read the tokens of the step before
        return PendingSample(tokens, logprobs)

    def _choose(
        self, tokens: Tensor, logits: Tensor, chunks: Seq[ScheduledChunk], rows: list[int], kind: SamplingKind
    ) -> None:
        """Choose the tokens [n] of some rows, all of one kind, in place."""
        vocab = logits.shape[1]
        own = [chunks[row] for row in rows]
        arrays: list[_Array] = [np.array(rows, dtype=np.int64)]
        if kind.penalised:
            arrays += _histories(own, vocab)
        if kind.draws:
            arrays += _distributions(own, vocab)
        row_ids, *rest = upload(arrays, logits.device)
        x = logits.index_select(0, row_ids).float()
        if kind.penalised:
            prompts, outputs, starts, sources, factors = rest[:5]
            x = penalise(x, prompts, outputs, starts, self.tokens.index_select(0, sources), factors)
            rest = rest[5:]
        if not kind.draws:
            tokens.index_copy_(0, row_ids, x.argmax(dim=-1))
            return
        temperature, min_p, uniform, top_k, top_p = rest
        x = (x / temperature).softmax(dim=-1)
        order = None
        if kind.sorts:
            x, order = x.sort(dim=-1, descending=True, stable=True)
            x = filter_sorted(x, top_k, top_p)
        if any(chunk.sequence.params.min_p > 0 for chunk in own):
            x = x.where(x >= min_p * x.amax(dim=-1, keepdim=True), 0.0)
        place = draw(x, uniform)
        chosen = place if order is None else order.gather(1, place[:, None])[:, 0]
        tokens.index_copy_(0, row_ids, chosen)


def _histories(chunks: Seq[ScheduledChunk], vocab: int) -> list[_Array]:
    """What the penalties of a block of rows depend on; places are `row * vocab + token` in the block.

    Places of prompts and of known outputs; for rows with a token pending, the row's first place and the row of the
    step before that sampled it; factors [3, rows, 1]: repetition, frequency, presence.
    """
    prompts, outputs, pending = [], [], []
    for i, chunk in enumerate(chunks):
        sequence = chunk.sequence
        known = sequence.token_array.of(sequence.token_ids) + i * vocab
        prompts.append(known[: sequence.num_prompt])
        outputs.append(known[sequence.num_prompt :])
        if chunk.source >= 0:
            pending.append((i * vocab, chunk.source))
    starts, sources = np.array(pending, dtype=np.int64).reshape(-1, 2).T
    params = [chunk.sequence.params for chunk in chunks]
    factors = [
        [p.repetition_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    ]
    return [
        np.concatenate(prompts),
        np.concatenate(outputs),
        starts,
        sources,
        np.array(factors, dtype=np.float32)[:, :, None],
    ]


def _distributions(chunks: Seq[ScheduledChunk], vocab: int) -> list[_Array]:
    """Temperature, min-p, uniform draw, top-k and top-p of each row; filters that are off let everything pass."""
    sequences = [chunk.sequence for chunk in chunks]
    params = [sequence.params for sequence in sequences]
    positions = [c.start + c.num_tokens - s.num_prompt for c, s in zip(chunks, sequences, strict=True)]
    return [
        np.array([max(p.temperature, _MIN_TEMPERATURE) for p in params], dtype=np.float32)[:, None],
        np.array([p.min_p for p in params], dtype=np.float32)[:, None],
        uniforms([sequence.seed for sequence in sequences], positions),
        np.array([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], dtype=np.int64)[:, None],
        np.array([p.top_p if p.top_p < 1.0 else np.inf for p in params], dtype=np.float64)[:, None],
    ]


def _launch_logprobs(logits: Tensor, tokens: Tensor, chunks: Seq[ScheduledChunk]) -> _PendingLogprobs | None:
    """Log probabilities of the rows that ask for them.

    All such rows look for `MAX_LOGPROBS` best tokens, so that ties come out the same whatever the others ask for.
    """
    wanted = [(row, chunk.sequence.params.logprobs) for row, chunk in enumerate(chunks)]
    asked = [(row, k) for row, k in wanted if k is not None]
    if not asked:
        return None
    num_top = min(MAX_LOGPROBS, logits.shape[1]) if any(k for _, k in asked) else 0
    (rows,) = upload([np.array([row for row, _ in asked], dtype=np.int64)], logits.device)
    values, ids = [], []
    for block in torch.split(rows, ROWS_AT_ONCE):
        logprobs = logits.index_select(0, block).float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens.index_select(0, block)[:, None])
        best, best_ids = logprobs.topk(num_top, dim=-1)
        values.append(torch.cat([own, best], dim=1))
        ids.append(best_ids)
    return _PendingLogprobs(
        [row for row, _ in asked], [k for _, k in asked], download(torch.cat(values)), download(torch.cat(ids))
    )
