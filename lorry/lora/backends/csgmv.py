"""Dense backend whose segments are chunks of all rows of one adapter, whatever requests they belong to."""

from __future__ import annotations

import numpy as np

from lorry.lora.backends.base import DENSE_BACKENDS
from lorry.lora.backends.segmented import Cut, SegmentedBackend, padded
from lorry.lora.batch import PackedRouting

_CHUNK_LENS = ((256, 16), (1024, 32), (4096, 64))
"""(most rows of a step, rows of a chunk); 128 above."""


def chunk_len(num_tokens: int) -> int:
    """Rows of a chunk in a step of so many rows: small steps need programs, large ones should read weights rarely."""
    return next((rows for most, rows in _CHUNK_LENS if num_tokens <= most), 128)


class CsgmvBackend(SegmentedBackend):
    """Rows sorted by slot into a permutation, each slot's rows cut into chunks; base rows come last, in no chunk.

    One row needs no permutation. The name (chunked segmented gather matrix-vector) and the idea are SGLang's.
    """

    name = "csgmv"

    def _capacity(self, bs: int, num_tokens: int) -> int:
        """All adapters have rows, all but one of each in whole chunks."""
        adapters = min(bs, num_tokens, self._arena.num_slots)
        return adapters + (num_tokens - adapters) // chunk_len(num_tokens)

    def _cut(self, packed: PackedRouting) -> Cut:
        num_tokens = len(packed.token_slots)
        chunk = chunk_len(num_tokens)
        base_last = np.where(packed.token_slots < 0, np.iinfo(np.int32).max, packed.token_slots)
        slots, lengths = np.unique(packed.token_slots[packed.token_slots >= 0], return_counts=True)
        num_chunks = -(-lengths // chunk)
        chunk_slots = np.repeat(slots, num_chunks)
        first_chunk = np.cumsum(num_chunks) - num_chunks
        first_row = np.cumsum(lengths) - lengths
        within = np.arange(len(chunk_slots)) - np.repeat(first_chunk, num_chunks)
        starts = (np.repeat(first_row, num_chunks) + within * chunk).astype(np.int32)
        capacity = self._capacity(len(packed.slots), num_tokens) if packed.padded else len(chunk_slots)
        return Cut(
            seg_indptr=padded(starts, capacity + 1, int(lengths.sum())),
            weight_indices=padded(chunk_slots.astype(np.int32), capacity, -1),
            permutation=np.argsort(base_last, kind="stable").astype(np.int32) if num_tokens > 1 else None,
            max_seg_len=min(chunk, num_tokens),
        )


DENSE_BACKENDS["csgmv"] = CsgmvBackend
