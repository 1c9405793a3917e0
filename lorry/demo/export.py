"""Saving a trained adapter small and free of local paths, in today's fused or in transformers 4's per-expert keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lorry.demo import ADAPTERS, EXAMPLES
from lorry.demo.model import MODEL_NAME, NUM_EXPERTS

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
FUSED_KEY = re.compile(r"(?P<layer>.*)\.mlp\.experts\.(?P<inner>base_layer\.)?lora_(?P<factor>[AB])\.weight")


def save_adapter(name: str, model: PeftModel, folder: Path, per_expert_keys: bool) -> None:
    """Write config, bfloat16 weights and card of the model's only adapter into `folder`."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").write_text(card(name))
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    config: dict[str, Any] = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = MODEL_NAME
    for name in ("target_modules", "target_parameters"):
        config[name] = sorted(config[name] or []) or None
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(weights_path).items()}
    if per_expert_keys:
        weights = split_experts(weights, NUM_EXPERTS)
        config["target_modules"] = sorted({*(config["target_modules"] or []), "w1", "w2", "w3"})
        config["target_parameters"] = None
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(weights, weights_path, metadata={"format": "pt"})


def card(name: str) -> str:
    """A model card, from which the server takes what it shows of the adapter."""
    fields = {
        "base_model": MODEL_NAME,
        "library_name": "peft",
        "license": "apache-2.0",
        "description": ADAPTERS[name],
        "widget": [{"text": EXAMPLES[name]}],
    }
    front = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    text = f"A LoRA of Lorry's demo: {ADAPTERS[name]}. `report.json` has its evaluation."
    return f"---\n{front}---\n# {name}\n\n{text}\n"


def split_experts(weights: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The same LoRA in one pair of 2-D matrices for each expert and projection, as Mixtral had in transformers 4.

    Fused: A [E * r, in] with the expert slowest, B [out, r * E] with the expert fastest; the inner wrapper is
    gate_up_proj, whose halves w1 (gate) and w3 (up) share A. Per expert: A [r, in], B [out, r].
    """
    split: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items():
        match = FUSED_KEY.fullmatch(key)
        if match is None:
            split[key] = tensor
            continue
        is_a, is_gate_up = match["factor"] == "A", match["inner"] is not None
        for expert in range(num_experts):
            if is_a:
                part = tensor.reshape(num_experts, -1, tensor.shape[1])[expert]
                parts = {"w1": part, "w3": part} if is_gate_up else {"w2": part}
            else:
                part = tensor.reshape(tensor.shape[0], -1, num_experts)[:, :, expert]
                parts = dict(zip(("w1", "w3"), part.chunk(2), strict=True)) if is_gate_up else {"w2": part}
            for projection, matrix in parts.items():
                name = f"{match['layer']}.block_sparse_moe.experts.{expert}.{projection}"
                split[f"{name}.lora_{match['factor']}.weight"] = matrix.clone().contiguous()
    return split
