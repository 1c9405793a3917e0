"""Experts backends in Triton: `fused` (LoRA inside the products) and `merged` (the stand-alone add over products)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.kernels.moe import fused_experts, grouped_product, sum_choices
from lorry.kernels.moe_plan import LoRASites
from lorry.kernels.moe_shrink import merged_experts_fused_moe_lora_add
from lorry.kernels.moe_sort import sort_pairs
from lorry.kernels.moe_weights import Activation, ExpertsWeights, Gated, Projection, choose_tile
from lorry.kernels.tables import MAX_RANK
from lorry.lora.arena import Arena
from lorry.lora.batch import LoRABatchInfo
from lorry.lora.experts.activation import find_activation
from lorry.lora.experts.base import EXPERTS_BACKENDS, ExpertsLayer


@dataclass(frozen=True)
class _Layer:
    """A layer's weights as the kernels take them; without an activation the kernels have it is applied by torch."""

    weights: ExpertsWeights
    has_activation: bool


def _describe(layer: ExpertsLayer) -> _Layer:
    module = layer.module
    gated: Gated = "no"
    if module.has_gate:
        gated = "concatenated" if module.is_concatenated else "interleaved"
    name = "gate_up_proj" if module.has_gate else "up_proj"

    def projection(name: str, gated: Gated) -> Projection:
        bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
        return Projection(getattr(module, name).detach(), gated, bool(module.is_transposed), bias)

    activation = find_activation(layer)
    weights = ExpertsWeights(projection(name, gated), projection("down_proj", "no"), activation or Activation("none"))
    return _Layer(weights, activation is not None)


class TritonExperts:
    """What both backends share: descriptions of layers, and the LoRA of a step at a layer."""

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        self._layers: dict[int, tuple[ExpertsLayer, _Layer]] = {}

    def _layer(self, layer: ExpertsLayer) -> _Layer:
        """Described once for each layer, on the host alone: its first forward may be inside a graph capture."""
        known = self._layers.get(id(layer))
        if known is None:
            known = (layer, _describe(layer))
            self._layers[id(layer)] = known
        return known[1]

    def _lora(self, layer: ExpertsLayer, info: LoRABatchInfo | None) -> LoRASites | None:
        """None where the step has no adapter or, in an eager step, none of its adapters touches the layer.

        A graph serves adapters that are loaded after its capture, so there (and in every step of a graph's fixed
        size) the kernels stay in, with room for any rank, and read from the tables whether there is work.
        """
        if info is None or self._arena is None:
            return None
        first = (layer.up_site,) if layer.gate_site is None else (layer.gate_site, layer.up_site)
        max_rank = MAX_RANK
        if not (info.fixed or _is_capturing(info.token_slots)):
            sites = (*first, layer.down_site)
            max_rank = max((self._rank(site, slot) for site in sites for slot in info.slots), default=0)
        if max_rank == 0:
            return None
        return LoRASites(self._arena.tables, info.token_slots, first, layer.down_site, max_rank)

    def _rank(self, site: int, slot: int) -> int:
        assert self._arena is not None
        resident = self._arena.get(site, slot)
        return 0 if resident is None else resident.a.shape[1]


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class MergedExperts(TritonExperts):
    """Products by the grouped kernel, LoRA added to their results, activation by the module itself: serves any."""

    name = "merged"

    def forward(
        self,
        layer: ExpertsLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        info: LoRABatchInfo | None,
    ) -> Tensor:
        return self._forward(layer, hidden, top_k_index.contiguous(), top_k_weights, self._lora(layer, info))

    def _forward(
        self, layer: ExpertsLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: LoRASites | None
    ) -> Tensor:
        if not len(hidden):
            return torch.empty_like(hidden)
        weights = self._layer(layer).weights
        tile, other_tile = choose_tile(hidden, weights, top_k_index.numel())
        slots = None if lora is None else lora.token_slots
        num_slots = 0 if lora is None else lora.tables.num_slots
        order = sort_pairs(top_k_index, slots, num_slots, weights.num_experts, tile.block_m)
        plain, none = weights.first, Activation("none")
        first = Projection(plain.weight, "no", plain.transposed, plain.bias)
        gate_up = grouped_product(hidden.contiguous(), first, none, order, tile)

        def add(y: Tensor, x: Tensor, sites: tuple[int, ...]) -> None:
            if lora is not None:
                merged_experts_fused_moe_lora_add(
                    y, x, top_k_index, lora.token_slots, lora.tables, sites, weights.num_experts, lora.max_rank,
                    interleaved=plain.gated == "interleaved", order=order,
                )  # fmt: skip

        add(gate_up, hidden, lora.first if lora else ())
        activated = layer.activate(gate_up).contiguous()
        down = grouped_product(activated, weights.second, none, order, other_tile)
        add(down, activated, (layer.down_site,))
        return sum_choices(down, top_k_index, weights.num_experts, top_k_weights.contiguous())


class FusedExperts(MergedExperts):
    """LoRA inside the grouped products; a layer whose activation has no kernel is served as `merged` serves it."""

    name = "fused"

    def _forward(
        self, layer: ExpertsLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: LoRASites | None
    ) -> Tensor:
        known = self._layer(layer)
        if not known.has_activation:
            return super()._forward(layer, hidden, top_k_index, top_k_weights, lora)
        return fused_experts(hidden.contiguous(), top_k_index, top_k_weights.contiguous(), known.weights, lora)


EXPERTS_BACKENDS["merged"] = MergedExperts
EXPERTS_BACKENDS["fused"] = FusedExperts
