"""One request while it is served: its tokens, its pages, and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from lorry.config import PAGE_SIZE
from lorry.types import AdapterUid, EngineRequest, SamplingParams


@dataclass(eq=False)
class Sequence:
    """`token_ids` is prompt and output together; keys and values of the first `num_computed` are in `pages`.

    `slot` is the adapter's place on the device (-1: base). `node` and `num_cached_pages` say how far its full pages
    are known to the prefix cache. `seed` is the request's own, or one drawn for it.
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

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def adapter_uid(self) -> AdapterUid:
        return self.request.adapter_uid

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are not in the pool yet: 1 in decode."""
        return len(self.token_ids) - self.num_computed

    def pages_for(self, num_tokens: int) -> int:
        """Further pages needed before the first `num_tokens` tokens have a place."""
        return max(0, -(-num_tokens // PAGE_SIZE) - len(self.pages))


@dataclass(frozen=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed tokens of a sequence; `samples`: its last row gives the next token."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """What one forward pass computes: chunks in the order of their rows."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
