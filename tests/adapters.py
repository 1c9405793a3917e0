"""Adapters for tests, written by PEFT or by hand, and what they do to a model according to PEFT or dense arithmetic.

A `model_factory` gives a fresh base at each call (`partial(tiny_model, "llama")`): PEFT changes the base it is given.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lorry.lora.adapter import load_adapter
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site, find_sites

ModelFactory = Callable[[], PreTrainedModel]

FUSED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def make_peft_adapter(
    folder: Path,
    model_factory: ModelFactory,
    target_modules: Sequence[str] | str | None = None,
    *,
    target_parameters: Sequence[str] | None = None,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter with PEFT on a fresh base, A and B both random (`spread`) and saved in `dtype`.

    `config` are further fields of `LoraConfig`, such as `use_rslora`, `rank_pattern` or `alpha_pattern`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=target_modules if isinstance(target_modules, str) else list(target_modules or []),
            target_parameters=list(target_parameters) if target_parameters else None,
            **config,
        )
        model = get_peft_model(model_factory(), lora, autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if ".lora_" in name:
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(str(folder))
    if dtype != torch.float32:
        file = folder / "adapter_model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
    return folder


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write tensors (PEFT's keys) and a config, `{"peft_type": "LORA"}` and what is given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | dict(config or {})))
    return folder


def make_per_expert_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    projections: Sequence[str] = EXPERT_PROJECTIONS,
    experts: Collection[int] | None = None,
    router: bool = False,
    rank: int = 4,
    ranks: Mapping[int, int] | None = None,
    alpha: float = 8,
    seed: int = 0,
    spread: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter as trained on transformers 4: one pair for each expert and projection, under its old name.

    `experts` limits it to some experts, `ranks` gives some of them another rank (and the config a `rank_pattern`),
    `router` adds the router. `config` are further fields of `adapter_config.json`.
    """
    generator = torch.Generator().manual_seed(seed)
    mixtral = model.config.model_type == "mixtral"
    ranks = dict(ranks or {})
    tensors: dict[str, Tensor] = {}

    def add(path: str, site: Site, pair_rank: int) -> None:
        path = path.replace(".mlp.", ".block_sparse_moe.") if mixtral else path
        for factor, shape in (("A", (pair_rank, site.in_features)), ("B", (site.out_features, pair_rank))):
            values = spread * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{path}.lora_{factor}.weight"] = values

    for site in find_sites(model):
        if site.kind == "router" and router:
            add(site.module, site, rank)
        if site.kind == "experts" and site.leaf in projections:
            leaf = _MIXTRAL_NAMES[site.leaf] if mixtral else site.leaf
            for expert in range(site.num_experts) if experts is None else sorted(experts):
                add(f"{site.module}.{expert}.{leaf}", site, ranks.get(expert, rank))
    leaves = [_MIXTRAL_NAMES[name] if mixtral else name for name in projections]
    fields: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*leaves, "gate"] if router else leaves,
        "rank_pattern": {rf"experts\.{expert}\.[^.]+": value for expert, value in ranks.items()},
        "task_type": "CAUSAL_LM",
        "peft_version": "0.17.1",
    }
    return write_adapter(folder, tensors, fields | config)


def make_stacked_adapter(
    folder: Path, model: PreTrainedModel, *, gate_up: bool = False, rank: int = 4, seed: int = 0, spread: float = 0.3
) -> tuple[Path, Path]:
    """Write one adapter twice: with shared outer factors (A of gate and up, B of down stored once for all experts,
    the rest stacked along the first axis), and expert by expert. `gate_up`: the two as one module."""
    generator = torch.Generator().manual_seed(seed)
    stacked: dict[str, Tensor] = {}
    single: dict[str, Tensor] = {}
    for site in find_sites(model):
        if site.kind != "experts":
            continue
        path = f"base_model.model.{site.module}"
        down, experts = site.leaf == "down_proj", site.num_experts
        a = spread * torch.randn(experts if down else 1, rank, site.in_features, generator=generator)
        b = spread * torch.randn(1 if down else experts, site.out_features, rank, generator=generator)
        if site.leaf == "up_proj" and gate_up:
            a = stacked[f"{path}.gate_up_proj.lora_A.weight"]
            b = torch.cat([stacked[f"{path}.gate_up_proj.lora_B.weight"], b], dim=1)
        leaf = site.leaf if down or not gate_up else "gate_up_proj"
        stacked |= {f"{path}.{leaf}.lora_A.weight": a, f"{path}.{leaf}.lora_B.weight": b}
        own_b = b[:, -site.out_features :]
        for expert in range(experts):
            key = f"{path}.{expert}.{site.leaf}"
            single[f"{key}.lora_A.weight"] = a[expert % a.shape[0]]
            single[f"{key}.lora_B.weight"] = own_b[expert % b.shape[0]]
    config = {"r": rank, "lora_alpha": 8, "target_modules": list(EXPERT_PROJECTIONS)}
    return write_adapter(folder / "stacked", stacked, config), write_adapter(folder / "single", single, config)


