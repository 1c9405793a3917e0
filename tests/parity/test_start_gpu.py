"""Starting on a GPU: weights straight to it, memory divided by measurement, dummy adapters in place."""

import json
from pathlib import Path

import pytest
import torch

from lorry.config import EngineConfig
from lorry.engine.build import build
from lorry.engine.engine import Engine
from lorry.errors import ConfigError
from tests.engines import BASE, packed_logits, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


def dummy(folder: Path, **settings: object) -> EngineConfig:
    config = tiny_model("qwen3_moe", **SHAPE).config.to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    defaults = {"dtype": "bfloat16", "load_format": "dummy", "lora_memory": 2**28, "max_running_requests": 16}
    return EngineConfig.parse(model=str(folder), **(defaults | settings))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_from_shards_are_those_that_were_saved(family: str, tmp_path: Path):
    model = tiny_model(family, **(SHAPE if family == "qwen3_moe" else {}))
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    said: list[str] = []
    config = EngineConfig.parse(model=str(tmp_path), dtype="bfloat16", max_total_tokens=512, lora_memory=2**26)
    parts = build(config, said.append)
    assert any("GB/s" in line for line in said)
    state = parts.loaded.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert state[name].device.type == "cuda"
        assert torch.equal(state[name].cpu(), tensor.to(state[name].dtype)), name


def test_p12_memory_is_divided_and_a_full_engine_stays_within_it(tmp_path: Path):
    said: list[str] = []
    config = dummy(tmp_path, dummy_adapters=4, chunked_prefill_size=1024, mem_fraction_static=0.5)
    engine = Engine(config, said.append)
    table = next(line for line in said if line.startswith("memory of"))
    for part in ("weights", "arena of adapters", "largest step", "graphs", "KV pool"):
        assert part in table
    limit = torch.cuda.mem_get_info()[1] * 0.5
    assert torch.cuda.memory_allocated() < limit
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    requests = [
        request(str(i), random_tokens(700 + 5 * i, seed=i)[0].tolist(), engine, f"dummy-{i % 4}", ignore_eos=True)
        for i in range(16)
    ]
    outputs = run_engine(engine, requests)
    assert all(len(tokens_of(output)) == 8 for output in outputs.values())
    assert torch.cuda.memory_reserved() <= before + 2**26  # what it needs, it had from the start


def test_decode_by_graph_gives_the_logits_of_prefill_after_the_pool_has_grown(tmp_path: Path):
    engine = Engine(dummy(tmp_path, dummy_adapters=1, max_total_tokens=8192))
    prompt = random_tokens(40)[0].tolist()
    outputs = run_engine(engine, [request("a", prompt, engine, "dummy-0", ignore_eos=True, logprobs=1)])["a"]
    parts = engine._parts
    slot = parts.dummies[0].slot
    whole = prompt + tokens_of(outputs)
    rows = packed_logits(parts, [whole], [slot], [[(0, len(whole))]])[0].float().log_softmax(-1)
    for i, output in enumerate(outputs):
        expected = rows[len(prompt) - 1 + i, output.token_ids[0]].item()
        assert output.logprobs[0].logprob == pytest.approx(expected, abs=0.1)
    base = packed_logits(parts, [whole], [BASE], [[(0, len(whole))]])[0].float().log_softmax(-1)
    assert (base - rows).abs().max() > 0.01


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"mem_fraction_static": 0.001}, "--mem-fraction-static"),
        ({"lora_memory": 2**50}, "--lora-memory"),
        ({"max_total_tokens": 2**40}, "--max-total-tokens"),
    ],
)
def test_what_does_not_fit_is_explained_with_a_table(settings: dict, flag: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="out of memory on cuda") as caught:
        build(dummy(tmp_path, **settings), lambda text: None)
    assert flag in str(caught.value)
    assert "of which may be used" in str(caught.value)
