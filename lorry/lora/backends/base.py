"""The interface of a dense LoRA backend and the registry of those there are."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lorry.errors import ConfigError
from lorry.lora.arena import Arena
from lorry.lora.batch import LoRABatchInfo, RequestRouting

if TYPE_CHECKING:
    from lorry.kernels.dense_fused import GroupLoRA

_log = logging.getLogger(__name__)


class DenseBackend(Protocol):
    """y += scale * (x A^T) B^T for each row's own adapter; rows of the base are not touched."""

    name: str
    max_rank: int | None
    """The largest rank it can serve; None: any."""

    def init_cuda_graph_batch_info(self, max_bs: int, max_tokens: int) -> None:
        """Allocate the fixed buffers of padded steps of so many requests and rows, before any graph is captured.

        Called again for larger steps: each step uses the smallest buffers that hold it.
        `ConfigError` where the backend cannot be captured.
        """
        ...

    def prepare_lora_batch(self, routing: RequestRouting, num_padded_tokens: int | None = None) -> LoRABatchInfo:
        """Segment the rows of one step; called once per step, outside of any graph. Never synchronises with a GPU.

        Rows and requests are padded to `num_padded_tokens`, with slot -1. Where `init_cuda_graph_batch_info` has
        reserved so many rows, everything is in fixed buffers, which a later such call overwrites, requests are
        padded to at most `max_bs`, and shapes depend on `num_padded_tokens` alone. Call on the stream of the step.
        """
        ...

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[int, ...], info: LoRABatchInfo) -> None:
        """Add LoRA of one to three sites that read the same x, in place; products are accumulated in float32.

        x [T, in]; y [T, sum of the sites' out], their columns one after another; rows may be strided.
        """
        ...

    def group_lora(self, sites: tuple[int, ...], info: LoRABatchInfo) -> GroupLoRA | None:
        """LoRA of the sites for `kernels.dense_fused`, or None where the backend does not work by segments."""
        ...


DENSE_BACKENDS: dict[str, Callable[[Arena, torch.device], DenseBackend]] = {}
"""Name -> constructor; each backend's module adds itself."""

_MODULES = ("torch", "triton", "csgmv")


def make_dense_backend(name: str, arena: Arena, device: torch.device) -> DenseBackend:
    """The backend of that name; `auto` is `csgmv` on CUDA and `torch` elsewhere.

    `ConfigError` for a name that is unknown or cannot run on the device.
    """
    if name == "auto":
        obstacle = _obstacle("csgmv", device)
        name = "csgmv" if obstacle is None and device.type == "cuda" else "torch"
        _log.info("LoRA backend auto is %s (%s)", name, obstacle or f"on {device.type}")
    if name not in _MODULES:
        raise ConfigError(f"LoRA backend {name!r} is unknown; there are: auto, {', '.join(_MODULES)}")
    obstacle = _obstacle(name, device)
    if obstacle is not None:
        raise ConfigError(f"LoRA backend {name!r} cannot run: {obstacle}; use --lora-backend torch, or auto")
    importlib.import_module(f"lorry.lora.backends.{name}")
    return DENSE_BACKENDS[name](arena, device)


def _obstacle(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run here, or None."""
    if name == "torch":
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels need a CUDA device, not {device.type} (or TRITON_INTERPRET=1, for tests)"
    return None
