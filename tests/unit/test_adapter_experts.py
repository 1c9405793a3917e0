"""Adapters on experts: fused and one by one, against PEFT's deltas or dense arithmetic."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.adapter import load_adapter, weights_from_tensors
from lorry.lora.weights import AdapterWeights
from lorry.models.sites import Site, find_sites
from tests.adapters import (
    FUSED_EXPERTS,
    assert_deltas,
    assert_loads_like_peft,
    dense_deltas,
    linear_pair,
    make_peft_adapter,
    make_per_expert_adapter,
    make_stacked_adapter,
    merged_logits,
    peft_deltas,
    reference_logits,
    site_delta,
    split_by_site,
)
from tests.models import MOE_FAMILIES, random_tokens, tiny_model

INTERMEDIATE = {"qwen3_moe": "moe_intermediate_size", "deepseek_v3": "moe_intermediate_size"}


def load(path: Path, sites: tuple[Site, ...], dtype: torch.dtype = torch.float32, **limits: Any) -> AdapterWeights:
    return load_adapter("a", str(path), sites, dtype, **limits)


@pytest.mark.parametrize("inter", [24, 16, 32], ids=["plain", "2I=H", "I=H"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_fused_experts_give_pefts_deltas(family: str, inter: int, tmp_path: Path) -> None:
    factory = partial(tiny_model, family, **{INTERMEDIATE.get(family, "intermediate_size"): inter})
    for i, targets in enumerate((FUSED_EXPERTS, FUSED_EXPERTS[:1], FUSED_EXPERTS[1:])):
        path = make_peft_adapter(tmp_path / str(i), factory, target_parameters=targets, use_rslora=i == 1)
        weights = assert_loads_like_peft(factory, path)
        gates = [site for site in find_sites(factory()) if site.leaf == "gate_proj" and site.index in weights.sites]
        for gate in gates if i < 2 else ():
            if gate.kind == "experts":
                assert weights.sites[gate.index].a is weights.sites[gate.index + 1].a


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_router_patterns_and_attention_beside_experts(family: str, tmp_path: Path) -> None:
    factory = partial(tiny_model, family)
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    path = make_peft_adapter(
        tmp_path / "a",
        factory,
        ["o_proj"],
        target_parameters=[*FUSED_EXPERTS, router],
        rank_pattern={"gate_up_proj": 2, r".*\.o_proj": 3, router: 5},
        alpha_pattern={"down_proj": 5, r"layers\.1\.self_attn\.o_proj": 7},
    )
    weights = assert_loads_like_peft(factory, path)
    assert set(weights.target_modules) == {"o_proj", "experts", router.split(".")[1]}
    assert weights.rank == 5
    assert weights.warnings == ()


def _turned(tensors: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The same deltas with A on the output side, as releases before 0.19.1 wrote them."""
    turned = dict(tensors)
    for key in [key for key in tensors if ".experts." in key and "lora_A" in key]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        rank = a.shape[0] // num_experts
        turned[key] = b.reshape(-1, rank, num_experts).permute(2, 1, 0).reshape(num_experts * rank, -1)
        folded = a.reshape(num_experts, rank, -1).permute(2, 1, 0).reshape(-1, rank * num_experts)
        turned[key.replace("lora_A", "lora_B")] = folded
    return turned


@pytest.mark.parametrize(("inter", "targets"), [(24, FUSED_EXPERTS), (16, FUSED_EXPERTS), (16, FUSED_EXPERTS[:1])])
def test_swapped_experts_of_older_peft(inter: int, targets: tuple[str, ...], tmp_path: Path) -> None:
    factory = partial(tiny_model, "qwen3_moe", moe_intermediate_size=inter)
    path = make_peft_adapter(tmp_path / "a", factory, target_parameters=targets)
    sites = find_sites(factory())
    expected = split_by_site(peft_deltas(factory, path), sites)
    tensors = _turned(load_file(path / "adapter_model.safetensors"), 4)
    config = json.loads((path / "adapter_config.json").read_text())
    assert_deltas(weights_from_tensors(tensors, config | {"peft_version": "0.18.1"}, sites, torch.float32), expected)
    undated = config | {"peft_version": None}
    if len(targets) == 1:
        with pytest.raises(AdapterFormatError, match="gate_up_proj, is as wide as it is long.*peft_version is None"):
            weights_from_tensors(tensors, undated, sites, torch.float32)
    else:  # the other parameter of the same file shows the orientation
        assert_deltas(weights_from_tensors(tensors, undated, sites, torch.float32), expected)


