"""The one device allocation of all resident adapters, each at its true rank, and the tables that find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorry.errors import AdapterCapacity
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site

ALIGNMENT = 64
"""Elements to which every matrix is aligned: 128 bytes in 16-bit types."""


class ResidentSite(NamedTuple):
    """Views into the arena: a [num_experts, rank, in], b [num_experts, rank, out]; and the scale."""

    a: Tensor
    b: Tensor
    scale: float


class _FreeList:
    """First-fit allocation of ranges in units of elements; neighbours that are free again become one range."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def allocate(self, size: int) -> int | None:
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for s, n in sorted([*self._free, (start, size)]):
            if merged and merged[-1][0] + merged[-1][1] == s:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((s, n))
        self._free = merged


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Arena:
    """Holds adapters as blobs; a slot is a column of the tables.

    `data` is the flat allocation. `a_offset`, `b_offset` [num_sites, num_slots] (int64, in elements), `rank` (int32)
    and `scale` (float32) say where each slot's weights of each site are; rank 0: the slot does not touch the site.
    The addresses of all five tensors never change.
    """

    def __init__(
        self, sites: Sequence[Site], num_bytes: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sites = sites
        self.num_slots = num_slots
        self.dtype = dtype
        self.data = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        shape = (len(sites), num_slots)
        self.a_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.b_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self._space = _FreeList(self.data.numel())
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._ranges: dict[int, tuple[int, int]] = {}
        self._resident: dict[int, dict[int, ResidentSite]] = {}

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.dtype.itemsize

    @property
    def num_free_bytes(self) -> int:
        return self._space.num_free * self.dtype.itemsize

    def allocate(self, weights: AdapterWeights) -> int:
        """Copy an adapter in and return its slot; `AdapterCapacity` when there is no slot or no room."""
        size = sum(_aligned(t.numel()) for t in weights.tensors)
        if not self._free_slots:
            raise AdapterCapacity(
                f"all {self.num_slots} adapter slots are taken: unload an adapter or raise --max-loras-per-batch"
            )
        start = self._space.allocate(size)
        if start is None:
            raise AdapterCapacity(
                f"the adapter needs {size * self.dtype.itemsize:,} bytes, the arena has {self.num_free_bytes:,} of "
                f"{self.num_bytes:,} bytes free: unload an adapter or raise --lora-memory"
            )
        slot = self._free_slots.pop()
        self._ranges[slot] = (start, size)
        offsets: dict[int, int] = {}
        for tensor in weights.tensors:
            self.data[start : start + tensor.numel()] = tensor.flatten()
            offsets[id(tensor)] = start
            start += _aligned(tensor.numel())
        self._resident[slot] = {}
        for index, site in weights.sites.items():
            self._place(slot, index, site.a, site.b, site.scale, offsets)
        return slot

    def _place(self, slot: int, index: int, a: Tensor, b: Tensor, scale: float, offsets: dict[int, int]) -> None:
        a_offset, b_offset = offsets[id(a)], offsets[id(b)]
        self.a_offset[index, slot] = a_offset
        self.b_offset[index, slot] = b_offset
        self.rank[index, slot] = a.shape[1]
        self.scale[index, slot] = scale
        self._resident[slot][index] = ResidentSite(
            self.data[a_offset : a_offset + a.numel()].view(a.shape),
            self.data[b_offset : b_offset + b.numel()].view(b.shape),
            scale,
        )

    def release(self, slot: int) -> None:
        """Forget a slot; its bytes are free at once. No step that uses the slot may still run."""
        self._space.release(*self._ranges.pop(slot))
        del self._resident[slot]
        self.rank[:, slot] = 0
        self._free_slots.append(slot)

    def get(self, site: int, slot: int) -> ResidentSite | None:
        """A slot's weights at a site, or None where the adapter does not touch it."""
        return self._resident[slot].get(site)

    def touches(self, site: int, slots: Sequence[int]) -> bool:
        """Whether any of these slots has weights at the site."""
        return any(site in self._resident[slot] for slot in slots)
