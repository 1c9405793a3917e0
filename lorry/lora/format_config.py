"""What `adapter_config.json` claims: scales, ranks and declared parameters, and the features that are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorry.errors import AdapterFormatError
from lorry.lora.format import MERGE

GROUPED_BY_EXPERT = "grouped_by_expert"
RANK_MAJOR = "rank_major"

_REFUSED: tuple[tuple[str, str], ...] = (
    ("use_dora", f"DoRA is not served: {MERGE} it"),
    ("modules_to_save", f"fully trained modules are not served: {MERGE} them"),
    ("trainable_token_indices", f"trained token rows are not served: {MERGE} them"),
    ("alora_invocation_tokens", "activated LoRA is not served: train it again as plain LoRA"),
    ("use_bdlora", "block-diagonal LoRA is not served: expand its factors to full size, or train it as plain LoRA"),
    ("layer_replication", f"replicated layers are not served: {MERGE} them"),
    ("use_qalora", "QALoRA is not served: train it again as plain LoRA"),
    ("kasa_config", f"KaSA is not served: {MERGE} it"),
    ("monteclora_config", f"MonteCLoRA is not served: {MERGE} it"),
    ("arrow_config", "Arrow routing is not served: load its adapters one by one"),
)
_HARMLESS_NAMES = (
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha "
    "target_modules exclude_modules target_parameters lora_dropout fan_in_fan_out bias lora_bias use_rslora "
    "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config megatron_core "
    "loftq_config eva_config corda_config lora_ga_config velora_config qalora_group_size runtime_config "
    "ensure_weight_tying lora_B_layout unsloth_fused_expert_lora"
)
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Fields that are read, or that only concern training. Biases and VeLoRA are refused by their tensors."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PATH = re.compile(r"[\w.]+")


def _number(value: Any, field: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFormatError(f"config field {field} is {value!r}: it must be a finite number")
    return number


def _rank(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterFormatError(f"config field {field} is {value!r}: it must be a whole number of at least 1")
    return value


def _entries(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise AdapterFormatError(f"config field {field} is {value!r}: it must map module patterns to numbers")
    return dict(value)


class Patterns:
    """A `rank_pattern` or `alpha_pattern`: values for the modules that regular expressions match.

    A pattern matches a module whose path, or whose path behind some dot, it matches in full. Which of two matching
    patterns comes first does not survive saving, so two different values for one module are an error.
    """

    def __init__(self, values: Mapping[str, float], field: str) -> None:
        self._field = field
        # Plain paths are looked up, not searched: there can be one for every expert of every layer.
        self._plain = {key: value for key, value in values.items() if _PATH.fullmatch(key)}
        self._regexes: list[tuple[str, re.Pattern[str], float]] = []
        for key, value in values.items():
            if key in self._plain:
                continue
            try:
                self._regexes.append((key, re.compile(rf"(.*\.)?({key})$"), value))
            except (re.error, OverflowError, RecursionError) as error:
                text = f"config field {field} has {key!r}, which is no regular expression: {error}"
                raise AdapterFormatError(text) from None

    def find(self, names: Sequence[str]) -> float | None:
        """The value for a module that is known under these paths, or None."""
        found: dict[str, float] = {}
        for name in names:
            parts = name.split(".")
            for suffix in (".".join(parts[start:]) for start in range(len(parts))):
                if suffix in self._plain:
                    found[suffix] = self._plain[suffix]
            found |= {key: value for key, regex, value in self._regexes if regex.match(name)}
        if len(set(found.values())) > 1:
            claims = ", ".join(f"{key!r}: {value:g}" for key, value in found.items())
            raise AdapterFormatError(
                f"config field {self._field} gives module {names[0]!r} several values ({claims}): leave one of them"
            )
        return next(iter(found.values()), None)


@dataclass(frozen=True)
class AdapterConfig:
    """The claims that matter for serving; everything else in the file is about training."""

    rank: int | None
    alpha: float | None
    use_rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_parameters: tuple[str, ...]
    peft_version: str | None
    base_model_name: str | None
    expert_layouts: Mapping[str, str]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AdapterConfig:
        """Raises `AdapterFormatError` for a field of the wrong type; unserved features are `refused_fields`."""
        use_rslora = config.get("use_rslora") or False
        if not isinstance(use_rslora, bool):
            raise AdapterFormatError(f"config field use_rslora is {use_rslora!r}: it must be true or false")
        ranks = {k: _rank(v, f"rank_pattern[{k!r}]") for k, v in _entries(config, "rank_pattern").items()}
        alphas = {k: _number(v, f"alpha_pattern[{k!r}]") for k, v in _entries(config, "alpha_pattern").items()}
        parameters = config.get("target_parameters") or ()
        if isinstance(parameters, str):
            parameters = (parameters,)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        version, base = config.get("peft_version"), config.get("base_model_name_or_path")
        return cls(
            rank=None if rank is None else _rank(rank, "r"),
            alpha=None if alpha is None else _number(alpha, "lora_alpha"),
            use_rslora=use_rslora,
            rank_pattern=Patterns(ranks, "rank_pattern"),
            alpha_pattern=Patterns(alphas, "alpha_pattern"),
            target_parameters=tuple(sorted(str(parameter) for parameter in parameters)),
            peft_version=None if version is None else str(version),
            base_model_name=None if base is None else str(base),
            expert_layouts=_expert_layouts(config),
        )

    def claimed_rank(self, names: Sequence[str]) -> int | None:
        """The rank that the config claims for a module, if any."""
        claim = self.rank_pattern.find(names)
        return self.rank if claim is None else int(claim)

    def scale(self, names: Sequence[str], rank: int, own_alpha: float | None = None) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA; `rank` is the tensors', `own_alpha` the file's scalar.

        Without any alpha, it is the module's own rank.
        """
        pattern = self.alpha_pattern.find(names)
        claims = (own_alpha, pattern, self.alpha, float(rank))
        alpha = next(claim for claim in claims if claim is not None)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def declared_parameters(self, module: str) -> list[str]:
        """The names of the module's own parameters that `target_parameters` declares."""
        declared = []
        for target in self.target_parameters:
            parent, _, parameter = target.rpartition(".")
            if not parent or module == parent or module.endswith(f".{parent}"):
                declared.append(parameter)
        return list(dict.fromkeys(declared))

    def expert_layout(self, parameter: str) -> str:
        """How B of a fused experts parameter is packed; adapters that do not say follow PEFT."""
        return self.expert_layouts.get(parameter, self.expert_layouts.get("", RANK_MAJOR))


