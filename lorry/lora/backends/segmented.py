"""What the backends on our own kernels share: they differ only in how they cut the rows of a step into segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorry.kernels.dense import Segments, add_lora
from lorry.kernels.dense_fused import GroupLoRA
from lorry.kernels.tables import MAX_RANK
from lorry.lora.arena import Arena, ResidentSite
from lorry.lora.batch import LoRABatchInfo, PackedRouting, RequestRouting
from lorry.upload import FixedArrays, upload

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Cut:
    """Segments of a step on the host: see `LoRABatchInfo` for the arrays, padded to their capacity."""

    seg_indptr: Ints
    weight_indices: Ints
    permutation: Ints | None
    max_seg_len: int


@dataclass(frozen=True)
class _Fixed:
    """What captured steps of up to so many requests read."""

    max_bs: int
    arrays: FixedArrays


class SegmentedBackend(ABC):
    """Shrink and expand by segments; a subclass says what a segment is.

    Memory for captured graphs is made for `MAX_RANK` rank rows, so that they replay with any adapter.
    """

    name: str
    max_rank: int | None = MAX_RANK

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        self._dense_sites = [site.index for site in arena.sites if site.kind != "experts"]
        self._widths = {site.index: site.out_features for site in arena.sites}
        self._device = device
        self._fixed: dict[int, _Fixed] = {}
        self._ranks: dict[int, tuple[int, ResidentSite | None, int]] = {}

    @abstractmethod
    def _capacity(self, bs: int, num_tokens: int) -> int:
        """Most segments of a step with so many requests and rows."""

    @abstractmethod
    def _cut(self, packed: PackedRouting) -> Cut:
        """The segments of a step, `_capacity` of them where the step is padded."""

    def init_cuda_graph_batch_info(self, max_bs: int, max_tokens: int) -> None:
        segments = max(self._capacity(min(max_bs, rows), rows) for rows in range(1, max_tokens + 1))
        sizes = [max_bs + 1, max_bs, max_tokens, segments + 1, segments, max_tokens]
        self._fixed[max_tokens] = _Fixed(max_bs, FixedArrays(sizes, self._device))

    def prepare_lora_batch(self, routing: RequestRouting, num_padded_tokens: int | None = None) -> LoRABatchInfo:
        padded_bs, fixed = num_padded_tokens, None
        if num_padded_tokens is not None:
            enough = [max_tokens for max_tokens in self._fixed if max_tokens >= num_padded_tokens]
            fixed = self._fixed[min(enough)] if enough else None
            padded_bs = num_padded_tokens if fixed is None else min(fixed.max_bs, num_padded_tokens)
        packed = PackedRouting.of(routing, num_padded_tokens, padded_bs)
        cut = self._cut(packed)
        arrays = [packed.indptr, packed.slots, packed.token_slots, cut.seg_indptr, cut.weight_indices]
        if cut.permutation is not None:
            arrays.append(cut.permutation)
        there = upload(arrays, self._device) if fixed is None else fixed.arrays.fill(arrays)
        indptr, slots, token_slots, seg_indptr, weight_indices, *rest = there
        adapters = routing.adapter_slots
        max_rank = max((self._max_rank(slot) for slot in adapters), default=1)
        assert max_rank <= MAX_RANK, f"rank {max_rank} is past the {MAX_RANK} that the kernels are made for"
        return LoRABatchInfo(
            bs=len(packed.slots),
            num_segments=len(cut.weight_indices),
            seg_indptr=seg_indptr,
            weight_indices=weight_indices,
            token_slots=token_slots,
            slots=adapters,
            permutation=rest[0] if rest else None,
            req_seg_indptr=indptr,
            req_weight_indices=slots,
            max_seg_len=cut.max_seg_len,
            max_rank=max_rank if fixed is None else MAX_RANK,
            fixed=fixed is not None,
        )

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[int, ...], info: LoRABatchInfo) -> None:
        segments = Segments(info.seg_indptr, info.weight_indices, info.permutation, info.max_seg_len)
        widths = tuple(self._widths[site] for site in sites)
        add_lora(y, x, self._arena.tables, sites, widths, segments, info.max_rank)

    def group_lora(self, sites: tuple[int, ...], info: LoRABatchInfo) -> GroupLoRA:
        segments = Segments(info.seg_indptr, info.weight_indices, info.permutation, info.max_seg_len)
        return GroupLoRA(self._arena.tables, sites, segments, info.token_slots, info.max_rank)

    def _max_rank(self, slot: int) -> int:
        """Largest rank of a slot at any site that is no experts; remembered while the slot holds that adapter."""
        known = self._ranks.get(slot)
        if known is not None and known[1] is not None and self._arena.get(known[0], slot) is known[1]:
            return known[2]
        found = [(site, self._arena.get(site, slot)) for site in self._dense_sites]
        touched = [(site, resident) for site, resident in found if resident is not None]
        rank = max((resident.a.shape[1] for _, resident in touched), default=1)
        self._ranks[slot] = (*touched[0], rank) if touched else (0, None, rank)
        return rank


def padded(values: Ints, size: int, fill: int) -> Ints:
    """`values` followed by `fill` up to `size`."""
    assert len(values) <= size
    return np.concatenate([values, np.full(size - len(values), fill, dtype=np.int32)])
