"""Which weights a request's `model` means: the base, by any of its names, or an adapter. There is no fallback."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from lorry.config import EngineConfig
from lorry.errors import InvalidRequest, ModelNotFound
from lorry.types import BASE_UID, AdapterInfo, AdapterUid

MAX_NAME_LEN = 256

NUM_SUGGESTIONS = 3


@dataclass(frozen=True)
class Target:
    """What answers a request: `id` is its name in `/v1/models`."""

    id: str
    adapter_uid: AdapterUid = BASE_UID

    @property
    def fingerprint(self) -> str:
        """The exact weights: another load of an adapter under the same name has another."""
        return self.id if self.adapter_uid == BASE_UID else f"{self.id}@{self.adapter_uid}"


def base_aliases(config: EngineConfig) -> frozenset[str]:
    """Names that mean the base."""
    return frozenset({config.base_name, config.model})


def resolve(model: str | None, config: EngineConfig, adapters: Mapping[str, AdapterInfo]) -> Target:
    """The base where `model` is missing or empty; else the first of: a name of the base, an adapter, BASE:ADAPTER.

    Names are opaque and may hold any of `:/@.`, so an exact name always goes before a split one.
    """
    aliases = base_aliases(config)
    if not model or model in aliases:
        return Target(config.base_name)
    if adapter := adapters.get(model):
        return Target(adapter.name, adapter.uid)
    for position, character in enumerate(model):
        if character == ":" and model[:position] in aliases and (adapter := adapters.get(model[position + 1 :])):
            return Target(adapter.name, adapter.uid)
    known = [config.base_name, *adapters]
    close = difflib.get_close_matches(model, known, n=NUM_SUGGESTIONS, cutoff=0.5)
    listed = "did you mean " if close else "there are "
    raise ModelNotFound(
        f"the model {model!r} does not exist; {listed}{', '.join(map(repr, close or known[:NUM_SUGGESTIONS]))}"
        f" ({len(known)} served, see /v1/models)"
    )


def adapter_part(model: str, config: EngineConfig) -> str:
    """The adapter that a name of no known one would mean: without a name of the base and a colon before it."""
    for alias in sorted(base_aliases(config), key=len, reverse=True):
        if model.startswith(f"{alias}:"):
            return model[len(alias) + 1 :]
    return model


def check_adapter_name(name: str, config: EngineConfig) -> None:
    """Raise `InvalidRequest` for a name that could not be told apart or typed."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME_LEN:
        raise InvalidRequest(
            f"the adapter name {name[:MAX_NAME_LEN]!r} must be 1 to {MAX_NAME_LEN} printable characters"
            " without a space at either end",
            "lora_name",
        )
    if name in base_aliases(config):
        raise InvalidRequest(f"the name {name!r} is the base model's; choose another for the adapter", "lora_name")
