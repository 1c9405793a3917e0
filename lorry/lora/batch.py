"""Which rows of a packed step belong to which adapter, as every backend and the experts need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.types import BASE_SLOT


@dataclass(frozen=True)
class LoRABatchInfo:
    """Routing of one step. A segment is what the dense backend says it is; a request is always a request.

    `seg_indptr` [num_segments + 1] and `weight_indices` [num_segments] are the dense backend's own segmentation of
    its rows (of `permutation` [T], row numbers in the backend's order, where that is not None) and the slot of each
    segment. `req_seg_indptr` [bs + 1] and `req_weight_indices` [bs] are rows and slot of each request, in the order
    of the batch; they are None only where the backend's segments are the requests themselves.
    `token_slots` [T] is the slot of each row, -1 for the base. All tensors are int32 on the device.
    `slots` lists the distinct adapters of the step on the host. Source: SGLang's structure of the same name.
    """

    bs: int
    num_segments: int
    seg_indptr: Tensor
    weight_indices: Tensor
    token_slots: Tensor
    slots: tuple[int, ...]
    permutation: Tensor | None = None
    req_seg_indptr: Tensor | None = None
    req_weight_indices: Tensor | None = None

    @property
    def requests(self) -> tuple[Tensor, Tensor]:
        """(indptr, slots) by request: the explicit pair where there is one, else the backend's own segments."""
        if self.req_seg_indptr is None or self.req_weight_indices is None:
            return self.seg_indptr, self.weight_indices
        return self.req_seg_indptr, self.req_weight_indices


@dataclass(frozen=True)
class RequestRouting:
    """Rows of a step by request, on the host: `seq_lens[i]` rows of slot `slots[i]` (-1: base)."""

    seq_lens: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def adapter_slots(self) -> tuple[int, ...]:
        """The distinct adapters, ascending, without the base."""
        return tuple(sorted({slot for slot in self.slots if slot != BASE_SLOT}))

    def indptr(self) -> list[int]:
        """[bs + 1] prefix sums of `seq_lens`."""
        sums = [0]
        for length in self.seq_lens:
            sums.append(sums[-1] + length)
        return sums


def token_slots(req_seg_indptr: Tensor, req_weight_indices: Tensor, num_tokens: int) -> Tensor:
    """Slot of each of `num_tokens` rows [T] int32: once per step, never once per layer."""
    lengths = req_seg_indptr.diff()
    return torch.repeat_interleave(req_weight_indices, lengths, output_size=num_tokens)


def int_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 on `device`."""
    return torch.tensor(values, dtype=torch.int32, device=device)
