"""Which rows of a packed step belong to which adapter, as every backend and the experts need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
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
    `slots` lists the distinct adapters of the step on the host. `max_seg_len` rows of one segment and `max_rank` rank
    rows are what kernels are launched for. In a padded step the tensors are `fixed`: shapes and addresses are those
    of its size, padding is -1, and the launches must not depend on `slots`. Source: SGLang's structure of the name.
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
    max_seg_len: int = 1
    max_rank: int = 1
    fixed: bool = False

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


@dataclass(frozen=True)
class PackedRouting:
    """The request view of a step as int32 arrays: `indptr` [bs + 1], `slots` [bs], `token_slots` [T]."""

    indptr: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    token_slots: npt.NDArray[np.int32]
    padded: bool

    @classmethod
    def of(cls, routing: RequestRouting, num_padded_tokens: int | None = None, padded_bs: int | None = None) -> Self:
        """Padding requests have slot -1 and one row each while there are padding rows; the last takes the rest.

        Padding rows that find no padding request are in no request; their slot is -1 all the same.
        """
        indptr = np.array(routing.indptr(), dtype=np.int32)
        slots = np.array(routing.slots, dtype=np.int32)
        num_tokens, bs = int(indptr[-1]), len(slots)
        total = num_tokens if num_padded_tokens is None else num_padded_tokens
        total_bs = bs if padded_bs is None else padded_bs
        assert num_tokens <= total, f"{num_tokens} rows do not fit in a step padded to {total}"
        assert bs <= total_bs, f"{bs} requests do not fit in a step padded to {total_bs}"
        token_slots = np.full(total, BASE_SLOT, dtype=np.int32)
        token_slots[:num_tokens] = np.repeat(slots, np.diff(indptr))
        if total_bs > bs:
            ends = np.minimum(num_tokens + np.arange(1, total_bs - bs + 1), total).astype(np.int32)
            ends[-1] = total
            indptr = np.concatenate([indptr, ends])
            slots = np.concatenate([slots, np.full(total_bs - bs, BASE_SLOT, dtype=np.int32)])
        return cls(indptr, slots, token_slots, num_padded_tokens is not None)


def int_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 on `device`."""
    return torch.tensor(values, dtype=torch.int32, device=device)
