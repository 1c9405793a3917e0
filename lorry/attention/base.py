"""What an attention backend is given and what it must do."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lorry.errors import ConfigError
from lorry.kv.pool import LayerKV


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences of one packed step. Sequence i owns `query_lens[i]` consecutive rows, the last ones of its context.

    `context_lens[i]` counts all its tokens including these rows; `pages[i]` lists the pool pages that hold them;
    `write_slots` [T] (int64, on the device) is the pool row of each packed row.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    write_slots: Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """A step of decodes, one row for each sequence, all on the device: what a captured graph reads.

    `pages` [B, max_pages] int32, `context_lens` [B] int32 (0: padding), `write_slots` [B] int64 (-1: padding).
    """

    pages: Tensor
    context_lens: Tensor
    write_slots: Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """A step of any chunks for a captured graph. Sequence i owns `query_lens[i]` rows, the last ones of its context.

    `pages` [S, max_pages] int32 has the pages of sequence i in row i, `write_slots` [T] (-1: padding) the pool row of
    each packed row; both are on the device, at fixed addresses, and made for any step: of at most S sequences and T
    rows. Rows behind those of the sequences are padding.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    pages: Tensor
    write_slots: Tensor


@dataclass(frozen=True)
class AttentionParams:
    """What a layer asks for beside q, k, v. `sinks` [num_heads] are logits that take part in the softmax only."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Causal attention of packed rows over paged keys and values; `plan` once per step, `run` once per layer."""

    name: str

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for the layers of one step. Holds until the next call."""
        ...

    @property
    def write_slots(self) -> Tensor:
        """Pool rows (-1: none) of the rows of the plan; on the device."""
        ...

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Write k, v to the pool (None: they are there), then attend.

        q [T, H, key_dim], k [T, Hkv, key_dim], v [T, Hkv, value_dim].
        Rows behind those of the plan are padding: they are written nowhere and their result is arbitrary but finite.
        Returns [T, H, value_dim]. Row t of sequence i sees its context up to its own position, and with a
        `sliding_window` w only the last w of these.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose steps can be captured in a CUDA graph."""

    def reserve(self, max_requests: int, max_rows: int, device: torch.device) -> None:
        """Make room for what `plan_padded` describes; once each layer has seen a step with prefill."""
        ...

    def plan_decode(self, batch: DecodeBatch) -> None:
        """As `plan`, for a step of decodes whose description is on the device already, at fixed addresses."""
        ...

    def plan_padded(self, batch: PaddedBatch) -> None:
        """As `plan`, for a padded step: what the layers read of it is at fixed addresses, of shapes that depend on
        those of `pages` and `write_slots` alone. The result of padding rows is zero."""
        ...


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {}
"""Name -> constructor; each backend's module adds itself."""


_MODULES = ("torch", "triton")


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; `auto` is `triton` on CUDA and `torch`, which runs everywhere, elsewhere."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "torch"
    if name not in _MODULES:
        raise ConfigError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(_MODULES)}")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention backend 'triton' needs a CUDA device; use --attention-backend torch, or auto")
    importlib.import_module(f"lorry.attention.{name}")
    return ATTENTION_BACKENDS[name]()
