"""Tiny random models of real architectures: small enough for any test, random enough that a mistake shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# Experts are chosen so that I, 2I and H all differ: no transposed projection has the right shape by chance.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48},
    "qwen2": {"intermediate_size": 48},
    "qwen3": {"intermediate_size": 48, "head_dim": 16},
    "qwen3_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {
        "intermediate_size": 24,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v3": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    },
}

FAMILIES = tuple(_FAMILIES)
MOE_FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of `family` (one of `FAMILIES`) in float32 and eval mode; equal arguments give equal weights.

    `overrides` are fields of its transformers config. Matrices have a spread of 0.2; norms, biases, attention sinks
    and the router's correction bias are random too, so that leaving one out changes the logits.
    """
    config = AutoConfig.for_model(family, **(_COMMON | _FAMILIES[family] | overrides))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    return model.eval()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter, and the buffers that are trained, in place."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *buffers]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight") or name.endswith("layernorm.weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("sinks"):
                tensor.copy_(noise)
            else:
                tensor.copy_(0.2 * noise)


def random_tokens(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Token ids [batch, length] that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)