def test_marker_for_b_packed_by_expert(tmp_path: Path) -> None:
    factory = partial(tiny_model, "qwen3_moe")
    path = make_peft_adapter(tmp_path / "a", factory, target_parameters=FUSED_EXPERTS)
    sites, config = find_sites(factory()), json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    expected = split_by_site(peft_deltas(factory, path), sites)
    for key in [key for key in tensors if "lora_B" in key]:
        tensors[key] = tensors[key].reshape(-1, 4, 4).transpose(1, 2).reshape(-1, 16)
    marked = config | {"lora_B_layout": "grouped_by_expert"}
    assert_deltas(weights_from_tensors(tensors, marked, sites, torch.float32), expected)
    detail = {"parameters": {p: {"lora_B_layout": "grouped_by_expert"} for p in ("gate_up_proj", "down_proj")}}
    marked = config | {"unsloth_fused_expert_lora": detail}
    assert_deltas(weights_from_tensors(tensors, marked, sites, torch.float32), expected)


EXPERT_CASES: dict[str, dict[str, Any]] = {
    "all": {"router": True},
    "rslora": {"use_rslora": True},
    "no gate": {"projections": ("up_proj", "down_proj")},
    "gate only": {"projections": ("gate_proj",)},
    "two experts": {"experts": {1, 3}},
    "ranks": {"ranks": {1: 2, 2: 6}, "use_rslora": True},
    "alphas": {"alpha_pattern": {r"experts\.2\.[^.]+": 3}},
}


