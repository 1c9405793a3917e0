"""The one device allocation of all resident adapters, each at its true rank, and the tables that find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lorry.errors import AdapterCapacity
from lorry.kernels.tables import LoRATables
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site, SiteKind

ALIGNMENT = 64
"""Elements to which every matrix is aligned: 128 bytes in 16-bit types."""

MOVED_AT_ONCE = 2**23
"""Elements that compacting copies at a time, by way of as much scratch memory."""


class ResidentSite(NamedTuple):
    """Views into the arena: a [num_experts, rank, in], b [num_experts, rank, out]; and the scale.

    A factor that all experts share is there once, and looks like this all the same (its first stride is 0).
    """

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


class _Placed(NamedTuple):
    """A site's matrices in its adapter's blob: where A and B start, and their shapes as stored."""

    a_start: int
    a_shape: torch.Size
    b_start: int
    b_shape: torch.Size
    scale: float

    @property
    def shared(self) -> int:
        """Bit 0: one A serves all experts; bit 1: one B does."""
        return (self.a_shape[0] == 1) + 2 * (self.b_shape[0] == 1)


@dataclass
class _Blob:
    """The range of the arena that one adapter has, what is where in it, by site, and the kinds of these sites."""

    start: int
    size: int
    sites: dict[int, _Placed]
    kinds: frozenset[SiteKind]


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Arena:
    """Holds adapters as blobs; a slot is a column of the tables.

    `data` is the flat allocation. `a_offset`, `b_offset` [num_sites, num_slots] (int64, in elements), `rank` (int32)
    and `scale` (float32) say where each slot's weights of each site are; rank 0: the slot does not touch the site.
    `shared` (int32) says which factors all experts of a site have in common: bit 0 A, bit 1 B.
    `tables` is all of these as kernels take them. Their addresses never change, so captured graphs see whatever is
    resident when they replay.
    Call everything on the stream of the steps.
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
        self.shared = torch.zeros(shape, dtype=torch.int32, device=device)
        self.tables = LoRATables(self.data, self.a_offset, self.b_offset, self.rank, self.scale, self.shared)
        self._space = _FreeList(self.data.numel())
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._blobs: dict[int, _Blob] = {}
        self._resident: dict[int, dict[int, ResidentSite]] = {}

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.dtype.itemsize

    @property
    def num_free_bytes(self) -> int:
        return self._space.num_free * self.dtype.itemsize

    def allocate(self, weights: AdapterWeights) -> int:
        """Copy an adapter in and return its slot; `AdapterCapacity` when there is no slot or no room.

        Where the room is there but in pieces, the arena is compacted first.
        """
        size = sum(_aligned(t.numel()) for t in weights.tensors)
        if not self._free_slots:
            raise AdapterCapacity(
                f"all {self.num_slots} adapter slots are taken: unload an adapter or raise --max-loras-per-batch"
            )
        if size > self._space.num_free:
            raise AdapterCapacity(
                f"the adapter needs {size * self.dtype.itemsize:,} bytes, the arena has {self.num_free_bytes:,} of "
                f"{self.num_bytes:,} bytes free: unload an adapter or raise --lora-memory"
            )
        start = self._space.allocate(size)
        if start is None:
            self.compact()
            start = self._space.allocate(size)
            assert start is not None
        slot = self._free_slots.pop()
        starts: dict[int, int] = {}
        used = 0
        for tensor in weights.tensors:
            self.data[start + used : start + used + tensor.numel()] = tensor.flatten()
            starts[id(tensor)] = used
            used += _aligned(tensor.numel())
        placed = {
            index: _Placed(starts[id(site.a)], site.a.shape, starts[id(site.b)], site.b.shape, site.scale)
            for index, site in weights.sites.items()
        }
        self._blobs[slot] = _Blob(start, size, placed, frozenset(self.sites[index].kind for index in placed))
        self._resident[slot] = self._views(self._blobs[slot])
        self._write_column(slot)
        return slot

    def release(self, slot: int) -> None:
        """Forget a slot; its bytes are free at once. No step that uses the slot may still run."""
        blob = self._blobs.pop(slot)
        self._space.release(blob.start, blob.size)
        del self._resident[slot]
        self.rank[:, slot] = 0
        self._free_slots.append(slot)

    def compact(self) -> None:
        """Move all adapters to the front, so that what is free is one range. Slots and addresses stay as they are."""
        end = 0
        for slot, blob in sorted(self._blobs.items(), key=lambda item: item[1].start):
            shift = blob.start - end
            if shift:
                for at in range(end, end + blob.size, MOVED_AT_ONCE):
                    stop = min(at + MOVED_AT_ONCE, end + blob.size)
                    self.data[at:stop] = self.data[at + shift : stop + shift].clone()  # the ranges may overlap
                blob.start = end
                self.a_offset[:, slot] -= shift
                self.b_offset[:, slot] -= shift
                self._resident[slot] = self._views(blob)
            end += blob.size
        self._space = _FreeList(self.data.numel())
        self._space.allocate(end)

    def get(self, site: int, slot: int) -> ResidentSite | None:
        """A slot's weights at a site, or None where the adapter does not touch it. Valid until the next `compact`."""
        return self._resident[slot].get(site)

    def kinds(self, slots: Sequence[int]) -> frozenset[SiteKind]:
        """Kinds of the sites that any of these slots touches."""
        return frozenset().union(*(self._blobs[slot].kinds for slot in slots))

    def touches(self, site: int, slots: Sequence[int]) -> bool:
        """Whether any of these slots has weights at the site."""
        return any(site in self._resident[slot] for slot in slots)

    def _views(self, blob: _Blob) -> dict[int, ResidentSite]:
        def view(start: int, shape: torch.Size, site: int) -> Tensor:
            flat = self.data[blob.start + start : blob.start + start + shape.numel()]
            return flat.view(shape).expand(self.sites[site].num_experts, -1, -1)

        return {
            index: ResidentSite(
                view(placed.a_start, placed.a_shape, index), view(placed.b_start, placed.b_shape, index), placed.scale
            )
            for index, placed in blob.sites.items()
        }

    def _write_column(self, slot: int) -> None:
        """The slot's column of every table, one copy for each."""
        blob = self._blobs[slot]
        touched = torch.tensor(list(blob.sites), dtype=torch.int64)
        rows = [
            (blob.start + placed.a_start, blob.start + placed.b_start, placed.a_shape[1], placed.scale, placed.shared)
            for placed in blob.sites.values()
        ]
        for i, table in enumerate(self.tables.tensors):
            column = torch.zeros(len(self.sites), dtype=table.dtype)
            column[touched] = torch.tensor([row[i] for row in rows], dtype=table.dtype)
            table[:, slot] = column.to(table.device)
