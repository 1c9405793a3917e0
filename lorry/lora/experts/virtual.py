"""Virtual experts in plain torch: one sort of the (row, choice) pairs by expert and then slot serves all products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.lora.arena import Arena, ResidentSite
from lorry.lora.batch import LoRABatchInfo
from lorry.lora.experts.base import EXPERTS_BACKENDS, ExpertsLayer, add_expert_lora
from lorry.types import BASE_SLOT


@dataclass(frozen=True)
class _Run:
    """Consecutive sorted pairs [start, stop) of one virtual expert (slot, expert)."""

    expert: int
    slot: int
    start: int
    stop: int


def sort_pairs(top_k_index: Tensor, token_slots: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the T * K pairs by expert and within an expert by slot (base first), stably.

    Returns the pair numbers in that order [P] (pair p is choice p % K of row p // K), and the sort keys in that
    order [P]: expert * stride + slot + 1 with stride larger than any slot + 1. Pairs whose expert is not in
    0 .. num_experts - 1 are left out.
    """
    num_choices = top_k_index.shape[1]
    experts = top_k_index.flatten().long()
    slots = experts.new_full((1,), BASE_SLOT) if token_slots is None else token_slots.long()
    slots = slots.repeat_interleave(num_choices) if token_slots is not None else slots.expand(len(experts))
    keys = experts * slot_stride(token_slots) + slots + 1
    keys = torch.where((experts >= 0) & (experts < num_experts), keys, torch.iinfo(torch.int64).max)
    keys, pairs = torch.sort(keys, stable=True)
    valid = keys != torch.iinfo(torch.int64).max
    return pairs[valid], keys[valid]


def slot_stride(token_slots: Tensor | None) -> int:
    """Number of virtual experts of one expert: the slots from 0 to the largest of the step, and the base."""
    return 1 if token_slots is None else int(token_slots.max()) + 2


class VirtualExperts:
    """Base product once per expert over all its rows; LoRA once per virtual expert over that part of the rows."""

    name = "virtual"

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
        num_tokens, num_choices = top_k_index.shape
        slots = None if info is None else info.token_slots
        pairs, keys = sort_pairs(top_k_index, slots, layer.num_experts)
        x = hidden[pairs // num_choices]
        out = hidden.new_zeros(num_tokens * num_choices, hidden.shape[1], dtype=torch.float32)
        for expert, runs in _group(keys, slot_stride(slots)).items():
            start, stop = runs[0].start, runs[-1].stop
            out[pairs[start:stop]] = self._one_expert(layer, x[start:stop], expert, runs).float()
        weights = top_k_weights.float()[..., None]
        return (out.view(num_tokens, num_choices, -1) * weights).sum(dim=1).to(hidden.dtype)

    def _one_expert(self, layer: ExpertsLayer, x: Tensor, expert: int, runs: list[_Run]) -> Tensor:
        first = layer.first_product(x, expert)
        gate, up = layer.gate_and_up(first)
        if gate is not None and layer.gate_site is not None:
            self._add(gate, x, layer.gate_site, runs)
        self._add(up, x, layer.up_site, runs)
        activated = layer.activate(first)
        second = layer.second_product(activated, expert)
        self._add(second, activated, layer.down_site, runs)
        return second

    def _add(self, y: Tensor, x: Tensor, site: int, runs: list[_Run]) -> None:
        offset = runs[0].start
        for run in runs:
            if run.slot != BASE_SLOT:
                rows = slice(run.start - offset, run.stop - offset)
                add_expert_lora(y[rows], x[rows], self._site(site, run.slot), run.expert)

    def _site(self, site: int, slot: int) -> ResidentSite | None:
        assert self._arena is not None, "a step with adapters needs an arena"
        return self._arena.get(site, slot)


def _group(keys: Tensor, stride: int) -> dict[int, list[_Run]]:
    """Runs of equal sorted keys, by expert."""
    values, counts = torch.unique_consecutive(keys, return_counts=True)
    runs: dict[int, list[_Run]] = {}
    start = 0
    for key, count in zip(values.tolist(), counts.tolist(), strict=True):
        expert, slot = key // stride, key % stride - 1
        runs.setdefault(expert, []).append(_Run(expert, slot, start, start + count))
        start += count
    return runs


EXPERTS_BACKENDS["virtual"] = VirtualExperts
