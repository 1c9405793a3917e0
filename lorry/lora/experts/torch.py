"""Reference experts backend: expert by expert, and within an expert request by request."""

from __future__ import annotations

import torch
from torch import Tensor

from lorry.lora.arena import Arena, ResidentSite
from lorry.lora.batch import LoRABatchInfo
from lorry.lora.experts.base import EXPERTS_BACKENDS, ExpertsLayer, add_expert_lora
from lorry.types import BASE_SLOT


class TorchExperts:
    """The plainest form of the arithmetic, for comparison: no sort, no shared grouping."""

    name = "torch"

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena

    def forward(
        self,
        layer: ExpertsLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        info: LoRABatchInfo | None,
    ) -> Tensor:
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in range(layer.num_experts):
            tokens, choice = torch.where(top_k_index == expert)
            if not len(tokens):
                continue
            x = hidden[tokens]
            first = layer.first_product(x, expert)
            gate, up = layer.gate_and_up(first)
            if gate is not None and layer.gate_site is not None:
                self._add_by_request(gate, x, tokens, layer.gate_site, expert, info)
            self._add_by_request(up, x, tokens, layer.up_site, expert, info)
            activated = layer.activate(first)
            second = layer.second_product(activated, expert)
            self._add_by_request(second, activated, tokens, layer.down_site, expert, info)
            weighted = second.float() * top_k_weights[tokens, choice, None].float()
            out.index_add_(0, tokens, weighted)
        return out.to(hidden.dtype)

    def _add_by_request(
        self, y: Tensor, x: Tensor, tokens: Tensor, site: int, expert: int, info: LoRABatchInfo | None
    ) -> None:
        if info is None or self._arena is None:
            return
        indptr, slots = (t.tolist() for t in info.requests)
        for i, slot in enumerate(slots):
            resident: ResidentSite | None = None if slot == BASE_SLOT else self._arena.get(site, slot)
            rows = torch.where((tokens >= indptr[i]) & (tokens < indptr[i + 1]))[0]
            if resident is not None and len(rows):
                part = y[rows]
                add_expert_lora(part, x[rows], resident, expert)
                y[rows] = part


EXPERTS_BACKENDS["torch"] = TorchExperts
