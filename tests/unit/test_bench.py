"""What the kernel benchmark could get wrong without anybody seeing it; no GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.kernels import parse, slower
from bench.kernels_dense import linear_work
from bench.kernels_moe import experts_work
from bench.peers import aligned, build_peers
from bench.timing import Ceilings, Line, Results, Work, distance
from bench.workload import MODELS, SETS, Group, batch, row_slots, sets

RATES = Ceilings(bytes_per_us=1000.0, flops_per_us=500.0)
LINE = Line("gpu", "abc", "2", "3", "qkv", "m", "csgmv", 8, "zipf", 16, 4, 2.0, 1.0, 3.0, 0.5, 1.5, 3.0)


def test_floor_is_the_larger_of_bytes_and_flops() -> None:
    assert RATES.floor_us(Work(4000, 1000)) == 4.0
    assert RATES.floor_us(Work(1000, 4000)) == 8.0
    assert RATES.floor_us(Work(1000, 0) + Work(2000, 100)) == 3.0


def test_linear_floor_by_hand() -> None:
    """4 -> 3 + 2 over 6 rows; 2 adapters of rank 1: A 2 x 4, B 3 + 2 elements each. Two bytes, two operations."""
    group = Group("g", 4, (3, 2))
    assert linear_work(group, 6) == Work(2 * (20 + 6 * 4 + 6 * 5), 2 * 6 * 20)
    assert linear_work(group, 6, rank=1, present=2) == Work(2 * (20 + 54 + 2 * 13), 2 * 6 * (20 + 13))


def test_experts_floor_counts_what_rows_reach() -> None:
    """Two rows at experts 0 and 1, and 0 and 2: three experts, four pairs of slot and expert where slots differ."""
    model = replace(MODELS[0], hidden=10, inter=4, experts=8, choices=2)
    index = torch.tensor([[0, 1], [0, 2]])
    one = 3 * 10 * 4
    assert experts_work(model, index) == Work(2 * (3 * one + 2 * 2 * 10), 2 * 4 * one)
    apart = experts_work(model, index, torch.tensor([0, 1], dtype=torch.int32), rank=2)
    assert apart == Work(2 * (3 * one + 40 + 4 * 2 * 42), 2 * (4 * one + 4 * 2 * 42))
    alike = experts_work(model, index, torch.tensor([1, 1], dtype=torch.int32), rank=2)
    assert alike.num_bytes == 2 * (3 * one + 40 + 3 * 2 * 42)


def test_lines_carry_all_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    results = Results(RATES, 10.0, out, "abc")
    results.add(LINE)
    results.add(replace(LINE, impl="base", base_us=None))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = "gpu commit torch triton op model impl rows mix rank adapters us p20 p80 floor_us base_us launches"
    assert list(lines[0]) == expected.split()
    assert [line["base_us"] for line in lines] == [1.5, None]
    printed = capsys.readouterr().out
    assert "x4.00 of floor  x1.333 of base  3 launches" in printed


def test_filters_choose_what_runs() -> None:
    everything = parse([])
    assert everything.sets == SETS
    assert everything.models == [model.name for model in MODELS]
    quick = parse(["--quick"])
    assert (quick.models, quick.sets, quick.mixes) == (["qwen3-30b-a3b"], ((8, 16),), ("distinct",))
    some = parse(
        [
            "--rows",
            "32",
            "2048",
            "--ranks",
            "8",
            "64",
            "--adapters",
            "2",
            "--ops",
            "qkv",
            "--models",
            "gpt-oss-20b",
            "--peers",
        ]
    )
    assert (some.rows, some.sets, some.ops) == ([32, 2048], ((2, 8), (2, 64)), ["qkv"])
    assert (some.models, some.peers) == (["gpt-oss-20b"], [])
    assert sets(None, [8]) == ((8, 8),)
    assert sets([1, 64], None) == ((1, 16), (64, 16))
    with pytest.raises(SystemExit):
        parse(["--ops", "norm"])


@pytest.mark.parametrize(("rows", "adapters"), [(1, 8), (32, 8), (128, 64), (2048, 8), (8192, 64)])
def test_batches_have_the_rows_asked_for(rows: int, adapters: int) -> None:
    requests = batch("distinct", rows, adapters)
    assert sum(requests.seq_lens) == rows
    assert (len(requests.slots) == rows) == (rows <= 128)
    slots = row_slots(requests, torch.device("cpu"))
    assert len(slots) == rows
    assert slots[0] == requests.slots[0]
    assert slots[-1] == requests.slots[-1]


def test_groups_of_models() -> None:
    widths = {model.name: {group.name: group.widths for group in model.groups} for model in MODELS}
    assert widths["qwen3-30b-a3b"] == {"qkv": (4096, 512, 512), "o": (2048,)}
    assert widths["llama-3.1-8b"]["qkv"] == (4096, 1024, 1024)
    assert widths["llama-3.1-8b"]["gate_up"] == (14336, 14336)
    assert widths["gpt-oss-20b"] == {"qkv": (4096, 512, 512), "o": (2880,)}


def test_slower_compares_like_with_like() -> None:
    lines = [LINE, replace(LINE, impl="triton", us=1.0), replace(LINE, rows=32), replace(LINE, impl="triton", rank=8)]
    assert slower(lines, "csgmv", "triton") == [(LINE, 2.0)]
    assert slower(lines, "triton", "csgmv") == []


def test_aligned_pads_each_key_to_blocks() -> None:
    positions, blocks, total = aligned(torch.tensor([2, 0, 2, 2]), 4, 2)
    assert positions.tolist() == [1, 4, 0, 2, 3, 4]
    assert blocks.tolist() == [0, 2, 2]
    assert total.tolist() == [6]


def test_distance_is_relative_and_sees_nan() -> None:
    assert distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert not distance(torch.tensor([float("nan"), 1.0]), torch.ones(2)) < 1.0


def test_a_missing_peer_is_said_once() -> None:
    def missing() -> None:
        raise ImportError("no such package")

    said: list[str] = []
    builders = {"nobody one": missing, "other": lambda: 1, "else": lambda: 2, "other none": lambda: None}
    for _ in range(2):
        assert build_peers(builders, said.append, ("nobody", "other")) == {"other": 1}
    assert said == ["-- nobody one is left out: ImportError: no such package"]