def _expert_layouts(config: Mapping[str, Any]) -> dict[str, str]:
    # Unsloth's marker: one word for the file, and one for each parameter where they could differ.
    layouts = {} if config.get("lora_B_layout") is None else {"": config["lora_B_layout"]}
    details = config.get("unsloth_fused_expert_lora")
    parameters = details.get("parameters") if isinstance(details, Mapping) else None
    if isinstance(parameters, Mapping):
        layouts |= {
            str(name).rpartition(".")[2]: entry["lora_B_layout"]
            for name, entry in parameters.items()
            if isinstance(entry, Mapping) and "lora_B_layout" in entry
        }
    for layout in layouts.values():
        if layout not in (RANK_MAJOR, GROUPED_BY_EXPERT):
            raise AdapterFormatError(
                f"config field lora_B_layout is {layout!r}: known are {RANK_MAJOR!r} and {GROUPED_BY_EXPERT!r}"
            )
    return layouts


def refused_fields(config: Mapping[str, Any]) -> list[str]:
    """One line for each field that asks for something that is not served: the field, the reason, the way out."""
    lines = []
    peft_type = config.get("peft_type") or "LORA"
    if not isinstance(peft_type, str) or peft_type.upper() != "LORA":
        shown = getattr(peft_type, "value", peft_type)
        lines.append(f"config field peft_type is {shown!r}: only LORA is served; {MERGE} it, or convert it with PEFT")
    lines += [f"config field {field} is set: {reason}" for field, reason in _REFUSED if config.get(field)]
    initialisation = config.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGES_BASE):
        lines.append(
            f"config field init_lora_weights is {initialisation!r}: such an adapter belongs to a changed base, not "
            "to the stock one; convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return lines


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """The set fields that no release of PEFT known here writes: they might change what the tensors mean."""
    known = _HARMLESS.union(field for field, _ in _REFUSED)
    return sorted(str(field) for field, value in config.items() if value and field not in known)
