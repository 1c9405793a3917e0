"""Dense backend whose segments are the requests."""

from __future__ import annotations

from lorry.lora.backends.base import DENSE_BACKENDS
from lorry.lora.backends.segmented import Cut, SegmentedBackend
from lorry.lora.batch import PackedRouting


class TritonBackend(SegmentedBackend):
    """One segment per request, rows in the order of the batch: nothing to sort, A and B read once per request."""

    name = "triton"

    def _capacity(self, bs: int, num_tokens: int) -> int:
        return bs

    def _cut(self, packed: PackedRouting) -> Cut:
        if packed.padded:
            longest = -(-len(packed.token_slots) // len(packed.slots))
        else:
            longest = int((packed.indptr[1:] - packed.indptr[:-1]).max(initial=1))
        return Cut(packed.indptr, packed.slots, None, longest)


DENSE_BACKENDS["triton"] = TritonBackend
