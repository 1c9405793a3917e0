"""An adapter's validated weights: plain tensors by site, immutable, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class SiteWeights:
    """LoRA of one site: y += scale * (x a^T) b, for expert e with a[e], b[e].

    `a` is [num_experts, rank, in_features] and `b` is [num_experts, rank, out_features] (B transposed: rank rows);
    sites that are no experts have num_experts 1, and so has a factor that all experts share, which is stored once.
    Both are contiguous, in the dtype in which the device computes.
    Two sites may hold the same `a` object (one A for gate and up): it is then stored once.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True)
class AdapterWeights:
    """All weights of one adapter, by site index (see `models.sites.Site.index`), and what its config says."""

    sites: dict[int, SiteWeights]
    target_modules: tuple[str, ...]
    base_model_name: str | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def rank(self) -> int:
        """The largest rank of any site."""
        return max(site.rank for site in self.sites.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once, in the order of the sites."""
        unique = {id(t): t for _, site in sorted(self.sites.items()) for t in (site.a, site.b)}
        return list(unique.values())

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)
