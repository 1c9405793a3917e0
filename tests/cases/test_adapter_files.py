"""Faults that users met with adapter files, one test each."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorry.errors import AdapterCapacity, AdapterError, AdapterFormatError, AdapterMismatch
from lorry.lora.adapter import load_adapter, weights_from_tensors
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site, find_sites
from tests.adapters import (
    FUSED_EXPERTS,
    load_peft,
    make_peft_adapter,
    make_per_expert_adapter,
    peft_deltas,
    site_delta,
    split_by_site,
)
from tests.models import tiny_model

LLAMA = partial(tiny_model, "llama")


def load(path: str | Path, sites: tuple[Site, ...], **limits: Any) -> AdapterWeights:
    return load_adapter("mine", str(path), sites, torch.float32, **limits)


@pytest.fixture(scope="module")
def sites() -> tuple[Site, ...]:
    return find_sites(LLAMA())


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    return make_peft_adapter(tmp_path / "attention", LLAMA, ["q_proj", "v_proj"])


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "adapter_model.safetensors")


def edit_config(path: Path, **change: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_f01_rslora_scale(tmp_path: Path, sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(tmp_path / "a", LLAMA, ["q_proj"], rank=16, alpha=16, use_rslora=True)
    assert {site.scale for site in load(path, sites).sites.values()} == {16 / math.sqrt(16)}


def test_f03_rank_limit_is_checked_on_the_tensors(tmp_path: Path, sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(
        tmp_path / "a", LLAMA, ["q_proj", "o_proj"], rank=8, rank_pattern={"1.self_attn.o_proj": 20}
    )
    assert load(path, sites, max_rank=20).rank == 20
    with pytest.raises(AdapterCapacity, match=r"layers\.1\.self_attn\.o_proj.*rank 20.*limit of 16.*--max-lora-rank"):
        load(path, sites, max_rank=16)


def test_f04_a_rank_that_the_config_does_not_explain(attention: Path, sites: tuple[Site, ...]) -> None:
    edit_config(attention, r=3)
    with pytest.raises(AdapterFormatError, match=r"layers\.0\.self_attn\.q_proj' has rank 4.*claims 3.*rank_pattern"):
        load(attention, sites)
    edit_config(attention, rank_pattern={"q_proj": 4, "v_proj": 4})
    assert load(attention, sites).rank == 4


def test_f05_disk_and_memory_scale_alike(tmp_path: Path, sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(tmp_path / "a", LLAMA, ["q_proj"], use_rslora=True)
    config = json.loads((path / "adapter_config.json").read_text())
    memory = weights_from_tensors(tensors_of(path), config, sites, torch.float32)
    for index, weights in load(path, sites).sites.items():
        assert memory.sites[index].scale == weights.scale


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "base_model.model.base_model.model."])
@pytest.mark.parametrize("infix", ["", ".default", ".my-adapter"])
def test_f23_spellings_of_keys(prefix: str, infix: str, attention: Path, sites: tuple[Site, ...]) -> None:
    expected = load(attention, sites)
    renamed = {
        prefix + key.removeprefix("base_model.model.").replace(".weight", f"{infix}.weight"): tensor
        for key, tensor in tensors_of(attention).items()
    }
    save_file(renamed, attention / "adapter_model.safetensors")
    weights = load(attention, sites)
    assert list(weights.sites) == list(expected.sites)
    assert all(torch.equal(weights.sites[i].b, expected.sites[i].b) for i in expected.sites)


def test_f23_an_unknown_key_is_named(attention: Path, sites: tuple[Site, ...]) -> None:
    save_file(tensors_of(attention) | {"stranger.tensor": torch.ones(1)}, attention / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match=r"'stranger\.tensor'"):
        load(attention, sites)


def test_f24_safetensors_first_then_bin(attention: Path, sites: tuple[Site, ...]) -> None:
    tensors = tensors_of(attention)
    torch.save({key: 2 * tensor for key, tensor in tensors.items()}, attention / "adapter_model.bin")
    preferred = load(attention, sites)
    (attention / "adapter_model.safetensors").unlink()
    other = load(attention, sites)
    assert all(torch.equal(2 * preferred.sites[i].a, other.sites[i].a) for i in preferred.sites)
    (attention / "adapter_model.bin").unlink()
    with pytest.raises(AdapterFormatError, match=r"no adapter_model\.safetensors and no adapter_model\.bin"):
        load(attention, sites)


@pytest.mark.parametrize("path", ["['/adapters/a']", "/no/such/folder", "", "adapter\0", "a" * 5000])
def test_f26_a02_a_path_that_is_no_folder_is_quoted(path: str, sites: tuple[Site, ...]) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        load(path, sites)
    assert f"{path!r} is no folder" in str(caught.value) or f"{path!r} cannot be opened" in str(caught.value)
    assert "'mine'" in str(caught.value)


def test_f26_the_parent_of_adapter_folders(attention: Path, sites: tuple[Site, ...]) -> None:
    with pytest.raises(AdapterFormatError, match=r"no adapter_config\.json, but its folders 'attention' do"):
        load(attention.parent, sites)
    for content in ("{not json", "\xff", "[" * 100_000):
        (attention / "adapter_config.json").write_text(content)
        with pytest.raises(AdapterFormatError, match=r"adapter_config\.json cannot be read"):
            load(attention, sites)
    (attention / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterFormatError, match="holds a list"):
        load(attention, sites)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64])
def test_f26_damaged_weights(name: str, content: bytes, attention: Path, sites: tuple[Site, ...]) -> None:
    (attention / "adapter_model.safetensors").unlink()
    (attention / name).write_bytes(content)
    with pytest.raises(AdapterFormatError, match=f"'mine'.*{name} is damaged"):
        load(attention, sites)


def test_f28_an_adapter_of_another_size(attention: Path) -> None:
    larger = find_sites(tiny_model("llama", hidden_size=64, num_hidden_layers=3))
    message = (
        r"'mine'.*layers\.0\.self_attn\.q_proj' has lora_A \(4, 32\) and lora_B \(32, 4\).*\(rank, 64\).*\(64, rank\)"
    )
    with pytest.raises(AdapterMismatch, match=message):
        load(attention, larger)
    shorter = find_sites(tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(AdapterMismatch, match=r"no module 'model\.layers\.1\.self_attn\.q_proj'"):
        load(attention, shorter)


@pytest.mark.parametrize("leaf", ["q_proj", "v_proj", "gate_proj", "up_proj"])
def test_f36_a_single_projection(leaf: str, tmp_path: Path, sites: tuple[Site, ...]) -> None:
    path = make_peft_adapter(tmp_path / "a", LLAMA, [leaf])
    weights = load(path, sites)
    assert {sites[index].leaf for index in weights.sites} == {leaf}
    for index, delta in split_by_site(peft_deltas(LLAMA, path), sites).items():
        torch.testing.assert_close(site_delta(weights.sites[index]), delta, rtol=0, atol=1e-6)


def test_f22_modules_outside_the_servers_limit(attention: Path, sites: tuple[Site, ...]) -> None:
    load(attention, sites, target_modules=("q_proj", "v_proj"))
    with pytest.raises(AdapterMismatch, match=r"'v_proj', but .*only q_proj: extend --lora-target-modules"):
        load(attention, sites, target_modules=("q_proj",))


def test_l13_the_files_are_not_needed_after_the_load(attention: Path, sites: tuple[Site, ...]) -> None:
    weights = load(attention, sites)
    before = [tensor.clone() for tensor in weights.tensors]
    file = attention / "adapter_model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * os.path.getsize(file))
    assert all(torch.equal(tensor, old) for tensor, old in zip(weights.tensors, before, strict=True))


def test_m01_fused_experts_beside_attention(tmp_path: Path) -> None:
    factory = partial(tiny_model, "qwen3_moe")
    path = make_peft_adapter(tmp_path / "a", factory, ["q_proj"], target_parameters=FUSED_EXPERTS)
    assert any(".experts.base_layer.lora_A" in key for key in tensors_of(path))
    weights = load(path, find_sites(factory()))
    expected = split_by_site(peft_deltas(factory, path), find_sites(factory()))
    assert set(weights.sites) == set(expected)
    assert weights.target_modules == ("q_proj", "experts")
    for index, delta in expected.items():
        torch.testing.assert_close(site_delta(weights.sites[index]), delta, rtol=0, atol=1e-6)


def test_m15_attention_only_on_a_mixture_of_experts(tmp_path: Path) -> None:
    factory = partial(tiny_model, "mixtral")
    path = make_peft_adapter(tmp_path / "a", factory, ["q_proj", "o_proj"])
    assert load(path, find_sites(factory())).target_modules == ("q_proj", "o_proj")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_m21_single_and_fused_experts_give_the_same(family: str, tmp_path: Path) -> None:
    factory = partial(tiny_model, family)
    single = make_per_expert_adapter(tmp_path / "single", factory())
    load_peft(factory, single).save_pretrained(str(tmp_path / "fused"))  # PEFT converts on load
    edit_config(tmp_path / "fused", peft_version=None)
    assert any(".experts.base_layer." in key for key in tensors_of(tmp_path / "fused"))
    one, other = load(single, find_sites(factory())), load(tmp_path / "fused", find_sites(factory()))
    assert list(one.sites) == list(other.sites)
    for index in one.sites:
        torch.testing.assert_close(site_delta(one.sites[index]), site_delta(other.sites[index]), rtol=0, atol=1e-6)


class _Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def test_a18_a_pickle_payload_is_not_executed(attention: Path, sites: tuple[Site, ...]) -> None:
    marker = attention / "executed"
    (attention / "adapter_model.safetensors").unlink()
    torch.save({"x.lora_A.weight": _Payload(str(marker))}, attention / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=r"adapter_model\.bin .* holds more than tensors"):
        load(attention, sites)
    assert not marker.exists()
    torch.save([1, 2], attention / "adapter_model.bin")
    with pytest.raises(AdapterError, match="flat mapping"):
        load(attention, sites)