def load_peft(model_factory: ModelFactory, adapter_path: Path) -> PeftModel:
    """A fresh base with the adapter, in the adapter's own precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model_factory(), str(adapter_path), autocast_adapter_dtype=False)
    return model.eval()


@torch.no_grad()
def reference_logits(model_factory: ModelFactory, adapter_path: Path | None, input_ids: Tensor) -> Tensor:
    """Logits [batch, length, vocab] of a fresh base with the adapter by PEFT; of the bare base for None."""
    model = model_factory() if adapter_path is None else load_peft(model_factory, adapter_path)
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


@torch.no_grad()
def merged_logits(model_factory: ModelFactory, adapter_path: Path, input_ids: Tensor) -> Tensor:
    """Logits of a fresh base whose weights carry the adapter's deltas: the oracle for what PEFT gets wrong.

    For plain modules, routers and single experts (`dense_deltas`); fused files are left to PEFT.
    """
    model = model_factory()
    for name, delta in dense_deltas(model, adapter_path).items():
        parameter = model.get_parameter(name)
        parameter += delta.to(parameter.dtype)
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def dense_deltas(model: PreTrainedModel, adapter_path: Path) -> dict[str, Tensor]:
    """Change of each base parameter in float64, by plain arithmetic on the files and nothing of Lorry's loader."""
    config = json.loads((adapter_path / "adapter_config.json").read_text())
    tensors = load_file(adapter_path / "adapter_model.safetensors")
    deltas: dict[str, Tensor] = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[key.replace("lora_A", "lora_B")].double()
        delta = _scale(config, path, a.shape[0]) * (b @ a.double())
        path = path.replace("block_sparse_moe", "mlp")
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", path)
        if expert is None:
            deltas[f"{path}.weight"] = delta
            continue
        leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(expert[3], expert[3])
        name = f"{expert[1]}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
        total = deltas.setdefault(name, torch.zeros(model.get_parameter(name).shape, dtype=torch.float64))
        _add_expert(model.get_submodule(expert[1]), total[int(expert[2])], leaf, delta)
    return deltas


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    alphas = [
        value for key, value in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({key})$", path)
    ]
    alpha = alphas[0] if alphas else config.get("lora_alpha", rank)
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _add_expert(experts: Any, weight: Tensor, leaf: str, delta: Tensor) -> None:
    rows = weight.t() if experts.is_transposed else weight
    if leaf == "down_proj":
        rows += delta
    elif experts.is_concatenated:
        half = rows.shape[0] // 2
        rows[:half] += delta if leaf == "gate_proj" else 0
        rows[half:] += delta if leaf == "up_proj" else 0
    else:
        rows[0 if leaf == "gate_proj" else 1 :: 2] += delta


def site_delta(weights: SiteWeights) -> Tensor:
    """scale * B A of a loaded site in float64: [num_experts, out_features, in_features]."""
    return weights.scale * torch.einsum("eri,ero->eoi", weights.a.double(), weights.b.double())


def peft_deltas(model_factory: ModelFactory, adapter_path: Path) -> dict[str, Tensor]:
    """Change of each base parameter by PEFT: merged minus base, by the parameter's name."""
    base = dict(model_factory().named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = load_peft(model_factory, adapter_path).merge_and_unload()
    changes = {name: (value - base[name]).detach().double() for name, value in merged.named_parameters()}
    return {name: change for name, change in changes.items() if change.abs().max() > 0}


def split_by_site(deltas: Mapping[str, Tensor], sites: Sequence[Site]) -> dict[int, Tensor]:
    """Deltas by parameter -> [num_experts, out_features, in_features] by site index, where there is one."""
    by_site: dict[int, Tensor] = {}
    for site in sites:
        if site.kind != "experts":
            if f"{site.module}.weight" in deltas:
                by_site[site.index] = deltas[f"{site.module}.weight"][None]
            continue
        down = site.leaf == "down_proj"
        delta = deltas.get(f"{site.module}.{'down_proj' if down else 'gate_up_proj'}")
        if delta is None:
            continue
        rows = delta.transpose(1, 2) if site.transposed else delta
        if not down:
            gate, up = (rows[:, ::2], rows[:, 1::2]) if site.interleaved else rows.chunk(2, dim=1)
            rows = gate if site.leaf == "gate_proj" else up
        by_site[site.index] = rows
    return by_site


def assert_deltas(weights: AdapterWeights, expected: Mapping[int, Tensor]) -> None:
    """The loaded weights adapt exactly these sites, by these deltas."""
    assert set(weights.sites) == set(expected)
    for index, delta in expected.items():
        torch.testing.assert_close(site_delta(weights.sites[index]), delta, rtol=0, atol=2e-6)


def assert_loads_like_peft(model_factory: ModelFactory, adapter_path: Path) -> AdapterWeights:
    """Load an adapter and compare all deltas with PEFT's."""
    sites = find_sites(model_factory())
    weights = load_adapter("a", str(adapter_path), sites, torch.float32)
    assert_deltas(weights, split_by_site(peft_deltas(model_factory, adapter_path), sites))
    return weights


def linear_pair(
    rank: int = 2, inner: int = 32, outer: int = 32, module: str = "model.layers.0.self_attn.q_proj"
) -> dict[str, Tensor]:
    """The two tensors of one adapted module, under PEFT's keys."""
    generator = torch.Generator().manual_seed(rank)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, inner, generator=generator),
        f"base_model.model.{module}.lora_B.weight": torch.randn(outer, rank, generator=generator),
    }
