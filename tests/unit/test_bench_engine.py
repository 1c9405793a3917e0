"""The offline benchmark, on its smallest workload."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from bench import engine as bench

TINY = ["--workload", "tiny", "--layers", "1", "--input", "20", "--output", "8", "--seconds", "1", "--repeats", "1"]
SMALL = ["--set", "max_total_tokens=512", "lora_memory=8MiB", "dtype=float32"]


def test_every_combination_gives_a_line(tmp_path: Path, capsys):
    out, profile = tmp_path / "engine.jsonl", tmp_path / "profile.txt"
    argv = ["--adapters", "none", "0", "2", "--batch", "2", "--rank", "4", "--commit", "abc"]
    bench.main([*TINY, *argv, *SMALL, "--out", str(out), "--profile", str(profile)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["lora"], line["adapters"], line["mix"]) for line in lines] == [
        (False, 0, None),
        (True, 0, None),
        (True, 2, "distinct"),
        (True, 2, "zipf"),
    ]
    for line in lines:
        assert (line["workload"], line["batch"], line["commit"]) == ("tiny (1 layers)", 2, "abc")
        for rates in (line["decode_tokens_per_s"], line["prefill_tokens_per_s"]):
            assert 0 < rates["p20"] <= rates["p50"] <= rates["p80"]
        assert line["decode_steps"] > 0
    assert [line["rank"] for line in lines] == [None, None, 4, 4]
    assert profile.read_text().count("decode steps, no GPU") == 4
    assert "batch    2, adapters 2, zipf: decode" in capsys.readouterr().out


def test_mixes():
    assert bench.Combination(5, 2, "distinct").names() == ["dummy-0", "dummy-1"] * 2 + ["dummy-0"]
    assert bench.Combination(2, 0, "zipf").names() == [None, None]
    drawn = bench.Combination(4000, 8, "zipf").names()
    assert drawn.count("dummy-0") / drawn.count("dummy-3") == pytest.approx(4, rel=0.25)


def test_the_workloads_have_the_parameters_of_their_namesakes(tmp_path: Path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, billions in (("qwen3-30b-a3b", 30.53), ("llama-3.1-8b", 8.03)):
        config = AutoConfig.from_pretrained(bench.write_config(tmp_path, name, None))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_idle_share_is_the_time_in_which_nothing_ran():
    def event(start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [event(0, 2), event(1, 3), event(5, 10), event(6, 7), event(0, 99, DeviceType.CPU)]
    assert bench.gpu_idle_share(events) == pytest.approx(0.2)
    assert bench.gpu_idle_share(events[-1:]) is None
