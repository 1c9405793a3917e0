"""Every family from its files, as a server loads it: the weights arrive and the hooks sit."""

from pathlib import Path

import pytest
import torch

from lorry.config import EngineConfig
from lorry.engine.build import build
from tests.engines import BASE, packed_logits
from tests.models import FAMILIES, random_tokens, tiny_model


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_from_its_files_computes_what_was_saved(family: str, dtype: str, tmp_path: Path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    said: list[str] = []
    config = EngineConfig.parse(model=str(tmp_path), dtype=dtype, max_total_tokens=128, lora_memory=2**20)
    parts = build(config, said.append)
    assert parts.info.dtype == ("float32" if dtype == "auto" else dtype)
    assert any("loading the weights" in line for line in said)
    tokens = random_tokens(20)
    ours = packed_logits(parts, [tokens[0].tolist()], [BASE], [[(0, 13)], [(13, 20)]])[0]
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits[0]
    tolerance = 2e-5 if dtype == "auto" else 0.2 * expected.std().item()
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=0)


def test_a_model_in_many_files(tmp_path: Path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    said: list[str] = []
    config = EngineConfig.parse(model=str(tmp_path), max_total_tokens=128, lora_memory=2**20)
    parts = build(config, said.append)
    assert any("GB/s" in line for line in said)
    tokens = random_tokens(20)
    ours = packed_logits(parts, [tokens[0].tolist()], [BASE], [[(0, 20)]])[0]
    with torch.no_grad():
        torch.testing.assert_close(ours, model(input_ids=tokens, use_cache=False).logits[0], atol=2e-5, rtol=0)
