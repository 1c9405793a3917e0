"""Steps over a paged pool in which every row that no sequence owns is NaN, for tests of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.attention.base import AttentionBackend, AttentionBatch, AttentionParams, PaddedBatch
from lorry.config import PAGE_SIZE
from lorry.kv.pool import KVShape, LayerKV, allocate_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Feature:
    """A layer's shape and what it asks of attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def params(self, generator: torch.Generator, dtype: torch.dtype) -> AttentionParams:
        sinks = torch.randn(self.heads, generator=generator).to(DEVICE, dtype) if self.sinks else None
        return AttentionParams(self.key_dim**-0.5, self.window, self.softcap, sinks)


class World:
    """Sequences of (query length, context length) with keys and values of all their tokens.

    The same seed gives sequence i the same tokens whatever the others are, unless `names` says which it is.
    """

    def __init__(
        self,
        feature: Feature,
        lens: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        names: Sequence[int] | None = None,
        padding: int = 0,
        pool_pages: int = 0,
    ) -> None:
        self.feature, self.lens = feature, tuple(lens)
        counts = [-(-context // PAGE_SIZE) for _, context in lens]
        shape = KVShape(feature.kv_heads, feature.key_dim, feature.value_dim)
        generator = torch.Generator().manual_seed(17)
        num_pages = max(pool_pages, sum(counts) + 3)
        order = torch.randperm(num_pages, generator=generator).tolist()
        self.kv = allocate_kv({"l": shape}, num_pages, dtype, DEVICE)["l"]
        self.kv.keys.fill_(float("nan"))
        self.kv.values.fill_(float("nan"))
        self.params = feature.params(torch.Generator().manual_seed(18), dtype)
        pages, slots, rows = [], [], []
        for i, (query, context) in enumerate(lens):
            own = torch.Generator().manual_seed(names[i] if names is not None else i)
            sequence = [torch.randn(context, *size, generator=own).to(DEVICE, dtype) for size in self._sizes()]
            pages.append(tuple(order.pop() for _ in range(counts[i])))
            places = torch.tensor([pages[i][n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE for n in range(context)])
            places = places.to(DEVICE)
            earlier = context - query
            self.kv.keys[places[:earlier]] = sequence[1][:earlier]
            self.kv.values[places[:earlier]] = sequence[2][:earlier]
            slots.append(places[earlier:])
            rows.append([x[earlier:] for x in sequence])
        self.q, self.k, self.v = (torch.cat([row[j] for row in rows]) for j in range(3))
        if padding:
            nan = float("nan")
            self.q, self.k, self.v = (
                torch.cat([x, x.new_full((padding, *x.shape[1:]), nan)]) for x in (self.q, self.k, self.v)
            )
        self.batch = AttentionBatch(
            tuple(query for query, _ in lens), tuple(context for _, context in lens), tuple(pages), torch.cat(slots)
        )

    def _sizes(self) -> list[tuple[int, int]]:
        f = self.feature
        return [(f.heads, f.key_dim), (f.kv_heads, f.key_dim), (f.kv_heads, f.value_dim)]

    def run(self, backend: AttentionBackend, plan: bool = True) -> Tensor:
        """One layer of the step; the pool then holds all keys and values. q comes as transformers gives it."""
        if plan:
            backend.plan(self.batch)
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (self.q, self.k, self.v))
        return backend.run(q, k, v, self.kv, self.params)

    def padded(self, max_requests: int, max_pages: int) -> PaddedBatch:
        """The step as a captured one takes it, of as many rows as q has."""
        pages = torch.zeros(max_requests, max_pages, dtype=torch.int32, device=DEVICE)
        for i, own in enumerate(self.batch.pages):
            pages[i, : len(own)] = torch.tensor(own)
        slots = torch.full((len(self.q),), -1, dtype=torch.int32, device=DEVICE)
        slots[: len(self.batch.write_slots)] = self.batch.write_slots
        return PaddedBatch(self.batch.query_lens, self.batch.context_lens, pages, slots)

    def reference(self) -> tuple[Tensor, LayerKV]:
        """Explicit float32 attention [rows, H, DV], padding left out, and the pool after the step."""
        f = self.feature
        keys, values = self.kv.keys.clone(), self.kv.values.clone()
        count = len(self.batch.write_slots)
        keys[self.batch.write_slots], values[self.batch.write_slots] = self.k[:count], self.v[:count]
        out, first = [], 0
        for (query, context), own in zip(self.lens, self.batch.pages, strict=True):
            n = torch.arange(context, device=DEVICE)
            places = torch.tensor(own, device=DEVICE)[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE
            k, v = (x[places].float().repeat_interleave(f.heads // f.kv_heads, 1) for x in (keys, values))
            position = n[context - query :, None]
            scores = torch.einsum("qhd,khd->hqk", self.q[first : first + query].float(), k) * self.params.scale
            if f.softcap:
                scores = f.softcap * torch.tanh(scores / f.softcap)
            seen = (n <= position) & (n > position - (f.window or context))
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.params.sinks is not None:
                sinks = self.params.sinks.float()[:, None, None].expand(-1, query, 1)
                scores = torch.cat([scores, sinks], dim=2)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., :context], v))
            first += query
        return torch.cat(out), LayerKV(keys, values)
