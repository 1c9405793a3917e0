"""The key grammar of adapter files: which module and factor a tensor belongs to, and which keys are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.models.sites import Site

Factor = Literal["A", "B", "alpha"]

NUM_NAMED = 4
"""How many keys or modules an error names before it only counts."""

MERGE = "merge the adapter into the base and serve the result, or train it again without"

_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<path>.+?)\.lora_(?P<factor>[AB])(\.[^.]+)?\.weight")
_ALPHA = re.compile(r"(?P<path>.+)\.alpha")
_BASE_LAYERS = re.compile(r"(?P<path>.+?)(?P<wraps>(\.base_layer)+)")

_REFUSED: tuple[tuple[str, str], ...] = (
    (r"\.lora_magnitude_vector(\.|$)", f"DoRA magnitudes are not served: {MERGE} use_dora"),
    (r"\.lora_embedding_[AB](\.|$)", f"LoRA on embeddings is not served: {MERGE} the embedding as a target"),
    (r"(^|\.)trainable_tokens|token_adapter\.", f"trained token rows are not served: {MERGE} them"),
    (r"\.lora_[AB](\.[^.]+)?\.bias$", f"biases on LoRA factors are not served: {MERGE} lora_bias"),
    (r"\.lora_diag(\.|$)", f"KaSA is not served: {MERGE} kasa_config"),
    (r"\.lora_E(\.|$)|\.ranknum(\.|$)", f"AdaLoRA is not served: {MERGE} it, as plain LoRA"),
    (r"\.lora_velora_", f"VeLoRA is not served: {MERGE} velora_config"),
    (r"(^|\.)(embed_tokens|lm_head)\.(lora|alpha)", f"LoRA on the embedding or the head is not served: {MERGE} it"),
    (r"\.lora_[AB]\b", "this is no known LoRA key: save the adapter with PEFT (X.lora_A.weight, X.lora_B.weight)"),
    (r"\.bias$", f"trained biases are not served: {MERGE} bias"),
    (r"\.weight$", f"full weights are not served: {MERGE} modules_to_save"),
    (r"", "this is no known key: save the adapter with PEFT, or remove the tensor if it is not needed"),
)


def named(items: Iterable[str]) -> str:
    """The first few of some names, quoted, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
    return ", ".join(repr(item) for item in listed[:NUM_NAMED]) + more


def natural(key: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 2 before layer 10: files keep no order, and messages should."""
    parts = key.split(".")
    return [(False, int(part), "") if part.isdecimal() and len(part) < 10 else (True, 0, part) for part in parts]


@dataclass(frozen=True)
class ParsedKey:
    """A tensor's place: `path` is the module as the trainer saw it, `depth` the number of wrappers inside it.

    PEFT wraps a module once for each adapted parameter; `base_layer` in the key is one more wrapper inside.
    """

    path: str
    factor: Factor
    depth: int = 0


@dataclass(frozen=True)
class FactorKeys:
    """The keys of one LoRA pair, and of its own alpha where the file has one."""

    path: str
    depth: int
    a: str
    b: str
    alpha: str | None = None


def parse_key(key: str) -> ParsedKey | None:
    """The place of an A, B or alpha tensor, or None for anything else.

    Accepted: any number of `base_model.model.` in front, and an adapter's name behind `lora_A` or `lora_B`.
    """
    stem = key
    while stem.startswith(_PEFT_PREFIX):
        stem = stem.removeprefix(_PEFT_PREFIX)
    factor: Factor = "alpha"
    match = _FACTOR.fullmatch(stem)
    if match:
        factor = "A" if match["factor"] == "A" else "B"
    else:
        match = _ALPHA.fullmatch(stem)
    if not match or match["path"].rpartition(".")[2] in ("embed_tokens", "lm_head"):
        return None
    wrapped = _BASE_LAYERS.fullmatch(match["path"])
    if wrapped:
        return ParsedKey(wrapped["path"], factor, wrapped["wraps"].count(".base_layer"))
    return ParsedKey(match["path"], factor)


def refusals(keys: Iterable[str]) -> list[str]:
    """One line for each kind of key that is not served: the reason, the first such keys, the way out."""
    by_reason: dict[str, list[str]] = {}
    for key in keys:
        reason = next(text for pattern, text in _REFUSED if re.search(pattern, key))
        by_reason.setdefault(reason, []).append(key)
    return [f"{named(found)}: {reason}" for reason, found in by_reason.items()]


def group_keys(parsed: Iterable[tuple[str, ParsedKey]]) -> list[FactorKeys]:
    """The pairs of a file; raises `AdapterFormatError` for a lone A, B or alpha and for two keys of one meaning."""
    groups: dict[tuple[str, int], dict[Factor, str]] = {}
    for key, place in parsed:
        group = groups.setdefault((place.path, place.depth), {})
        if place.factor in group:
            raise AdapterFormatError(
                f"tensors {group[place.factor]!r} and {key!r} are both {place.factor} of module {place.path!r}: "
                "keep the one of the adapter that is to be served"
            )
        group[place.factor] = key
    pairs = []
    for (path, depth), group in groups.items():
        missing = [f"lora_{factor}" for factor in ("A", "B") if factor not in group]
        if missing:
            raise AdapterFormatError(
                f"module {path!r} has {named(group.values())} but no {' and no '.join(missing)}: "
                "the file is incomplete"
            )
        pairs.append(FactorKeys(path, depth, group["A"], group["B"], group.get("alpha")))
    return pairs


# Names that tools and model classes put around the decoder; they say nothing about which module is meant.
_WRAPPERS = frozenset({"base_model", "model", "module", "language_model", "text_model", "llm"})
_TRANSPARENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_RENAMED = (("block_sparse_moe", "mlp"),)
"""What transformers 5 calls a module that older releases, and adapters trained on them, call otherwise."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d{1,9})\.(?P<projection>[^.]+)")
_ALL_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>[^.]+)")
_PROJECTIONS = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}


