"""One request while it is served: its tokens, its pages, how far it has been computed, what of it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorry.config import PAGE_SIZE
from lorry.types import AdapterUid, EngineRequest, SamplingParams


class SamplingKind(NamedTuple):
    """What choosing a token takes beyond the most likely one. `sorts`: a filter needs the tokens in their order."""

    draws: bool
    sorts: bool
    penalised: bool


GREEDY = SamplingKind(False, False, False)


class TokenArray:
    """The tokens of a list that grows, as an array: only what is new is converted."""

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.int64)
        self._length = 0

    def of(self, token_ids: list[int]) -> npt.NDArray[np.int64]:
        """int64, valid until the next call."""
        if len(token_ids) > len(self._room):
            room = np.empty(2 * len(token_ids), dtype=np.int64)
            room[: self._length] = self._room[: self._length]
            self._room = room
        self._room[self._length : len(token_ids)] = token_ids[self._length :]
        self._length = len(token_ids)
        return self._room[: self._length]


@dataclass(eq=False)
class Sequence:
    """`token_ids` is prompt and output together, as far as known; `pages` hold keys and values.

    `slot` is the adapter's place on the device (-1: base). `node` and `num_cached_pages` say how far its full pages
    are known to the prefix cache. `seed` is the request's own, or one drawn for it.

    Steps are launched before the tokens of the step before are read, so there are tokens that have been sampled but
    are known to the device alone: `num_pending` of them, behind `token_ids`; the last one is in row `pending_row` of
    what its step sampled. `num_computed` counts tokens whose keys and values a launched step writes. `num_in_flight`
    counts launched steps with this sequence in them that have not been read: until it is 0 its pages and its adapter
    stay, even when it has `ended`. Of waiting sequences the one with the smallest `turn` goes first.
    """

    request: EngineRequest
    slot: int
    seed: int
    max_tokens: int
    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    node: int = 0
    num_cached_pages: int = 0
    num_hit_tokens: int = 0
    num_pending: int = 0
    pending_row: int = -1
    num_in_flight: int = 0
    ended: bool = False
    turn: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def adapter_uid(self) -> AdapterUid:
        return self.request.adapter_uid

    @cached_property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @cached_property
    def token_array(self) -> TokenArray:
        return TokenArray()

    @property
    def num_output(self) -> int:
        """Tokens of the output that are known."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Tokens that are known or pending."""
        return len(self.token_ids) + self.num_pending

    @cached_property
    def max_length(self) -> int:
        """Tokens of prompt and longest output. A sequence with so many, known or pending, needs no further step."""
        return self.num_prompt + self.max_tokens

    @cached_property
    def sampling_kind(self) -> SamplingKind:
        p = self.params
        draws = p.temperature > 0
        penalised = p.repetition_penalty != 1.0 or bool(p.presence_penalty or p.frequency_penalty)
        return SamplingKind(draws, draws and (p.top_k > 0 or p.top_p < 1.0), penalised)

    def pages_for(self, num_tokens: int) -> int:
        """Further pages needed before the first `num_tokens` tokens have a place; not above 0 where none are."""
        return -(-num_tokens // PAGE_SIZE) - len(self.pages)


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence; `samples`: its last row gives the next token.

    `source` -1: these tokens are known. Otherwise there is one, pending, in that row of what the step before sampled.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool = False
    source: int = -1


@dataclass(frozen=True)
class StepPlan:
    """What one forward pass computes: chunks in the order of their rows."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling(self) -> list[ScheduledChunk]:
        """The chunks that sample, in the order in which the step gives their tokens."""
        return [chunk for chunk in self.chunks if chunk.samples]
