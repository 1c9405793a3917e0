"""The tensors of the paged KV pool, one pair for each attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.config import PAGE_SIZE


@dataclass(frozen=True)
class KVShape:
    """Heads and head widths of one attention layer, as its keys and values arrive (MLA: already expanded)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True)
class LayerKV:
    """Keys [num_pages * PAGE_SIZE, num_kv_heads, key_dim] and values (likewise, value_dim) of one layer.

    Row `page * PAGE_SIZE + i` holds token i of the page.
    """

    keys: Tensor
    values: Tensor


def allocate_kv(
    shapes: Mapping[str, KVShape], num_pages: int, dtype: torch.dtype, device: torch.device
) -> dict[str, LayerKV]:
    """A pool for each attention module, by its path. Memory is not touched, hence not yet resident on a CPU."""
    rows = num_pages * PAGE_SIZE

    def empty(heads: int, dim: int) -> Tensor:
        return torch.empty(rows, heads, dim, dtype=dtype, device=device)

    return {
        path: LayerKV(empty(s.num_kv_heads, s.key_dim), empty(s.num_kv_heads, s.value_dim))
        for path, s in shapes.items()
    }


def grow_kv(pool: Mapping[str, LayerKV], num_pages: int) -> None:
    """Make a pool hold `num_pages`, in place: whoever holds its tensors sees the new size. Addresses change."""
    for kv in pool.values():
        for tensor in (kv.keys, kv.values):
            tensor.resize_(num_pages * PAGE_SIZE, *tensor.shape[1:])