@dataclass(frozen=True)
class Target:
    """What a pair adapts: `sites` by projection (one site with key "" where the module is no experts module).

    `expert` is set where the pair belongs to one expert; `sites` then holds its one projection. `stacked` says that
    the pair holds all experts of a projection (or of gate and up) along a first axis.
    """

    module: str
    sites: dict[str, Site]
    expert: int | None = None
    stacked: bool = False

    @property
    def site(self) -> Site:
        """The first of the sites: the only one, unless this is a fused experts module."""
        return next(iter(self.sites.values()))

    @property
    def is_fused(self) -> bool:
        return self.expert is None and not self.stacked and self.site.kind == "experts"


def _core(path: str) -> str:
    parts = [part for part in path.split(".") if part not in _TRANSPARENT]
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def _renamed(path: str) -> str:
    names = dict(_RENAMED)
    return ".".join(names.get(part, part) for part in path.split("."))


class ModuleIndex:
    """Finds the sites that a path from an adapter file means, whatever the model was wrapped in at training."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._modules: dict[str, dict[str, Site]] = {}
        for site in sites:
            projection = site.leaf if site.kind == "experts" else ""
            self._modules.setdefault(site.module, {})[projection] = site
        self._by_core: dict[str, list[str]] = {}
        self._by_suffix: dict[str, list[str]] = {}
        for module in self._modules:
            self._by_core.setdefault(_core(module), []).append(module)
            parts = module.split(".")
            for start in range(len(parts)):
                self._by_suffix.setdefault(".".join(parts[start:]), []).append(module)

    def _module(self, path: str) -> str | None:
        for spelling in dict.fromkeys((path, _core(path), _renamed(path), _renamed(_core(path)))):
            if spelling in self._modules:
                return spelling
            found = self._by_core.get(spelling) or self._by_suffix.get(spelling) or []
            if len(found) > 1:
                raise AdapterMismatch(
                    f"module {path!r} could be any of {named(found)} of the base model: "
                    "save the adapter with full module paths"
                )
            if found:
                return found[0]
        return None

    def find(self, path: str) -> Target | None:
        """The target of a path, or None if the base model has no such module."""
        module = self._module(path)
        if module is not None:
            return Target(module, self._modules[module])
        match = _EXPERT.fullmatch(path)
        module = self._module(match["experts"]) if match else None
        if match is None or module is None:
            return self._find_stacked(path)
        site = self._modules[module].get(_PROJECTIONS.get(match["projection"], ""))
        if site is None or site.kind != "experts":
            return None
        expert = int(match["expert"])
        if expert >= site.num_experts:
            raise AdapterMismatch(
                f"module {path!r} is expert {expert}, but {module!r} of the base model has {site.num_experts} experts"
            )
        return Target(module, {site.leaf: site}, expert)

    def _find_stacked(self, path: str) -> Target | None:
        match = _ALL_EXPERTS.fullmatch(path)
        module = self._module(match["experts"]) if match else None
        if match is None or module is None:
            return None
        projection = match["projection"]
        wanted = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [_PROJECTIONS.get(projection, "")]
        sites = {name: site for name, site in self._modules[module].items() if name in wanted}
        return Target(module, sites, stacked=True) if len(sites) == len(wanted) else None
