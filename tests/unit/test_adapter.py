"""Loaded adapters against PEFT's own deltas, and what the loader keeps, converts and refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.adapter import load_adapter, weights_from_tensors
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site, find_sites
from tests.adapters import (
    assert_loads_like_peft,
    linear_pair,
    make_peft_adapter,
    write_adapter,
)
from tests.models import FAMILIES, tiny_model

INTERMEDIATE = {"qwen3_moe": "moe_intermediate_size", "deepseek_v3": "moe_intermediate_size"}
Q = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q}"


def load(path: Path, sites: tuple[Site, ...], dtype: torch.dtype = torch.float32, **limits: Any) -> AdapterWeights:
    return load_adapter("a", str(path), sites, dtype, **limits)


@pytest.fixture(scope="module")
def llama_sites() -> tuple[Site, ...]:
    return find_sites(tiny_model("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_adapters_give_pefts_deltas(family: str, tmp_path: Path) -> None:
    factory = partial(tiny_model, family)
    assert_loads_like_peft(
        factory, make_peft_adapter(tmp_path / "a", factory, "all-linear", use_rslora=family == "qwen3")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_those_of_the_file(dtype: torch.dtype, tmp_path: Path, llama_sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(tmp_path / "a", partial(tiny_model, "llama"), ["q_proj"], dtype=dtype)
    tensors = load_file(path / "adapter_model.safetensors")
    site = next(site for site in llama_sites if site.leaf == "q_proj")
    for wanted in (dtype, torch.float32):
        weights = load(path, llama_sites, wanted).sites[site.index]
        assert torch.equal(weights.a[0], tensors[f"{KEY}.lora_A.weight"].to(wanted))
        assert torch.equal(weights.b[0], tensors[f"{KEY}.lora_B.weight"].to(wanted).t())
        assert weights.a.dtype == weights.b.dtype == wanted
        assert weights.a.is_contiguous()
        assert weights.b.is_contiguous()


def test_memory_and_disk_give_the_same_and_memory_is_copied(tmp_path: Path, llama_sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(tmp_path / "a", partial(tiny_model, "llama"), ["q_proj", "up_proj"], use_rslora=True)
    tensors = {key: tensor.requires_grad_() for key, tensor in load_file(path / "adapter_model.safetensors").items()}
    config = json.loads((path / "adapter_config.json").read_text())
    disk, memory = load(path, llama_sites), weights_from_tensors(tensors, config, llama_sites, torch.float32)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    save_file({key: torch.zeros_like(tensor) for key, tensor in tensors.items()}, path / "adapter_model.safetensors")
    assert list(disk.sites) == list(memory.sites)
    for index, weights in disk.sites.items():
        assert weights.a.any()
        assert torch.equal(weights.a, memory.sites[index].a)
        assert torch.equal(weights.b, memory.sites[index].b)
        assert weights.scale == memory.sites[index].scale


@pytest.mark.parametrize(
    ("config", "own_alpha", "scale"),
    [
        ({"lora_alpha": 8}, None, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, None, 4.0),
        ({}, None, 1.0),
        ({"use_rslora": True}, None, 2.0),
        ({"lora_alpha": 8}, 2.0, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 12}}, None, 3.0),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 12}}, 2.0, 0.5),
    ],
)
def test_scale(config: dict[str, Any], own_alpha: float | None, scale: float, llama_sites: tuple[Site, ...]) -> None:
    tensors = linear_pair(4) | ({f"{KEY}.alpha": torch.tensor(own_alpha)} if own_alpha else {})
    (weights,) = weights_from_tensors(tensors, config, llama_sites, torch.float32).sites.values()
    assert weights.scale == scale


def test_missing_alpha_is_each_modules_own_rank(llama_sites: tuple[Site, ...]) -> None:
    tensors = linear_pair(4) | linear_pair(2, module=Q.replace("q_proj", "o_proj"))
    weights = weights_from_tensors(tensors, {}, llama_sites, torch.float32)
    assert {site.scale for site in weights.sites.values()} == {1.0}
    assert {site.rank for site in weights.sites.values()} == {2, 4}


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({}, {}, AdapterFormatError, "adapts nothing"),
        (linear_pair() | {"x.lora_A": torch.ones(1)}, {}, AdapterFormatError, "'x.lora_A'"),
        (linear_pair() | {f"{KEY}.lora_B.bias": torch.ones(1)}, {}, AdapterFormatError, r"q_proj\.lora_B\.bias"),
        (linear_pair(), {"use_dora": True, "use_qalora": True}, AdapterFormatError, "use_dora.*use_qalora"),
        (linear_pair(module=f"{Q}.base_layer"), {}, AdapterFormatError, "base_layer"),
        (
            linear_pair(module=Q.replace("0", "7")),
            {},
            AdapterMismatch,
            r"no module 'model\.layers\.7\.self_attn\.q_proj'",
        ),
        (
            linear_pair() | linear_pair(module=Q.replace("model.layers", "layers")),
            {},
            AdapterFormatError,
            "both adapt",
        ),
        (linear_pair() | {f"{KEY}.alpha": torch.ones(2)}, {}, AdapterFormatError, "one finite number"),
        ({k: v.int() for k, v in linear_pair().items()}, {}, AdapterFormatError, r"q_proj\.lora_.*int32"),
        ({k: v / 0 for k, v in linear_pair().items()}, {}, AdapterFormatError, r"q_proj\.lora_.*NaN or infinite"),
        ({k: v * 1e39 for k, v in linear_pair().items()}, {}, AdapterFormatError, "infinite"),
        (linear_pair(2, inner=16), {}, AdapterMismatch, r"\(2, 16\).*\(rank, 32\)"),
        ({k: v[None] for k, v in linear_pair().items()}, {}, AdapterMismatch, r"\(1, 2, 32\)"),
    ],
)
def test_refusals(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    error: type[Exception],
    message: str,
    llama_sites: tuple[Site, ...],
) -> None:
    with pytest.raises(error, match=f"(?s)adapter 'x'.*{message}"):
        weights_from_tensors(tensors, config, llama_sites, torch.float32, name="x")


def test_numbers_too_large_for_the_dtype(llama_sites: tuple[Site, ...]) -> None:
    tensors = {key: tensor * 1e6 for key, tensor in linear_pair().items()}
    weights_from_tensors(tensors, {}, llama_sites, torch.bfloat16)
    with pytest.raises(AdapterFormatError, match=r"lora_B\.weight'.*too large for torch\.float16"):
        weights_from_tensors(tensors, {}, llama_sites, torch.float16)


def test_unknown_config_fields_are_a_warning(llama_sites: tuple[Site, ...]) -> None:
    weights = weights_from_tensors(linear_pair(), {"use_xlora": True}, llama_sites, torch.float32)
    assert "'use_xlora'" in weights.warnings[0]


def test_base_name_is_only_reported(tmp_path: Path, llama_sites: tuple[Site, ...]) -> None:
    path = write_adapter(tmp_path / "a", linear_pair(), {"base_model_name_or_path": "nobody/private"})
    assert load(path, llama_sites).base_model_name == "nobody/private"
