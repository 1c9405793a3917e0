"""Turns the tensors of an adapter file into weights by site: plain modules, one expert at a time, all experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.layouts_experts import fused_parameters, fused_weights, seen_orientations, stacked_weights
from lorry.lora.source import PlacedPair, Source
from lorry.lora.weights import SiteWeights
from lorry.models.sites import Site


def build_sites(source: Source, pairs: Sequence[PlacedPair]) -> dict[int, SiteWeights]:
    """The weights of all pairs by site index, built in the order of the sites."""
    plain: dict[int, list[PlacedPair]] = {}
    stacked: list[PlacedPair] = []
    fused: dict[str, list[PlacedPair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.target.site.index, pair.target.expert or 0)):
        if pair.target.is_fused:
            fused.setdefault(pair.target.module, []).append(pair)
        elif pair.keys.depth:
            raise AdapterFormatError(f"tensor {pair.keys.a!r} is below a base_layer: only fused experts may be")
        elif pair.target.stacked:
            stacked.append(pair)
        else:
            plain.setdefault(pair.target.site.index, []).append(pair)
    weights: dict[int, SiteWeights] = {}
    for index, group in plain.items():
        experts = group[0].target.expert is not None
        weights[index] = _expert_weights(source, group) if experts else _module_weights(source, group)
    parameters = [
        parameter for group in fused.values() for parameter in fused_parameters(source.config, group).items()
    ]
    seen = seen_orientations(source, parameters)
    of_all_experts = [(pair, stacked_weights(source, pair)) for pair in stacked]
    of_all_experts += [(pair, fused_weights(source, pair, parameter, seen)) for (parameter, _), pair in parameters]
    for pair, found in of_all_experts:
        if any(index in weights for index in found):
            raise AdapterFormatError(
                f"module {pair.keys.path!r} has a pair for all experts beside other pairs for them: keep one form"
            )
        weights |= found
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
