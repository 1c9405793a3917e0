"""The one device allocation of all resident adapters, each at its true rank, and the tables that find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorry.errors import AdapterCapacity
from lorry.kernels.tables import LoRATables
from lorry.lora.packed import PackedAdapter, Placed
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site, SiteKind
from lorry.upload import upload

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


@dataclass
class _Blob:
    """The range of the arena that one adapter has, what is where in it, by site, and the kinds of these sites."""

    start: int
    size: int
    sites: dict[int, Placed]
    kinds: frozenset[SiteKind]


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
        self._unpublished: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.dtype.itemsize

    @property
    def num_free_bytes(self) -> int:
        return self._space.num_free * self.dtype.itemsize

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blob_bytes(self, slot: int) -> int:
        """What a slot's adapter takes of the arena."""
        return self._blobs[slot].size * self.dtype.itemsize

    def allocate(self, weights: AdapterWeights) -> int:
        """Copy an adapter in and return its slot; `AdapterCapacity` when there is no slot or no room."""
        packed = PackedAdapter.of(weights)
        self.check(packed.num_bytes)
        if not self._free_slots:
            raise AdapterCapacity(
                f"all {self.num_slots} adapter slots are taken: unload an adapter or raise --max-loras-per-batch"
            )
        slot = self.reserve(packed)
        if slot is None:
            raise AdapterCapacity(
                f"the adapter needs {packed.num_bytes:,} bytes, the arena has {self.num_free_bytes:,} of "
                f"{self.num_bytes:,} bytes free: unload an adapter or raise --lora-memory"
            )
        self.copy(slot, packed)
        self.publish(slot)
        return slot

    def check(self, num_bytes: int, staying: int = 0) -> None:
        """Raise `AdapterCapacity` where an adapter of this size finds no room beside `staying` bytes of others."""
        if num_bytes + staying > self.num_bytes:
            others = f" and {staying:,} of them for adapters that stay" if staying else ""
            raise AdapterCapacity(
                f"the adapter needs {num_bytes:,} bytes, the arena has {self.num_bytes:,}{others}: "
                "raise --lora-memory"
            )

    def reserve(self, packed: PackedAdapter) -> int | None:
        """A slot with room for the adapter; None where there is no slot or no room.

        Where the room is there but in pieces, the arena is compacted first, once no copy is under way any more.
        `copy` and `publish` follow; until then no row may have the slot.
        """
        size = packed.data.numel()
        if not self._free_slots or size > self._space.num_free:
            return None
        start = self._space.allocate(size)
        if start is None:
            if self._unpublished:
                return None
            self.compact()
            start = self._space.allocate(size)
            assert start is not None
        slot = self._free_slots.pop()
        kinds = frozenset(self.sites[index].kind for index in packed.sites)
        self._blobs[slot] = _Blob(start, size, packed.sites, kinds)
        self._unpublished.add(slot)
        return slot

    def copy(self, slot: int, packed: PackedAdapter) -> None:
        """Copy the weights of a reserved slot on the current stream, which may be another than that of the steps."""
        blob = self._blobs[slot]
        self.data[blob.start : blob.start + blob.size].copy_(packed.data, non_blocking=True)

    def publish(self, slot: int) -> None:
        """Let kernels find a slot; its copy is done, or before on the current stream."""
        self._unpublished.remove(slot)
        self._resident[slot] = self._views(self._blobs[slot])
        self._write_column(slot)

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
        """The slot's column of every table, in one copy that nobody waits for."""
        blob = self._blobs[slot]
        rows = [
            (blob.start + placed.a_start, blob.start + placed.b_start, placed.a_shape[1], placed.scale, placed.shared)
            for placed in blob.sites.values()
        ]
        dtypes = (np.int64, np.int64, np.int32, np.float32, np.int32)
        columns = [np.zeros(len(self.sites), dtype=dtype) for dtype in dtypes]
        for i, column in enumerate(columns):
            column[list(blob.sites)] = [row[i] for row in rows]
        for table, there in zip(self.tables.tensors, upload(columns, self.data.device), strict=True):
            table[:, slot] = there
