"""Reference dense backend in plain torch: a segment is all rows of one adapter."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lorry.errors import ConfigError
from lorry.lora.arena import Arena
from lorry.lora.backends.base import DENSE_BACKENDS
from lorry.lora.batch import LoRABatchInfo, PackedRouting, RequestRouting, int_tensor
from lorry.lora.reference import lora_delta
from lorry.types import BASE_SLOT


class TorchBackend:
    """Rows sorted by slot (stably, base rows first); each adapter's rows are gathered, multiplied and added back."""

    name = "torch"
    max_rank: int | None = None

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        self._device = device

    def init_cuda_graph_batch_info(self, max_bs: int, max_tokens: int) -> None:
        raise ConfigError(
            "LoRA backend 'torch' cannot be captured into CUDA graphs: use --lora-backend csgmv or triton"
        )

    def prepare_lora_batch(self, routing: RequestRouting, num_padded_tokens: int | None = None) -> LoRABatchInfo:
        packed = PackedRouting.of(routing, num_padded_tokens, num_padded_tokens)
        row_slots = torch.from_numpy(packed.token_slots)
        slots = routing.adapter_slots
        counts = [int((row_slots == slot).sum()) for slot in (BASE_SLOT, *slots)]
        order = torch.argsort(row_slots, stable=True).to(torch.int32)
        return LoRABatchInfo(
            bs=len(packed.slots),
            num_segments=len(slots) + 1,
            seg_indptr=int_tensor(RequestRouting(tuple(counts), ()).indptr(), self._device),
            weight_indices=int_tensor([BASE_SLOT, *slots], self._device),
            token_slots=row_slots.to(self._device),
            slots=slots,
            permutation=order.to(self._device),
            req_seg_indptr=torch.from_numpy(packed.indptr).to(self._device),
            req_weight_indices=torch.from_numpy(packed.slots).to(self._device),
        )

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[int, ...], info: LoRABatchInfo) -> None:
        assert info.permutation is not None
        bounds = info.seg_indptr.tolist()
        rows = info.permutation[bounds[1] :]
        inputs = x[rows].split_with_sizes([stop - start for start, stop in pairwise(bounds[1:])])
        parts = torch.split(y, [self._arena.sites[site].out_features for site in sites], dim=1)
        for part, site in zip(parts, sites, strict=True):
            if self._arena.touches(site, info.slots):
                deltas = [self._delta(own, site, slot) for own, slot in zip(inputs, info.slots, strict=True)]
                part[rows] = (part[rows].float() + torch.cat(deltas)).to(y.dtype)

    def _delta(self, x: Tensor, site: int, slot: int) -> Tensor:
        resident = self._arena.get(site, slot)
        if resident is None:
            return x.new_zeros(len(x), self._arena.sites[site].out_features, dtype=torch.float32)
        return lora_delta(x, resident.a[0], resident.b[0], resident.scale)

    def group_lora(self, sites: tuple[int, ...], info: LoRABatchInfo) -> None:
        return None


DENSE_BACKENDS["torch"] = TorchBackend
