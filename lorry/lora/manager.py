"""Ties LoRA together for one model: arena, dense backend, experts backend, and the routing of the current step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lorry.errors import AdapterCapacity
from lorry.lora.arena import Arena
from lorry.lora.backends.base import make_dense_backend
from lorry.lora.batch import LoRABatchInfo, RequestRouting
from lorry.lora.experts.base import ExpertsLayer, make_experts_backend
from lorry.lora.weights import AdapterWeights
from lorry.models.hooks import ExpertsHook
from lorry.models.sites import Site, SiteKind, find_experts

if TYPE_CHECKING:
    from lorry.kernels.dense_fused import GroupLoRA

Variant = Literal["base", "linear", "experts", "all"]
"""Which LoRA a captured step launches: none, that of linear layers, that of experts too, that of routers too."""

_LAUNCHED: dict[Variant, frozenset[SiteKind]] = {
    "base": frozenset(),
    "linear": frozenset(("linear",)),
    "experts": frozenset(("linear", "experts")),
    "all": frozenset(("linear", "experts", "router")),
}


class LoRAManager:
    """Holds adapters on the device by slot and applies them, each row its own.

    With `arena` None the model is served without LoRA; its experts still go through the experts backend.
    """

    def __init__(
        self, arena: Arena | None, lora_backend: str, use_virtual_experts: bool, device: torch.device
    ) -> None:
        self.arena = arena
        self.dense = make_dense_backend(lora_backend, arena, device) if arena is not None else None
        self.experts = make_experts_backend(use_virtual_experts, arena, device)
        self.batch: LoRABatchInfo | None = None
        self.variant: Variant = "base"
        self._capturing = False

    def bind_experts(self, model: nn.Module, sites: Sequence[Site]) -> None:
        """Make every experts module of the model call the experts backend."""

        def bound(layer: ExpertsLayer) -> ExpertsHook:
            def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
                info = self.batch if "experts" in _LAUNCHED[self.variant] else None
                return self.experts.forward(layer, hidden, top_k_index, top_k_weights, info)

            return forward

        for path, module in find_experts(model).items():
            own = [site for site in sites if site.module == path]
            module.lorry_experts = bound(ExpertsLayer.of(module, own))

    def load(self, weights: AdapterWeights) -> int:
        """Put an adapter on the device; returns its slot. `AdapterCapacity` where it does not fit or cannot run."""
        assert self.arena is not None
        self.check_rank(weights.rank)
        return self.arena.allocate(weights)

    def check_rank(self, rank: int) -> None:
        """`AdapterCapacity` where adapters of this rank cannot run."""
        assert self.dense is not None
        limit = self.dense.max_rank
        if limit is not None and rank > limit:
            raise AdapterCapacity(
                f"rank {rank} is above {limit}, the largest of LoRA backend {self.dense.name!r}: "
                "start with --lora-backend torch to serve it"
            )

    def unload(self, slot: int) -> None:
        """Free a slot that no running request uses."""
        assert self.arena is not None
        self.arena.release(slot)

    def prepare_lora_batch(self, routing: RequestRouting, num_padded_tokens: int | None = None) -> None:
        """Set the routing of the next forward; a step of base rows only does no LoRA work at all.

        `num_padded_tokens`: the next forward is the replay of the `variant`'s graph for so many rows.
        """
        slots = routing.adapter_slots
        if self.arena is None or self.dense is None or not slots:
            self.batch, self.variant = None, "base"
        else:
            kinds = self.arena.kinds(slots)
            self.variant = next(variant for variant, launched in _LAUNCHED.items() if kinds <= launched)
            self.batch = self.dense.prepare_lora_batch(routing, num_padded_tokens)

    def init_cuda_graphs(self, max_requests: int, max_rows: int) -> list[Variant]:
        """Allocate what captured steps read; the variants of a step that are to be captured."""
        if self.arena is None or self.dense is None:
            return ["base"]
        self.dense.init_cuda_graph_batch_info(max_requests, max_requests)  # decodes, without room for other steps
        self.dense.init_cuda_graph_batch_info(max_requests, max_rows)
        kinds = {site.kind for site in self.arena.sites}
        return [variant for variant, launched in _LAUNCHED.items() if launched <= kinds]

    def prepare_capture(self, num_tokens: int, variant: Variant) -> None:
        """Set up the capture of a step of `num_tokens` rows, all of them padding.

        Every site of the variant is launched, whatever is resident now: the kernels find out in the tables.
        """
        self._capturing, self.variant = variant != "base", variant
        nothing = RequestRouting((), ())
        self.batch = self.dense.prepare_lora_batch(nothing, num_tokens) if self.dense and self._capturing else None

    def end_capture(self) -> None:
        """Back to steps of their own."""
        self._capturing, self.variant = False, "base"
        self.batch = None

    def applies_to(self, *sites: int) -> bool:
        """Whether any adapter of this step has weights at any of the sites."""
        if self.batch is None or self.arena is None:
            return False
        if self._capturing:
            return any(self.arena.sites[site].kind in _LAUNCHED[self.variant] for site in sites)
        return any(self.arena.touches(site, self.batch.slots) for site in sites)

    def add_lora(self, y: Tensor, x: Tensor, *sites: int) -> None:
        """Add this step's LoRA of one to three sites that read the same x, in place.

        x [..., in], y [..., sum of the sites' out], with one row for each token.
        """
        assert self.batch is not None
        assert self.dense is not None
        self.dense.add_lora(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), sites, self.batch)

    def group_lora(self, *sites: int) -> GroupLoRA | None:
        """What fused kernels need to add this step's LoRA of the sites; None where there is nothing to add, or where
        the dense backend has no such kernels and `add_lora` must do it."""
        if self.dense is None or self.batch is None or not self.applies_to(*sites):
            return None
        return self.dense.group_lora(sites, self.batch)
