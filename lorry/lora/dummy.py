"""Adapters of random weights, made on the device: for benchmarks, and to measure what a step with adapters needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from lorry.errors import ConfigError
from lorry.lora.adapter import target_name
from lorry.lora.packed import aligned
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.hooks import find_attention
from lorry.models.sites import Site
from lorry.types import AdapterInfo, AdapterUid

SPREAD = 0.02
"""Standard deviation of A and of B."""


@dataclass(frozen=True)
class DummyAdapter:
    """A random adapter that is on the device already."""

    name: str
    slot: int
    rank: int
    num_bytes: int
    target_modules: tuple[str, ...]

    def info(self, uid: AdapterUid) -> AdapterInfo:
        """The adapter as users see it."""
        return AdapterInfo(
            name=self.name,
            uid=uid,
            path="random weights",
            rank=self.rank,
            num_bytes=self.num_bytes,
            target_modules=self.target_modules,
        )


def dummy_sites(model: nn.Module, sites: Sequence[Site], target_modules: Collection[str] | None) -> list[Site]:
    """Sites of a dummy adapter: all projections of attention and all experts, or those that are named."""
    if target_modules is not None:
        chosen = [site for site in sites if target_name(site) in target_modules]
    else:
        paths = tuple(f"{path}." for path in find_attention(model))
        chosen = [s for s in sites if s.kind == "experts" or (s.kind == "linear" and s.module.startswith(paths))]
    if not chosen:
        raise ConfigError(
            f"--lora-target-modules {' '.join(sorted(target_modules or ()))} leaves dummy adapters nothing to adapt; "
            f"the model has {' '.join(sorted({target_name(site) for site in sites}))}"
        )
    return chosen


def dummy_bytes(sites: Sequence[Site], rank: int, dtype: torch.dtype) -> int:
    """Bytes of the arena that one dummy adapter takes."""
    widths = [site.num_experts * width for site in sites for width in (site.in_features, site.out_features)]
    return sum(aligned(rank * width) for width in widths) * dtype.itemsize


def random_weights(
    sites: Sequence[Site], rank: int, dtype: torch.dtype, device: torch.device, seed: int
) -> AdapterWeights:
    """A and B normal(0, 0.02), scale 1, at every site; equal seeds give equal weights on equal devices."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(site: Site, width: int) -> Tensor:
        factor = torch.empty(site.num_experts, rank, width, dtype=dtype, device=device)
        return factor.normal_(0.0, SPREAD, generator=generator)

    weights = {s.index: SiteWeights(normal(s, s.in_features), normal(s, s.out_features), 1.0) for s in sites}
    return AdapterWeights(weights, tuple(dict.fromkeys(target_name(site) for site in sites)))


def zero_weights(sites: Sequence[Site], rank: int, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """Touches every site and takes next to no memory: factors of one shape are one tensor."""

    @cache
    def zeros(num_experts: int, width: int) -> Tensor:
        return torch.zeros(num_experts, rank, width, dtype=dtype, device=device)

    weights = {
        s.index: SiteWeights(zeros(s.num_experts, s.in_features), zeros(s.num_experts, s.out_features), 1.0)
        for s in sites
    }
    return AdapterWeights(weights, ())
