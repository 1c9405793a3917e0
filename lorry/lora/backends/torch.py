"""Reference dense backend in plain torch: a segment is all rows of one adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from lorry.lora.arena import Arena
from lorry.lora.backends.base import DENSE_BACKENDS
from lorry.lora.batch import LoRABatchInfo, RequestRouting, int_tensor, token_slots
from lorry.types import BASE_SLOT


class TorchBackend:
    """Rows sorted by slot (stably, base rows first); each adapter's rows are gathered, multiplied and added back."""

    name = "torch"

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        self._device = device

    def prepare_lora_batch(self, routing: RequestRouting) -> LoRABatchInfo:
        indptr = int_tensor(routing.indptr(), self._device)
        requests = int_tensor(routing.slots, self._device)
        row_slots = token_slots(indptr, requests, sum(routing.seq_lens))
        slots = routing.adapter_slots
        counts = [sum(n for n, s in zip(routing.seq_lens, routing.slots, strict=True) if s == slot) for slot in slots]
        num_base = sum(routing.seq_lens) - sum(counts)
        order = torch.argsort(row_slots, stable=True).to(torch.int32)
        return LoRABatchInfo(
            bs=len(routing.slots),
            num_segments=len(slots) + 1,
            seg_indptr=int_tensor([0, *RequestRouting((num_base, *counts), ()).indptr()[1:]], self._device),
            weight_indices=int_tensor([BASE_SLOT, *slots], self._device),
            token_slots=row_slots,
            slots=slots,
            permutation=order,
            req_seg_indptr=indptr,
            req_weight_indices=requests,
        )

    def add_lora(self, y: Tensor, x: Tensor, site: int, info: LoRABatchInfo) -> None:
        assert info.permutation is not None
        bounds = info.seg_indptr.tolist()
        for segment, slot in enumerate(info.slots, start=1):
            resident = self._arena.get(site, slot)
            if resident is None:
                continue
            rows = info.permutation[bounds[segment] : bounds[segment + 1]]
            shrunk = x[rows].float() @ resident.a[0].float().T
            delta = (shrunk * resident.scale) @ resident.b[0].float()
            y[rows] = (y[rows].float() + delta).to(y.dtype)


DENSE_BACKENDS["torch"] = TorchBackend
