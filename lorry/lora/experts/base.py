"""The interface of an experts backend, the layer it is given, and the registry of those there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lorry.errors import ConfigError
from lorry.lora.arena import Arena, ResidentSite
from lorry.lora.batch import LoRABatchInfo
from lorry.models.sites import Site

_INVARIANT_ROWS = 12
"""From so many rows up a float32 product on a CPU gives each row the same bits whatever the number of rows."""


@dataclass(frozen=True)
class ExpertsLayer:
    """One experts module of transformers and the numbers of its LoRA sites (`gate_site` None: experts ungated)."""

    module: Any
    num_experts: int
    gate_site: int | None
    up_site: int
    down_site: int

    @classmethod
    def of(cls, module: nn.Module, sites: list[Site]) -> ExpertsLayer:
        """From an experts module and its own sites."""
        index = {site.leaf: site.index for site in sites}
        return cls(module, sites[0].num_experts, index.get("gate_proj"), index["up_proj"], index["down_proj"])

    def first_product(self, x: Tensor, expert: int) -> Tensor:
        """x [n, H] -> gate and up [n, 2I] in the base's own order of columns (ungated: [n, I])."""
        name = "gate_up_proj" if self.module.has_gate else "up_proj"
        return self._product(x, expert, name)

    def second_product(self, x: Tensor, expert: int) -> Tensor:
        """x [n, I] -> [n, H]."""
        return self._product(x, expert, "down_proj")

    def activate(self, hidden: Tensor) -> Tensor:
        """Gate and up [n, 2I] -> [n, I], the base's own activation."""
        module = self.module
        activated: Tensor = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        return activated

    def gate_and_up(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Views of the gate and up columns of a first product, where the LoRA of each is added."""
        if not self.module.has_gate:
            return None, hidden
        if self.module.is_concatenated:
            gate, up = hidden.chunk(2, dim=-1)
            return gate, up
        return hidden[:, ::2], hidden[:, 1::2]

    def _product(self, x: Tensor, expert: int, name: str) -> Tensor:
        weight = getattr(self.module, name)[expert]
        bias = getattr(self.module, f"{name}_bias")[expert] if self.module.has_bias else None
        if self.module.is_transposed:
            weight = weight.T
        rows = x.shape[0]
        if x.dtype == torch.float32 and x.device.type == "cpu" and rows < _INVARIANT_ROWS:
            x = pad(x, (0, 0, 0, _INVARIANT_ROWS - rows))
        return linear(x, weight, bias)[:rows]


def add_expert_lora(y: Tensor, x: Tensor, site: ResidentSite | None, expert: int) -> None:
    """y += scale * (x a^T) b of one expert, in place, accumulated in float32: y [n, out], x [n, in]."""
    if site is not None:
        delta = (x.float() @ site.a[expert].float().T * site.scale) @ site.b[expert].float()
        y.copy_((y.float() + delta).to(y.dtype))


class ExpertsBackend(Protocol):
    """The whole of a layer's experts: base products, LoRA before activation and before the routing weight."""

    name: str

    def forward(
        self,
        layer: ExpertsLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        info: LoRABatchInfo | None,
    ) -> Tensor:
        """hidden [T, H], top_k_index [T, K] (-1 or num_experts: an expert that lives elsewhere, adds nothing),
        top_k_weights [T, K] -> [T, H]. `info` None: a step without adapters."""
        ...


EXPERTS_BACKENDS: dict[str, Callable[[Arena | None], ExpertsBackend]] = {}
"""Name -> constructor; each backend's module adds itself."""


def make_experts_backend(use_virtual_experts: bool, arena: Arena | None) -> ExpertsBackend:
    """`virtual` where virtual experts are asked for, else `torch`; without an arena both serve the base alone."""
    import lorry.lora.experts.torch
    import lorry.lora.experts.virtual  # noqa: F401  (both register themselves)

    name = "virtual" if use_virtual_experts else "torch"
    if name not in EXPERTS_BACKENDS:
        raise ConfigError(f"experts backend {name!r} is unknown; there are: {', '.join(sorted(EXPERTS_BACKENDS))}")
    return EXPERTS_BACKENDS[name](arena)