@pytest.mark.parametrize("case", EXPERT_CASES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_single_experts_give_dense_deltas(family: str, case: str, tmp_path: Path) -> None:
    factory = partial(tiny_model, family)
    model = factory()
    path = make_per_expert_adapter(tmp_path / "a", model, **EXPERT_CASES[case])
    sites = find_sites(model)
    expected = {i: d for i, d in split_by_site(dense_deltas(model, path), sites).items() if d.any()}
    weights = load(path, sites)
    assert_deltas(weights, expected)
    assert weights.warnings == ()
    if case == "all":  # the one case that PEFT converts rightly: it judges the arithmetic of the tests
        ids = random_tokens(8)
        torch.testing.assert_close(reference_logits(factory, path, ids), merged_logits(factory, path, ids))


def test_single_experts_on_an_interleaved_base(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    path = make_per_expert_adapter(tmp_path / "a", model)
    sites = find_sites(model)
    assert_deltas(load(path, sites), split_by_site(dense_deltas(model, path), sites))


def test_missing_experts_are_zero_and_ranks_are_padded(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    path = make_per_expert_adapter(tmp_path / "a", model, experts={0, 2}, ranks={2: 6})
    sites = find_sites(model)
    gate = next(site for site in sites if site.kind == "experts")
    weights = load(path, sites).sites[gate.index]
    assert weights.a.shape == (4, 6, 32)
    assert not weights.a[1].any()
    assert not weights.b[3].any()
    assert not weights.a[0, 4:].any()
    assert weights.a[2].all()


def test_another_expert_rank_than_claimed_is_a_warning(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    path = make_per_expert_adapter(tmp_path / "a", model, rank=2, r=8)
    weights = load(path, find_sites(model))
    assert next(iter(weights.sites.values())).scale == 4.0
    assert "another rank" in weights.warnings[0]


def test_fused_values_are_those_of_the_file(tmp_path: Path) -> None:
    factory = partial(tiny_model, "gpt_oss")
    path = make_peft_adapter(tmp_path / "a", factory, target_parameters=FUSED_EXPERTS, dtype=torch.bfloat16)
    tensors = load_file(path / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.experts.base_layer"
    sites = find_sites(factory())
    gate = next(site for site in sites if site.kind == "experts")
    weights = load(path, sites, torch.bfloat16)
    b = tensors[f"{key}.lora_B.weight"].reshape(48, 4, 4)
    assert torch.equal(weights.sites[gate.index].a, tensors[f"{key}.lora_A.weight"].reshape(4, 4, 32))
    assert torch.equal(weights.sites[gate.index].b[3], b[::2, :, 3].t())
    assert torch.equal(weights.sites[gate.index + 1].b[3], b[1::2, :, 3].t())
    assert all(tensor.is_contiguous() for tensor in weights.tensors)
    assert len(weights.tensors) == 2 * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_parameters": ["experts.gate_up_proj_bias", "experts.down_proj"]}, "gate_up_proj_bias"),
        ({"target_parameters": []}, "one pair, but target_parameters .* names none"),
        (
            {"target_parameters": list(FUSED_EXPERTS)},
            "one pair, but target_parameters .* 'down_proj', 'gate_up_proj'",
        ),
        (
            {"target_parameters": ["experts.gate_up_proj"]},
            r"gate_up_proj, has lora_A \(16, 24\).*needs lora_A \(4 \* ran",
        ),
    ],
)
def test_one_fused_pair_must_be_explained_by_the_config(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    factory = partial(tiny_model, "gpt_oss")
    path = make_peft_adapter(tmp_path / "a", factory, target_parameters=["experts.down_proj"])
    config = json.loads((path / "adapter_config.json").read_text()) | change
    tensors = load_file(path / "adapter_model.safetensors")
    with pytest.raises((AdapterFormatError, AdapterMismatch), match=message):
        weights_from_tensors(tensors, config, find_sites(factory()), torch.float32)


def test_three_fused_parameters_are_refused() -> None:
    key = "model.layers.0.mlp.experts"
    tensors = {
        name: tensor
        for depth in range(3)
        for name, tensor in linear_pair(4, module=key + depth * ".base_layer").items()
    }
    with pytest.raises(AdapterFormatError, match="three or more"):
        weights_from_tensors(tensors, {}, find_sites(tiny_model("qwen3_moe")), torch.float32)


def test_fused_and_single_experts_of_one_module_are_refused(tmp_path: Path) -> None:
    factory = partial(tiny_model, "qwen3_moe")
    fused = make_peft_adapter(tmp_path / "a", factory, target_parameters=FUSED_EXPERTS)
    single = make_per_expert_adapter(tmp_path / "b", factory())
    tensors = load_file(fused / "adapter_model.safetensors") | load_file(single / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match="a pair for all experts beside other pairs"):
        weights_from_tensors(tensors, {}, find_sites(factory()), torch.float32)


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_m18_factors_shared_by_all_experts_are_kept_once(family: str, gate_up: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    sites = find_sites(model)
    stacked, single = make_stacked_adapter(tmp_path, model, gate_up=gate_up)
    if family == "gpt_oss" and gate_up:
        with pytest.raises(AdapterFormatError, match="order is not known.*save gate_proj and up_proj apart"):
            load(stacked, sites)
        return
    weights = load(stacked, sites)
    assert weights.warnings == ()
    expected = split_by_site(dense_deltas(model, single), sites)
    assert set(weights.sites) == set(expected)
    for index, site_weights in weights.sites.items():
        down = sites[index].leaf == "down_proj"
        assert (site_weights.a.shape[0], site_weights.b.shape[0]) == ((4, 1) if down else (1, 4))
        delta = site_delta(site_weights).expand_as(expected[index])
        torch.testing.assert_close(delta, expected[index], rtol=0, atol=2e-6)
    assert gate_up is (weights.sites[min(expected)].a is weights.sites[min(expected) + 1].a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 4, 32), (4, 24, 4)),
        ((1, 4, 32), (3, 24, 4)),
        ((4, 32), (24, 4)),
        ((1, 4, 24), (4, 32, 4)),
        ((1, 0, 32), (4, 24, 0)),
    ],
)
def test_m18_other_shapes_for_all_experts_are_refused(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    key = "base_model.model.model.layers.0.mlp.experts.gate_proj"
    tensors = {f"{key}.lora_A.weight": torch.ones(a), f"{key}.lora_B.weight": torch.ones(b)}
    with pytest.raises(AdapterMismatch, match=r"needs lora_A \(4, rank, 32\).*first size of 1 where all"):
        weights_from_tensors(tensors, {}, find_sites(tiny_model("qwen3_moe")), torch.float32)


def test_stacked_and_single_experts_of_one_module_are_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    stacked, single = make_stacked_adapter(tmp_path, model)
    tensors = load_file(stacked / "adapter_model.safetensors") | load_file(single / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match="a pair for all experts beside other pairs"):
        weights_from_tensors(tensors, {}, find_sites(model), torch.float32)
