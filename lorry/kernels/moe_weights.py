"""What the kernels need to know of an experts layer's weights as transformers stores them, and tile choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Gated = Literal["no", "concatenated", "interleaved"]
ActivationKind = Literal["none", "glu", "glu_clamped", "silu", "relu2"]


@dataclass(frozen=True)
class Activation:
    """See `moe_tile.activation` for the formulas; the defaults of alpha and beta make glu a SiLU gate."""

    kind: ActivationKind
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Projection:
    """One product of all experts, as stored: [E, rows, in], or `transposed` [E, in, rows]; bias [E, rows].

    `gated` says whether rows are those of one matrix, gate before up, or gate and up alternating.
    """

    weight: Tensor
    gated: Gated = "no"
    transposed: bool = False
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 2]

    @property
    def num_columns(self) -> int:
        return self.weight.shape[2 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Columns after the activation."""
        return self.num_columns // (1 if self.gated == "no" else 2)

    @property
    def stride_out(self) -> int:
        return self.weight.stride(2 if self.transposed else 1)

    @property
    def stride_in(self) -> int:
        return self.weight.stride(1 if self.transposed else 2)


@dataclass(frozen=True)
class ExpertsWeights:
    """`first` is gate and up (or up alone), `second` is down, in the dtype of the activations."""

    first: Projection
    second: Projection
    activation: Activation

    @property
    def num_experts(self) -> int:
        return self.first.weight.shape[0]


@dataclass(frozen=True)
class Tile:
    """One program: `block_m` pairs by `block_n` output columns, in steps of `block_k`.

    `swap` puts weights on the tensor cores' wide side; `ahead` fetches the first B tile before the main loop;
    `group_slots` slots of rank 16 are expanded at once; `pdl` starts kernels early (CUDA only); `shrink_by_pair`
    shrinks without tensor cores.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    ahead: bool = False
    group_slots: int = 1
    pdl: bool = False
    shrink_by_pair: bool = False


@dataclass(frozen=True)
class PrefillTile:
    """`block_n` columns of W (gate and up together); `persistent` 0: one program a tile, 1: one program an SM that
    walks the tiles, 2: the same with both loops flattened; `ahead` loads the first B before the main loop."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    persistent: int = 2
    ahead: bool = False


@dataclass(frozen=True)
class PrefillPlan:
    """Tiles of the two products, without and with LoRA; a shrink program takes `group_m` rows of one A, in steps of
    `shrink_k`."""

    first: PrefillTile = PrefillTile()
    second: PrefillTile = PrefillTile()
    first_lora: PrefillTile = PrefillTile(persistent=0)
    second_lora: PrefillTile = PrefillTile(num_stages=4, persistent=0, ahead=True)
    group_m: int = 64
    shrink_k: int = 64
    shrink_warps: int = 4
    shrink_stages: int = 4
    num_programs: int = 132


def choose_tile(x: Tensor, weights: ExpertsWeights, num_pairs: int) -> tuple[Tile, Tile]:
    """Tiles of the two products by pairs per expert; measured on an H200 at Qwen3-30B-A3B's shape (see bench)."""
    if x.dtype == torch.float32:
        small = Tile(16, 32, 32, 4, 2)
        return small, small
    per_expert = num_pairs / weights.num_experts
    pair = {"ahead": True, "shrink_by_pair": True}
    if num_pairs <= 16:
        return Tile(16, 64, 64, 4, 6, swap=True, pdl=True, **pair), Tile(
            16, 64, 128, 4, 4, swap=True, pdl=True, **pair
        )
    first = Tile(16, 64, 64, 4, 5, swap=True, group_slots=4, **pair)
    if per_expert < 1:
        return replace(first, group_slots=1, pdl=True), Tile(16, 64, 128, 4, 4, group_slots=2, pdl=True, **pair)
    if per_expert <= 3:
        return replace(first, pdl=True), Tile(16, 128, 128, 4, 3, group_slots=2, pdl=True, **pair)
    if per_expert <= 12:
        by_group = replace(first, pdl=True, shrink_by_pair=False)  # what its shrink leaves idle, the product takes
        return by_group, Tile(16, 128, 128, 4, 3, group_slots=4, **pair)
    if per_expert <= 48:
        return Tile(32, 64, 64, 4, 4, ahead=True, group_slots=2), Tile(32, 128, 64, 4, 4, ahead=True, group_slots=2)
    return Tile(64, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4)
