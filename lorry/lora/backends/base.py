"""The interface of a dense LoRA backend and the registry of those there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lorry.errors import ConfigError
from lorry.lora.arena import Arena
from lorry.lora.batch import LoRABatchInfo, RequestRouting


class DenseBackend(Protocol):
    """y += scale * (x A^T) B^T for each row's own adapter; rows of the base are not touched."""

    name: str

    def prepare_lora_batch(self, routing: RequestRouting) -> LoRABatchInfo:
        """Segment the rows of one step; called once per step, only when at least one row has an adapter."""
        ...

    def add_lora(self, y: Tensor, x: Tensor, site: int, info: LoRABatchInfo) -> None:
        """Add LoRA in place: y [T, out], x [T, in]; products are accumulated in float32."""
        ...


DENSE_BACKENDS: dict[str, Callable[[Arena, torch.device], DenseBackend]] = {}
"""Name -> constructor; each backend's module adds itself."""


def make_dense_backend(name: str, arena: Arena, device: torch.device) -> DenseBackend:
    """The backend of that name; `auto` is `torch`, the one that runs everywhere."""
    import lorry.lora.backends.torch  # noqa: F401  (registers itself)

    chosen = "torch" if name == "auto" else name
    if chosen not in DENSE_BACKENDS:
        raise ConfigError(f"LoRA backend {name!r} is unknown; there are: {', '.join(sorted(DENSE_BACKENDS))}")
    return DENSE_BACKENDS[chosen](arena, device)
