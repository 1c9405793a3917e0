"""Loads an adapter: reads its files in full, then checks and converts its tensors for the base model's sites."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lorry.errors import AdapterCapacity, AdapterError, AdapterFormatError, AdapterMismatch
from lorry.lora.format import ModuleIndex, group_keys, named, natural, parse_key, refusals
from lorry.lora.format_config import AdapterConfig, refused_fields, unknown_fields
from lorry.lora.layouts import build_sites
from lorry.lora.source import PlacedPair, Source
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site

CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

FilesStamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of each of an adapter's files: another stamp says that they are not what they were."""


@contextmanager
def _named(subject: str) -> Iterator[None]:
    """Puts the adapter's name in front of the errors about it."""
    try:
        yield
    except AdapterError as error:
        raise type(error)(f"{subject}: {error}") from error.__cause__


def load_adapter(
    name: str,
    path: str,
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
) -> AdapterWeights:
    """The adapter in the folder `path`, for these sites, in `dtype` on the host.

    Nothing of the files is needed after the return. `max_rank` and the names in `target_modules` (leaf names such as
    q_proj, `experts` for any projection of fused experts) are the server's limits. Safe to call from any thread.
    Raises `AdapterFormatError`, `AdapterMismatch` or `AdapterCapacity`.
    """
    with _named(f"adapter {name!r} at {path!r}"):
        config, tensors = read_files(path)
        return _convert(tensors, config, sites, dtype, max_rank, target_modules)


def weights_from_tensors(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
    name: str = "in memory",
) -> AdapterWeights:
    """The adapter that a file with these tensors and this config would give; the tensors are copied."""
    with _named(f"adapter {name!r}"):
        return _convert(tensors, config, sites, dtype, max_rank, target_modules)


def weights_from_bytes(
    name: str,
    content: bytes,
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
) -> AdapterWeights:
    """The adapter in a safetensors file whose metadata has its config, as JSON, under `adapter_config`."""
    with _named(f"adapter {name!r}"):
        config = _config_in_metadata(content)
        return _convert(_read_safetensors(content), config, sites, dtype, max_rank, target_modules)


