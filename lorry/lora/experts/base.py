"""The interface of an experts backend, the layer it is given, and the registry of those there are."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lorry.errors import ConfigError
from lorry.lora.arena import Arena, ResidentSite
from lorry.lora.batch import LoRABatchInfo
from lorry.lora.reference import lora_delta, pad_rows
from lorry.models.sites import Site


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
        return linear(pad_rows(x), weight, bias)[: x.shape[0]]


def add_expert_lora(y: Tensor, x: Tensor, site: ResidentSite | None, expert: int) -> None:
    """y += scale * (x a^T) b of one expert, in place, accumulated in float32: y [n, out], x [n, in]."""
    if site is not None:
        delta = lora_delta(x, site.a[expert], site.b[expert], site.scale)
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

TRITON_BACKENDS = ("fused", "merged")

_MODULES = {"torch": "torch", "virtual": "virtual", "fused": "triton", "merged": "triton"}
"""Name -> module that registers it."""


def has_triton_experts(device: torch.device) -> bool:
    """Whether the Triton backends can run there: on CUDA, or in Triton's interpreter; and Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def choose_experts_backend(use_virtual_experts: bool, device: torch.device) -> str:
    """What `auto` means: on CUDA `fused`, or `merged` without virtual experts; elsewhere `virtual` or `torch`."""
    if device.type == "cuda" and has_triton_experts(device):
        return "fused" if use_virtual_experts else "merged"
    return "virtual" if use_virtual_experts else "torch"


def make_experts_backend(
    use_virtual_experts: bool, arena: Arena | None, device: torch.device | None = None, name: str = "auto"
) -> ExpertsBackend:
    """The backend `name`, or the choice of `auto`; without an arena it serves the base alone.

    `device` is where the model is (default: where the arena is, else CUDA where there is one). `ConfigError` where
    the backend asked for is unknown or cannot run on that device.
    """
    if device is None:
        device = (
            arena.data.device if arena is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    if name == "auto":
        name = choose_experts_backend(use_virtual_experts, device)
    if name not in _MODULES or (name in TRITON_BACKENDS and not has_triton_experts(device)):
        raise ConfigError(
            f"experts backend {name!r} is unknown or cannot run on {device.type}; there are: {', '.join(_MODULES)} "
            f"({' and '.join(TRITON_BACKENDS)} need Triton and CUDA, or TRITON_INTERPRET=1)"
        )
    importlib.import_module(f"lorry.lora.experts.{_MODULES[name]}")
    return EXPERTS_BACKENDS[name](arena)
