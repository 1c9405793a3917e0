"""Faults that users of LoRA servers met, on whole tiny models: our logits against PEFT or merged weights."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import (
    FUSED_EXPERTS,
    make_peft_adapter,
    make_per_expert_adapter,
    merged_logits,
    reference_logits,
    write_adapter,
)
from tests.engines import BASE, load_slot, make_parts, mixed_steps, packed_logits
from tests.models import random_tokens, tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def logits_of(family: str, paths: list[Path]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tokens, our logits) of one prompt for each adapter and two base prompts around them, in one packed batch."""
    parts = make_parts(tiny_model(family))
    slots = [BASE, *(load_slot(parts, path) for path in paths), BASE]
    prompts = [random_tokens(6 + 5 * i, seed=i)[0] for i in range(len(slots))]
    steps = mixed_steps([len(p) for p in prompts])
    return prompts, packed_logits(parts, [p.tolist() for p in prompts], slots, steps)


def assert_equal_to_peft(family: str, paths: list[Path], oracle=reference_logits) -> None:
    factory = partial(tiny_model, family)
    prompts, ours = logits_of(family, paths)
    expected = [
        (reference_logits if path is None else oracle)(factory, path, prompt[None])[0]
        for path, prompt in zip([None, *paths, None], prompts, strict=True)
    ]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
    for prompt, theirs in zip(prompts[1:-1], expected[1:-1], strict=True):
        assert (theirs - reference_logits(factory, None, prompt[None])[0]).abs().max() > 1e-2


@pytest.mark.parametrize("rank", [16, 64])
def test_f01_rslora_scale_is_alpha_over_root_rank(rank: int, tmp_path: Path):
    factory = partial(tiny_model, "llama")
    make = partial(
        make_peft_adapter, model_factory=factory, target_modules=ATTENTION, rank=rank, alpha=16, spread=0.1
    )
    paths = [make(tmp_path / "rs", use_rslora=True), make(tmp_path / "plain", use_rslora=False)]
    assert_equal_to_peft("llama", paths)


def test_f31_base_biases_stay_and_a_zero_b_changes_nothing(tmp_path: Path):
    """Qwen2 has biases on q, k and v."""
    factory = partial(tiny_model, "qwen2")
    trained = make_peft_adapter(tmp_path / "trained", factory, ATTENTION, rank=4)
    tensors = load_file(trained / "adapter_model.safetensors")
    zeroed = {key: torch.zeros_like(t) if "lora_B" in key else t for key, t in tensors.items()}
    config = json.loads((trained / "adapter_config.json").read_text())
    zero = write_adapter(tmp_path / "zero", zeroed, config)
    prompts, ours = logits_of("qwen2", [zero, trained])
    base = [reference_logits(factory, None, prompt[None])[0] for prompt in prompts]
    for i in (0, 1, 3):
        torch.testing.assert_close(ours[i], base[i], atol=2e-5, rtol=0)
    assert (ours[2] - base[2]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "targets", [["q_proj"], ["v_proj"], ["k_proj"], ["gate_proj"], ["up_proj"], ["q_proj", "v_proj"]]
)
def test_f36_some_of_the_sibling_projections(targets: list[str], tmp_path: Path):
    """Grouped-query attention: k and v are narrower than q."""
    path = make_peft_adapter(tmp_path / "some", partial(tiny_model, "qwen3"), targets, rank=5)
    assert_equal_to_peft("qwen3", [path])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_m01_both_parts_of_a_fused_expert_adapter_work(family: str, tmp_path: Path):
    """Experts alone, and experts with attention in the same file."""
    factory = partial(tiny_model, family)
    make = partial(make_peft_adapter, model_factory=factory, target_parameters=FUSED_EXPERTS, rank=4, spread=0.2)
    assert_equal_to_peft(family, [make(tmp_path / "experts"), make(tmp_path / "both", target_modules=ATTENTION)])


def test_m15_attention_only_on_a_mixture_of_experts(tmp_path: Path):
    path = make_peft_adapter(tmp_path / "attention", partial(tiny_model, "mixtral"), ATTENTION, rank=4)
    assert_equal_to_peft("mixtral", [path])


def test_m21_per_expert_and_fused_form_give_the_same_output(tmp_path: Path):
    """The same adapter in the old keys, and fused: one A for gate and up of twice the rank, B block-diagonal."""
    model = tiny_model("qwen3_moe")
    old = make_per_expert_adapter(tmp_path / "old", model, rank=3, alpha=6, spread=0.2)
    tensors = load_file(old / "adapter_model.safetensors")
    num_experts, rank = model.config.num_experts, 3
    fused: dict[str, torch.Tensor] = {}
    for layer in range(model.config.num_hidden_layers):
        path = f"base_model.model.model.layers.{layer}.mlp.experts"
        pairs = {
            (p, f): torch.stack([tensors[f"{path}.{e}.{p}_proj.lora_{f}.weight"] for e in range(num_experts)])
            for p in ("gate", "up", "down")
            for f in "AB"
        }
        a = torch.cat([pairs["gate", "A"], pairs["up", "A"]], dim=1)
        b = torch.stack([torch.block_diag(g, u) for g, u in zip(pairs["gate", "B"], pairs["up", "B"], strict=True)])
        fused[f"{path}.base_layer.lora_A.weight"] = a.reshape(num_experts * 2 * rank, -1)
        fused[f"{path}.base_layer.lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], -1)
        fused[f"{path}.lora_A.weight"] = pairs["down", "A"].reshape(num_experts * rank, -1)
        fused[f"{path}.lora_B.weight"] = pairs["down", "B"].permute(1, 2, 0).reshape(model.config.hidden_size, -1)
    config = {
        "r": rank,
        "lora_alpha": 6,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"mlp.experts.gate_up_proj": 2 * rank},
        "alpha_pattern": {"mlp.experts.gate_up_proj": 12},
        "peft_version": "0.21.2",
    }
    new = write_adapter(tmp_path / "new", fused, config)
    parts = make_parts(tiny_model("qwen3_moe"))
    slots = [load_slot(parts, old), load_slot(parts, new)]
    prompt = random_tokens(20)[0].tolist()
    first, second = packed_logits(parts, [prompt, prompt], slots, mixed_steps([20, 20]))
    torch.testing.assert_close(first, second, atol=2e-5, rtol=0)
    expected = merged_logits(partial(tiny_model, "qwen3_moe"), old, torch.tensor([prompt]))[0]
    torch.testing.assert_close(first, expected, atol=2e-5, rtol=0)
