"""Models that would be served wrongly are refused at load, with the reason."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from lorry.attention.torch import TorchAttention
from lorry.errors import ConfigError, UnsupportedModel
from lorry.models.loader import read_config
from tests.engines import make_parts
from tests.models import tiny_model

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' rotary",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "'longrope' rotary",
        ),
        ("llama4_text", {"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 2}, "chunked"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention'"),
        ("mamba2", {}, "mamba2 models are not served"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "'conv'"),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_refused_with_the_reason(family: str, fields: dict, reason: str, tmp_path: Path):
    config = AutoConfig.for_model(family, **(({} if family in ("t5", "mamba2") else SMALL) | fields))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=re.escape(family)) as caught:
        read_config(str(tmp_path))
    assert reason in str(caught.value)


def test_a_model_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(str(tmp_path / "nothing"))


def test_the_self_check_finds_attention_that_is_wrong(monkeypatch: pytest.MonkeyPatch):
    right = TorchAttention.run

    def forgets_the_window(self, q, k, v, kv, params):
        return right(self, q, k, v, kv, type(params)(params.scale, None, None, None))

    monkeypatch.setattr(TorchAttention, "run", forgets_the_window)
    make_parts(tiny_model("llama"))
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        make_parts(tiny_model("gpt_oss"))


def test_the_self_check_finds_experts_that_are_wrong(monkeypatch: pytest.MonkeyPatch):
    from lorry.lora.experts.virtual import VirtualExperts

    monkeypatch.setattr(VirtualExperts, "forward", lambda self, layer, hidden, *_: torch.zeros_like(hidden))
    with pytest.raises(UnsupportedModel, match="self-check failed"):
        make_parts(tiny_model("qwen3_moe"))


def test_sizes_that_contradict_each_other():
    with pytest.raises(ConfigError, match="512 is more than the 256 positions"):
        make_parts(tiny_model("llama"), context_length=512)
    with pytest.raises(ConfigError, match="does not fit into the 64 tokens"):
        make_parts(tiny_model("llama"), context_length=128, max_total_tokens=64)
    assert make_parts(tiny_model("llama"), max_total_tokens=64).info.context_length == 64
