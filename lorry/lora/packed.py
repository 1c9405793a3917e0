"""An adapter as it lies in the arena: all its matrices in one flat tensor, and what is where in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lorry.lora.weights import AdapterWeights

ALIGNMENT = 64
"""Elements to which every matrix is aligned: 128 bytes in 16-bit types."""


class Placed(NamedTuple):
    """A site's matrices in the flat tensor: where A and B start, and their shapes as stored."""

    a_start: int
    a_shape: torch.Size
    b_start: int
    b_shape: torch.Size
    scale: float

    @property
    def shared(self) -> int:
        """Bit 0: one A serves all experts; bit 1: one B does."""
        return (self.a_shape[0] == 1) + 2 * (self.b_shape[0] == 1)


@dataclass(frozen=True)
class PackedAdapter:
    """Immutable. On a host with a GPU the tensor is pinned, so that it goes to the device in one copy that nobody
    waits for."""

    data: Tensor
    sites: dict[int, Placed]

    @classmethod
    def of(cls, weights: AdapterWeights, pin: bool = False) -> PackedAdapter:
        """The weights' tensors in the order of their sites; one that two sites share is there once."""
        starts: dict[int, int] = {}
        size = 0
        for tensor in weights.tensors:
            starts[id(tensor)] = size
            size += aligned(tensor.numel())
        like = next(iter(weights.tensors), torch.empty(0))
        data = torch.zeros(size, dtype=like.dtype, device=like.device, pin_memory=pin)
        for tensor in weights.tensors:
            data[starts[id(tensor)] : starts[id(tensor)] + tensor.numel()] = tensor.flatten()
        sites = {
            index: Placed(starts[id(site.a)], site.a.shape, starts[id(site.b)], site.b.shape, site.scale)
            for index, site in weights.sites.items()
        }
        return cls(data, sites)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.itemsize


def aligned(numel: int) -> int:
    """The elements that a matrix takes."""
    return -(-numel // ALIGNMENT) * ALIGNMENT
