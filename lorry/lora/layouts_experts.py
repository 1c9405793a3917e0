"""Turns factors that hold all experts of a layer into weights by site: stacked along an axis, or fused by PEFT."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.format import Target, named
from lorry.lora.format_config import GROUPED_BY_EXPERT, AdapterConfig
from lorry.lora.source import PlacedPair, Source
from lorry.lora.weights import SiteWeights
from lorry.models.sites import Site

Orientation = Literal["normal", "swapped"]
"""Whether A of a fused experts parameter lies on its input side, or (older PEFT) on its output side."""


def stacked_weights(source: Source, pair: PlacedPair) -> dict[int, SiteWeights]:
    """All experts of a projection along a first axis, which is 1 for a factor that they share (trainers of SGLang's
    shared outer form: A of gate and up, B of down); gate and up may come as one, their rows of B one after the other.
    """
    sites = list(pair.target.sites.values())
    num_experts, inner, widths = sites[0].num_experts, sites[0].in_features, [site.out_features for site in sites]
    a, b = source.shape(pair.keys.a), source.shape(pair.keys.b)
    rank = a[1] if len(a) == 3 else 0
    counts = {a[:1], b[:1]} <= {(1,), (num_experts,)}
    if rank < 1 or not counts or a[1:] != (rank, inner) or b[1:] != (sum(widths), rank):
        raise AdapterMismatch(
            f"module {pair.keys.path!r} has lora_A {a} and lora_B {b}, but the base model needs lora_A "
            f"({num_experts}, rank, {inner}) and lora_B ({num_experts}, {sum(widths)}, rank), with a first size of 1 "
            "where all experts share the factor"
        )
    if len(sites) == 2 and sites[0].interleaved:
        raise AdapterFormatError(
            f"module {pair.keys.path!r} holds gate and up in one, whose order is not known for this base model: "
            "save gate_proj and up_proj apart"
        )
    names = list(dict.fromkeys((pair.keys.path, *(site.name for site in sites))))
    if source.config.claimed_rank(names) not in (None, rank):
        source.other_ranks.append(pair.keys.path)
    whole_a, whole_b, scale = source.cast(pair.keys.a), source.cast(pair.keys.b), source.scale(pair, names, rank)
    weights, first = {}, 0
    for site in sites:
        rows = whole_b[:, first : first + site.out_features]
        weights[site.index] = SiteWeights(whole_a, rows.transpose(1, 2).contiguous(), scale)
        first += site.out_features
    return weights


# Fused experts: PEFT adapts a whole parameter [experts, ., .] with two matrices, and the keys do not name it.


def _parameters(target: Target) -> dict[str, list[Site]]:
    """The adaptable parameters of an experts module, in the order in which the module declares them."""
    sites = target.sites
    first = ["gate_proj", "up_proj"] if "gate_proj" in sites else ["up_proj"]
    return {
        "gate_up_proj" if len(first) == 2 else "up_proj": [sites[projection] for projection in first],
        "down_proj": [sites["down_proj"]],
    }


def fused_parameters(config: AdapterConfig, group: Sequence[PlacedPair]) -> dict[tuple[str, str], PlacedPair]:
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


def seen_orientations(source: Source, parameters: Sequence[tuple[tuple[str, str], PlacedPair]]) -> set[Orientation]:
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


def fused_weights(source: Source, pair: PlacedPair, parameter: str, seen: set[Orientation]) -> dict[int, SiteWeights]:
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
