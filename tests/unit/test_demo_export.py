"""Splitting a fused adapter into per-expert keys changes nothing that PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from lorry.demo.model import MODEL_NAME

peft = pytest.importorskip("peft")


@pytest.fixture
def base() -> MixtralForCausalLM:
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")
def test_split_experts_give_the_logits_of_the_fused_adapter(base: MixtralForCausalLM, tmp_path: Path) -> None:
    from lorry.demo.export import save_adapter

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=targets)
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter).to(torch.bfloat16).float() * 0.25
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        fused = model(ids).logits
    save_adapter("json", model, tmp_path, per_expert_keys=True)
    plain = model.unload()
    with torch.no_grad():
        without = plain(ids).logits
        split = peft.PeftModel.from_pretrained(plain, tmp_path)(ids).logits

    assert (fused - without).abs().max() > 0.01
    torch.testing.assert_close(split, fused, rtol=1e-4, atol=1e-4)

    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert len(weights) == 2 * 4 * 3 * 2
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w1.lora_B.weight"
    assert weights[name].shape == (48, 2)
    assert weights[name].dtype == torch.bfloat16
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == MODEL_NAME
    assert config["target_modules"] == ["w1", "w2", "w3"]
    assert str(tmp_path) not in (tmp_path / "adapter_config.json").read_text()
