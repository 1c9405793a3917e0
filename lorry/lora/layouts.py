"""Turns the tensors of an adapter file into weights by site: plain modules, one expert at a time, fused experts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.format import FactorKeys, Target, named
from lorry.lora.format_config import GROUPED_BY_EXPERT, AdapterConfig
from lorry.lora.weights import SiteWeights
from lorry.models.sites import Site

FILE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Orientation = Literal["normal", "swapped"]
"""Whether A of a fused experts parameter lies on its input side, or (older PEFT) on its output side."""


@dataclass(frozen=True)
class PlacedPair:
    """A pair of factors and what it adapts."""

    keys: FactorKeys
    target: Target

    def names(self, leaf: str = "") -> list[str]:
        """The paths under which patterns may mean this pair: the trainer's and the base model's."""
        tail = f".{leaf}" if leaf else ""
        return list(dict.fromkeys((self.keys.path + tail, self.target.module + tail)))


@dataclass
class Source:
    """The tensors of one adapter, what its config claims, and the dtype that is wanted.

    `other_ranks` collects the expert modules whose rank is not the one that the config claims.
    """

    tensors: Mapping[str, Tensor]
    config: AdapterConfig
    dtype: torch.dtype
    other_ranks: list[str] = field(default_factory=list)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].shape)

    def cast(self, key: str, factor: float = 1.0) -> Tensor:
        """A contiguous copy in the wanted dtype on the host, times `factor`; every number of it is finite."""
        tensor = self.tensors[key].detach()
        if tensor.dtype not in FILE_DTYPES or tensor.layout != torch.strided:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FILE_DTYPES)
            found = f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
            raise AdapterFormatError(f"tensor {key!r} is {found}: save it dense, as one of {known}")
        scaled = tensor if factor == 1.0 else tensor.to(torch.float32) * factor
        result = scaled.to("cpu", self.dtype, copy=True, memory_format=torch.contiguous_format)
        if not torch.isfinite(result).all():
            if not torch.isfinite(tensor).all():
                raise AdapterFormatError(f"tensor {key!r} holds NaN or infinite numbers: the adapter is damaged")
            raise AdapterFormatError(
                f"tensor {key!r} holds numbers too large for {self.dtype}: serve in a wider dtype"
            )
        return result

    def scale(self, pair: PlacedPair, names: Sequence[str], rank: int) -> float:
        key = pair.keys.alpha
        own_alpha = None
        if key is not None:
            tensor = self.tensors[key]
            own_alpha = float(tensor) if tensor.numel() == 1 and not tensor.is_complex() else math.nan
            if not math.isfinite(own_alpha):
                raise AdapterFormatError(f"tensor {key!r} of shape {self.shape(key)} must be one finite number")
        return self.config.scale(names, rank, own_alpha)


def build_sites(source: Source, pairs: Sequence[PlacedPair]) -> dict[int, SiteWeights]:
    """The weights of all pairs by site index, built in the order of the sites."""
    plain: dict[int, list[PlacedPair]] = {}
    fused: dict[str, list[PlacedPair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.target.site.index, pair.target.expert or 0)):
        if pair.target.is_fused:
            fused.setdefault(pair.target.module, []).append(pair)
        else:
            plain.setdefault(pair.target.site.index, []).append(pair)
            if pair.keys.depth:
                raise AdapterFormatError(f"tensor {pair.keys.a!r} is below a base_layer: only fused experts may be")
    weights: dict[int, SiteWeights] = {}
    for index, group in plain.items():
        experts = group[0].target.expert is not None
        weights[index] = _expert_weights(source, group) if experts else _module_weights(source, group)
    parameters = [
        parameter for group in fused.values() for parameter in _fused_parameters(source.config, group).items()
    ]
    seen = _seen_orientations(source, parameters)
    for (parameter, _), pair in parameters:
        for index, site_weights in _fused_weights(source, pair, parameter, seen).items():
            if index in weights:
                raise AdapterFormatError(
                    f"module {pair.keys.path!r} has both a fused pair for all experts and pairs for single ones: "
                    "keep one of the two forms"
                )
            weights[index] = site_weights
    return dict(sorted(weights.items()))


def _checked_rank(source: Source, pair: PlacedPair, site: Site) -> int:
    """Rank of a pair of factors of one matrix; raises `AdapterMismatch` if they do not fit the site."""
    a, b = source.shape(pair.keys.a), source.shape(pair.keys.b)
    rank = a[0] if len(a) == 2 else 0
    if rank < 1 or a != (rank, site.in_features) or b != (site.out_features, rank):
        raise AdapterMismatch(
            f"module {pair.keys.path!r} has lora_A {a} and lora_B {b}, but the base model needs "
            f"lora_A (rank, {site.in_features}) and lora_B ({site.out_features}, rank)"
        )
    return rank


def _module_weights(source: Source, group: Sequence[PlacedPair]) -> SiteWeights:
    pair, config = group[0], source.config
    if len(group) > 1:
        raise AdapterFormatError(
            f"tensors {group[0].keys.a!r} and {group[1].keys.a!r} both adapt {pair.target.module!r}: keep one of them"
        )
    site = pair.target.site
    rank = _checked_rank(source, pair, site)
    declared = any("weight" in config.declared_parameters(path) for path in pair.names())
    names = pair.names("weight" if declared else "")
    claim = config.claimed_rank(names)
    if claim not in (None, rank):
        raise AdapterFormatError(
            f"module {pair.keys.path!r} has rank {rank}, but the config claims {claim} for it, so its scale is "
            "unclear: correct r, or give the module its rank in rank_pattern"
        )
    b = source.cast(pair.keys.b).t().contiguous()
    return SiteWeights(source.cast(pair.keys.a)[None], b[None], source.scale(pair, names, rank))


def _expert_weights(source: Source, group: Sequence[PlacedPair]) -> SiteWeights:
    """Single experts: zeros for those that are missing and behind smaller ranks; one scale, the rest goes into B."""
    site = group[0].target.site
    by_expert: dict[int, PlacedPair] = {}
    for pair in group:
        expert = pair.target.expert
        assert expert is not None
        if expert in by_expert:
            raise AdapterFormatError(
                f"tensors {by_expert[expert].keys.a!r} and {pair.keys.a!r} both adapt expert {expert} of "
                f"{site.name!r}: keep one of them"
            )
        by_expert[expert] = pair
    ranks, scales = {}, {}
    for expert, pair in by_expert.items():
        own = f"{pair.target.module}.{expert}.{site.leaf}"
        names = list(dict.fromkeys((pair.keys.path, own)))
        ranks[expert] = _checked_rank(source, pair, site)
        scales[expert] = source.scale(pair, names, ranks[expert])
        if source.config.claimed_rank(names) not in (None, ranks[expert]):
            source.other_ranks.append(pair.keys.path)
    common = Counter(scale for scale in scales.values() if scale).most_common(1)
    scale = common[0][0] if common else 0.0
    rank = max(ranks.values())
    a = torch.zeros(site.num_experts, rank, site.in_features, dtype=source.dtype)
    b = torch.zeros(site.num_experts, rank, site.out_features, dtype=source.dtype)
    for expert, pair in by_expert.items():
        ratio = scales[expert] / scale if scale else 1.0
        a[expert, : ranks[expert]] = source.cast(pair.keys.a)
        b[expert, : ranks[expert]] = source.cast(pair.keys.b, ratio).t()
    return SiteWeights(a, b, scale)


# Fused experts: PEFT adapts a whole parameter [experts, ., .] with two matrices, and the keys do not name it.


def _parameters(target: Target) -> dict[str, list[Site]]:
    """The adaptable parameters of an experts module, in the order in which the module declares them."""
    sites = target.sites
    first = ["gate_proj", "up_proj"] if "gate_proj" in sites else ["up_proj"]
    return {
        "gate_up_proj" if len(first) == 2 else "up_proj": [sites[projection] for projection in first],
        "down_proj": [sites["down_proj"]],
    }


def _fused_parameters(config: AdapterConfig, group: Sequence[PlacedPair]) -> dict[tuple[str, str], PlacedPair]:
    """(parameter, module) -> its pair, for the one or two wrappers around one experts module."""
    by_depth: dict[int, PlacedPair] = {}
    for pair in group:
        if pair.keys.depth in by_depth:
            other = by_depth[pair.keys.depth].keys.a
            raise AdapterFormatError(f"tensors {other!r} and {pair.keys.a!r} adapt one parameter: keep one of them")
        by_depth[pair.keys.depth] = pair
    pair = group[0]
    path, target = pair.keys.path, pair.target
    known = list(_parameters(target))
    declared = [name for module in pair.names() for name in config.declared_parameters(module)]
    others = sorted(set(declared) - set(known))
    if others or max(by_depth) > 1:
        raise AdapterFormatError(
            f"module {path!r} has adapted parameters other than {' and '.join(known)} "
            f"({named(others) if others else 'there are three or more'}): train without them"
        )
    if 0 not in by_depth:
        raise AdapterFormatError(f"module {path!r} has {by_depth[1].keys.a!r} but no outer lora_A: incomplete file")
    if 1 in by_depth:
        return {(known[0], target.module): by_depth[1], (known[1], target.module): by_depth[0]}
    if len(set(declared)) != 1:
        raise AdapterFormatError(
            f"module {path!r} has one pair, but target_parameters in the config names "
            f"{named(dict.fromkeys(declared)) or 'none'} of its parameters: name the one that was trained"
        )
    return {(declared[0], target.module): pair}


@dataclass(frozen=True)
class _FusedShape:
    """`rank` is that of one expert; `fits` the orientations in which the pair fits the parameter."""

    rank: int
    fits: tuple[Orientation, ...]


def _fused_shape(source: Source, pair: PlacedPair, parameter: str) -> _FusedShape:
    sites = _parameters(pair.target)[parameter]
    num_experts, inner = sites[0].num_experts, sites[0].in_features
    outer = sum(site.out_features for site in sites)
    a, b = source.shape(pair.keys.a), source.shape(pair.keys.b)
    fits: list[Orientation] = []
    if len(a) == 2 and len(b) == 2 and a[0] == b[1] and a[0] > 0 and a[0] % num_experts == 0:
        if (a[1], b[0]) == (inner, outer):
            fits.append("normal")
        if (a[1], b[0]) == (outer, inner):
            fits.append("swapped")
    if not fits:
        raise AdapterMismatch(
            f"module {pair.keys.path!r}, parameter {parameter}, has lora_A {a} and lora_B {b}, but the base model "
            f"needs lora_A ({num_experts} * rank, {inner}) and lora_B ({outer}, {num_experts} * rank)"
        )
    return _FusedShape(a[0] // num_experts, tuple(fits))


def _seen_orientations(source: Source, parameters: Sequence[tuple[tuple[str, str], PlacedPair]]) -> set[Orientation]:
    """The orientations that shapes alone prove; one release of PEFT wrote the whole file."""
    seen: set[Orientation] = set()
    for (parameter, _), pair in parameters:
        fits = _fused_shape(source, pair, parameter).fits
        if len(fits) == 1:
            seen.add(fits[0])
    return seen


def orientation_of(peft_version: str | None, transposed: bool) -> Orientation | None:
    """What a release of PEFT writes for parameters stored [E, out, in] or (transposed) [E, in, out].

    None where that is not known: no version, or a development build around the changes.
    """
    match = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(.*)", peft_version or "")
    if not match:
        return None
    release = (int(match[1]), int(match[2]), int(match[3]))
    if match[4] and (0, 18, 1) <= release <= (0, 19, 2):
        return None
    if transposed:
        return "swapped" if release == (0, 19, 0) else "normal"
    return "swapped" if release <= (0, 19, 0) else "normal"


def _orientation(
    source: Source, pair: PlacedPair, parameter: str, shape: _FusedShape, seen: set[Orientation]
) -> Orientation:
    if len(shape.fits) == 1:
        return shape.fits[0]
    if len(seen) == 1:
        return next(iter(seen))
    version = source.config.peft_version
    known = orientation_of(version, pair.target.site.transposed)
    if known is None or seen:
        raise AdapterFormatError(
            f"module {pair.keys.path!r}, parameter {parameter}, is as wide as it is long: only the release of PEFT "
            f"that wrote it tells how to read it, and the config field peft_version is {version!r}; set it to the "
            "release that trained the adapter"
        )
    return known


def _fused_weights(
    source: Source, pair: PlacedPair, parameter: str, seen: set[Orientation]
) -> dict[int, SiteWeights]:
    """Unfolds A (experts slowest) and B (experts fastest); gate and up share one A and each take their half of B."""
    shape = _fused_shape(source, pair, parameter)
    orientation = _orientation(source, pair, parameter, shape, seen)
    sites = _parameters(pair.target)[parameter]
    num_experts, rank = sites[0].num_experts, shape.rank
    names = pair.names(parameter)
    if source.config.claimed_rank(names) not in (None, rank):
        source.other_ranks.append(names[0])
    a = source.cast(pair.keys.a).reshape(num_experts, rank, -1)
    folded = source.cast(pair.keys.b)
    if source.config.expert_layout(parameter) == GROUPED_BY_EXPERT:
        b = folded.reshape(-1, num_experts, rank).permute(1, 2, 0)
    else:
        b = folded.reshape(-1, rank, num_experts).permute(2, 1, 0)
    if orientation == "swapped":
        a, b = b.contiguous(), a
    scale = source.scale(pair, names, rank)
    if len(sites) == 1:
        return {sites[0].index: SiteWeights(a, b.contiguous(), scale)}
    gate, up = sites
    halves = (
        (b[..., ::2], b[..., 1::2])
        if gate.interleaved
        else (b[..., : gate.out_features], b[..., gate.out_features :])
    )
    return {
        site.index: SiteWeights(a, half.contiguous(), scale) for site, half in zip((gate, up), halves, strict=True)
    }
