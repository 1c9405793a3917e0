"""What an attention backend is given and what it must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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

    def run(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Write k, v to the pool, then attend. q [T, H, key_dim], k [T, Hkv, key_dim], v [T, Hkv, value_dim].

        Returns [T, H, value_dim]. Row t of sequence i sees its context up to its own position, and with a
        `sliding_window` w only the last w of these.
        """
        ...


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {}
"""Name -> constructor; each backend's module adds itself."""


def make_attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; `auto` is `torch`, the one that runs everywhere."""
    import lorry.attention.torch  # noqa: F401  (registers itself)

    chosen = "torch" if name == "auto" else name
    if chosen not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ConfigError(f"attention backend {name!r} is unknown; there are: {known}")
    return ATTENTION_BACKENDS[chosen]()
