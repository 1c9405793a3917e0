"""The models' shapes and the batches that the kernel benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.lora.batch import RequestRouting
from tests.kernels.workloads import Mix, routing

DECODE, PREFILL = (1, 8, 32, 128), (2048, 4096, 8192)
"""Row counts: one row for each request up to `MAX_DECODE`, requests of many rows above."""
MAX_DECODE = 1024
FIRST_SET = (8, 16)
"""Adapters and their rank: what is measured first, and beside the peers."""
SETS = (FIRST_SET, (1, 16), (64, 16), (8, 8), (8, 64))


@dataclass(frozen=True)
class Group:
    """Sibling linears: they read the same rows, and their columns follow one another."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    bias: bool = False


@dataclass(frozen=True)
class Model:
    """What the benchmarks need to know of a model; `inter` is the width of an expert where there are `experts`.

    `oss`: gpt-oss' way: biases, gate and up interleaved, weights transposed, clamped GLU.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    experts: int = 0
    choices: int = 0
    qk_norm: bool = False
    oss: bool = False

    @property
    def groups(self) -> tuple[Group, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (Group("qkv", self.hidden, (q, kv, kv), self.oss), Group("o", q, (self.hidden,), self.oss))
        if self.experts:
            return attention
        mlp = (Group("gate_up", self.hidden, (self.inter,) * 2), Group("down", self.inter, (self.hidden,)))
        return (*attention, *mlp)


MODELS = (
    Model("qwen3-30b-a3b", 2048, 32, 4, 128, 768, experts=128, choices=8, qk_norm=True),
    Model("llama-3.1-8b", 4096, 32, 8, 128, 14336),
    Model("gpt-oss-20b", 2880, 64, 8, 64, 2880, experts=32, choices=4, oss=True),
)


@dataclass(frozen=True)
class Choice:
    """What the command line asks for: rows, mixes of adapters, and packages of peers."""

    rows: tuple[int, ...]
    mixes: tuple[Mix, ...]
    packages: tuple[str, ...]


def sets(adapters: list[int] | None, ranks: list[int] | None) -> tuple[tuple[int, int], ...]:
    """(adapters, rank) to measure: `SETS`, or every pair of those asked for."""
    if adapters is None and ranks is None:
        return SETS
    return tuple((a, r) for a in adapters or FIRST_SET[:1] for r in ranks or FIRST_SET[1:])


def batch(mix: Mix, rows: int, adapters: int) -> RequestRouting:
    """Requests of one row, or for prefill of unequal lengths, long enough for all adapters to be present."""
    return routing(mix, rows, adapters, False, 1 if rows <= MAX_DECODE else rows // max(8, adapters))


def row_slots(requests: RequestRouting, device: torch.device) -> Tensor:
    """The slot of each row [T] int32."""
    lengths, slots = (torch.tensor(values, dtype=torch.int32) for values in (requests.seq_lens, requests.slots))
    return slots.repeat_interleave(lengths).to(device)