def _config_in_metadata(content: bytes) -> dict[str, Any]:
    """From the header: its length in 8 bytes, then JSON. What is damaged is for `_read_safetensors` to say."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        config = json.loads(header["__metadata__"]["adapter_config"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AdapterFormatError(
            "the content must be a safetensors file whose metadata has the adapter_config as JSON, as written by "
            f"safetensors.torch.save(tensors, {{'adapter_config': json.dumps(config)}}) ({type(error).__name__})"
        ) from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"the adapter_config holds a {type(config).__name__}, expected an object")
    return config


def _convert(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_rank: int | None,
    target_modules: Collection[str] | None,
) -> AdapterWeights:
    parsed = {key: parse_key(key) for key in sorted(tensors, key=natural)}
    refused = refused_fields(config) + refusals(key for key, place in parsed.items() if place is None)
    if refused:
        raise AdapterFormatError("; ".join(refused))
    claims = AdapterConfig.parse(config)
    index = ModuleIndex(sites)
    placed, unknown = [], []
    for keys in group_keys((key, place) for key, place in parsed.items() if place is not None):
        target = index.find(keys.path)
        if target is None:
            unknown.append(keys.path)
        else:
            placed.append(PlacedPair(keys, target))
    source = Source(tensors, claims, dtype)
    weights = build_sites(source, placed)
    if unknown:
        raise AdapterMismatch(f"the base model has no module {named(unknown)}: it was trained on another model")
    if not weights:
        raise AdapterFormatError("it adapts nothing: the file holds no LoRA tensors")
    used = {site.index: site for site in sites if site.index in weights}
    _check_limits(weights, used, max_rank, target_modules)
    warnings = []
    if source.other_ranks:
        warnings.append(
            f"the config claims another rank than the tensors have for {named(source.other_ranks)}: "
            "the scale is that of the tensors' rank"
        )
    if unread := unknown_fields(config):
        warnings.append(f"the config has fields that are not known and were not read: {named(unread)}")
    leaves = dict.fromkeys(target_name(used[i]) for i in sorted(used))
    return AdapterWeights(weights, tuple(leaves), claims.base_model_name, tuple(warnings))


def target_name(site: Site) -> str:
    """The name by which `--lora-target-modules` allows a site."""
    return "experts" if site.kind == "experts" else site.leaf


def _check_limits(
    weights: Mapping[int, SiteWeights],
    sites: Mapping[int, Site],
    max_rank: int | None,
    target_modules: Collection[str] | None,
) -> None:
    largest = max(weights, key=lambda index: weights[index].rank)
    if max_rank is not None and weights[largest].rank > max_rank:
        raise AdapterCapacity(
            f"module {sites[largest].name!r} has rank {weights[largest].rank}, above the limit of {max_rank}: "
            "raise --max-lora-rank"
        )
    if target_modules is not None:
        outside = dict.fromkeys(target_name(site) for site in sites.values())
        outside = {leaf: None for leaf in outside if leaf not in target_modules}
        if outside:
            raise AdapterMismatch(
                f"it adapts {named(outside)}, but the server allows only "
                f"{' '.join(sorted(target_modules)) or 'nothing'}: extend --lora-target-modules"
            )


def read_files(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of an adapter folder, both read in full; raises `AdapterFormatError`."""
    with _openable(path):
        config_file, weights_file = _find_files(path)
    try:
        config = json.loads(config_file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{CONFIG_FILE} holds a {type(config).__name__}, expected an object")
    try:
        content = weights_file.read_bytes()
    except OSError as error:
        raise AdapterFormatError(f"{weights_file.name} cannot be read: {error}") from error
    if weights_file.name == SAFETENSORS_FILE:
        return config, _read_safetensors(content)
    return config, _read_pickle(content)


def files_stamp(name: str, path: str) -> FilesStamp:
    """What tells the adapter's files as they are from others; raises `AdapterFormatError` where there are none."""
    found = []
    with _named(f"adapter {name!r} at {path!r}"), _openable(path):
        for file in _find_files(path):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


@contextmanager
def _openable(path: str) -> Iterator[None]:
    """Says of which path the system's errors are."""
    try:
        yield
    except OSError as error:
        raise AdapterFormatError(f"{path!r} cannot be opened: {error.strerror}") from error


def _find_files(path: str) -> tuple[Path, Path]:
    folder = Path(path)
    if not path or not folder.is_dir():
        raise AdapterFormatError(f"{path!r} is no folder on the server: give the folder that holds {CONFIG_FILE}")
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        inner = sorted(child.name for child in folder.iterdir() if (child / CONFIG_FILE).is_file())
        hint = f", but its folders {named(inner)} do: give one of them" if inner else ""
        raise AdapterFormatError(f"{path!r} has no {CONFIG_FILE}{hint}")
    for name in (SAFETENSORS_FILE, PICKLE_FILE):
        if (folder / name).is_file():
            return config_file, folder / name
    raise AdapterFormatError(f"{path!r} has no {SAFETENSORS_FILE} and no {PICKLE_FILE}")


def _read_safetensors(content: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except Exception as error:  # the library raises its own type, KeyError and others, by what is damaged
        raise AdapterFormatError(f"{SAFETENSORS_FILE} is damaged or holds an unknown dtype: {error}") from error


def _read_pickle(content: bytes) -> dict[str, Tensor]:
    try:
        tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a damaged or hostile file may raise anything
        raise AdapterFormatError(
            f"{PICKLE_FILE} is damaged, or holds more than tensors and is not loaded for that reason: "
            f"save the adapter as {SAFETENSORS_FILE} ({type(error).__name__})"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for key, value in tensors.items()
    ):
        raise AdapterFormatError(f"{PICKLE_FILE} must hold a flat mapping of names to dense tensors")
    return tensors
