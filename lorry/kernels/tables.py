"""Where kernels find the weights of all adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MAX_RANK = 512
"""The largest rank that the kernels serve; what graphs leave room for."""


class TableTensors(NamedTuple):
    """`LoRATables` as kernels take them; `shared` is any tensor where there is none."""

    a_offset: Tensor
    b_offset: Tensor
    rank: Tensor
    scale: Tensor
    shared: Tensor


@dataclass(frozen=True)
class LoRATables:
    """Where adapters' weights are; a row of the tables is a site, a column a slot. Kernels read them at every launch.

    `data` is flat, in the dtype of the activations. `a_offset`, `b_offset` [num_sites, num_slots] int64 count
    elements of it, in multiples of 16: from there A is [rank, in] and B [rank, out], for experts
    [E, rank, .], contiguous.
    `rank` int32 is 0 where a slot does not touch a site, at most `MAX_RANK` elsewhere; `scale` is float32. `shared`
    int32, or None for all zero, is for experts: bit 0, one A [rank, in] serves them all; bit 1, one B [rank, out].
    """

    data: Tensor
    a_offset: Tensor
    b_offset: Tensor
    rank: Tensor
    scale: Tensor
    shared: Tensor | None = None

    @property
    def num_slots(self) -> int:
        return self.rank.shape[1]

    @property
    def tensors(self) -> TableTensors:
        shared = self.rank if self.shared is None else self.shared
        return TableTensors(self.a_offset, self.b_offset, self.rank, self.scale, shared)
