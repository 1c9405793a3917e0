"""Random weights from a bare configuration, and random adapters on them."""

import json
from pathlib import Path

import pytest
import torch

from lorry.config import EngineConfig
from lorry.engine.build import build
from lorry.engine.engine import Engine
from lorry.errors import AdapterCapacity, ConfigError
from lorry.lora.dummy import dummy_bytes, dummy_sites
from lorry.models.sites import find_sites
from tests.engines import request, run_engine, tokens_of
from tests.models import FAMILIES, tiny_model


def bare_config(folder: Path, family: str) -> str:
    """A folder with config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_model(family).config.to_dict(), default=str))
    return str(folder)


def settings(model: str, **others: object) -> EngineConfig:
    defaults = {"load_format": "dummy", "max_total_tokens": 512, "lora_memory": 2**23, "dtype": "bfloat16"}
    return EngineConfig.parse(model=model, **(defaults | others))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_made_from_its_configuration(family: str, tmp_path: Path):
    parts = build(settings(bare_config(tmp_path, family)), lambda text: None)
    model = parts.loaded.model
    assert parts.info.dtype == "bfloat16"
    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2]
    spread = torch.cat([p.float().flatten() for p in matrices]).std().item()
    assert 0.018 < spread < 0.022
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 or name.endswith("mlp.gate.weight")  # transformers keeps some exact
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
    buffers = dict(tiny_model(family).named_buffers())
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            assert buffer.dtype == torch.float32
            torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)


def test_equal_configurations_give_equal_weights_and_leave_the_generator_alone(tmp_path: Path):
    config = settings(bare_config(tmp_path, "qwen3_moe"))
    torch.manual_seed(5)
    first = build(config, lambda text: None).loaded.model.state_dict()
    drawn = torch.rand(3)
    second = build(config, lambda text: None).loaded.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_an_engine_without_a_tokenizer_serves_dummy_adapters(tmp_path: Path):
    said: list[str] = []
    config = settings(bare_config(tmp_path, "qwen3_moe"), dummy_adapters=3, dummy_rank=4, dtype="float32")
    engine = Engine(config, said.append)
    assert list(engine.adapters) == ["dummy-0", "dummy-1", "dummy-2"]
    info = engine.adapters["dummy-1"]
    assert info.rank == 4
    assert set(info.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    assert any("3 dummy adapters of rank 4" in line for line in said)
    prompt = list(range(3, 40))
    names = (None, "dummy-0", "dummy-1", "dummy-2")
    requests = [request(str(name), prompt, engine, name, logprobs=1, ignore_eos=True, max_tokens=4) for name in names]
    outputs = run_engine(engine, requests)
    assert all(len(tokens_of(output)) == 4 for output in outputs.values())
    logprobs = {output[0].logprobs[0].top[0][1] for output in outputs.values()}
    assert len(logprobs) == 4  # each has weights of its own
    engine.unload_adapter("dummy-1")
    assert list(engine.adapters) == ["dummy-0", "dummy-2"]


def test_the_arena_is_as_large_as_the_dummies_need(tmp_path: Path):
    model = tiny_model("mixtral")
    sites = find_sites(model)
    chosen = dummy_sites(model, sites, None)
    parts = build(
        settings(bare_config(tmp_path, "mixtral"), dummy_adapters=2, dummy_rank=3, lora_memory=None),
        lambda text: None,
    )
    assert parts.lora.arena is not None
    used = parts.lora.arena.num_bytes - parts.lora.arena.num_free_bytes
    assert used == 2 * dummy_bytes(chosen, 3, torch.bfloat16)


def test_target_modules_choose_what_dummies_adapt(tmp_path: Path):
    folder = bare_config(tmp_path, "llama")
    engine = Engine(settings(folder, dummy_adapters=1, lora_target_modules=("gate_proj", "v_proj")))
    assert set(engine.adapters["dummy-0"].target_modules) == {"gate_proj", "v_proj"}
    with pytest.raises(ConfigError, match="leaves dummy adapters nothing to adapt; the model has .*q_proj"):
        Engine(settings(folder, dummy_adapters=1, lora_target_modules=("experts",)))


def test_dummies_that_do_not_fit_say_so(tmp_path: Path):
    config = settings(bare_config(tmp_path, "llama"), dummy_adapters=4, lora_memory=2**15)
    with pytest.raises(AdapterCapacity, match="'dummy-[0-9]' of 4: .*--lora-memory"):
        build(config, lambda text: None)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"load_format": "auto"}, "--load-format dummy"),
        ({"enable_lora": False}, "--no-enable-lora"),
        ({"dummy_adapters": 65}, "--max-loras-per-batch 64"),
        ({"max_lora_rank": 8}, "--dummy-rank 16 is above --max-lora-rank 8"),
    ],
)
def test_nonsense_names_the_way_out(others: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        settings("m", **({"dummy_adapters": 2} | others))


def test_a_folder_without_weights_names_the_way_out(tmp_path: Path):
    config = EngineConfig.parse(model=bare_config(tmp_path, "llama"))
    with pytest.raises(ConfigError, match="--load-format dummy"):
        build(config, lambda text: None)
