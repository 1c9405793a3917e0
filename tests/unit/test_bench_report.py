"""The page on performance from a few lines of results; plots only where matplotlib is installed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import report, tables
from bench.tables import BASE, Setting
from bench.timing import Line

EIGHT = Setting(True, 8, 16, "distinct")


def engine(batch: int, decode: float, of: Setting = BASE, **changes: object) -> dict:
    """A line of bench.engine, whose prefill is ten times as fast."""
    rates = {
        name: {"p20": rate * 0.9, "p50": rate, "p80": rate}
        for name, rate in (("decode", decode), ("prefill", 10 * decode))
    }
    line = {
        "benchmark": "engine",
        "gpu": "G",
        "commit": "abc",
        "torch": "2",
        "workload": "qwen3-30b-a3b",
        "batch": batch,
    }
    line |= {"lora": of.lora, "adapters": of.adapters, "mix": of.mix or None, "rank": of.rank or None}
    line |= {f"{name}_tokens_per_s": rate for name, rate in rates.items()}
    return line | {"input": 1024, "output": 256, "decode_steps": 9, "prefill_repeats": 1} | changes


def peer(decode: dict, prefill: float | None, of: Setting = BASE) -> dict:
    line = {
        "benchmark": "peer engine",
        "engine": "vLLM",
        "version": "1.2",
        "settings": "all on",
        "source": "measured",
    }
    line |= {
        "variant": None,
        "workload": "qwen3-30b-a3b",
        "lora": of.lora,
        "adapters": of.adapters,
        "rank": of.rank or None,
    }
    return line | {"decode_tokens_per_s": decode, "prefill_tokens_per_s": prefill}


def kernel(
    op: str, impl: str, us: float, rows: int = 8, adapters: int = 8, rank: int = 16, **changes: object
) -> dict:
    """A line of bench/kernels.py: the base takes 2, the floor is 1."""
    bare = impl in ("base", "plain")
    what = ("none", 0, 0) if bare else ("distinct", rank, adapters)
    base_us = None if impl == "base" else 2.0
    line = Line("G", "abc", "2", "3", op, "qwen3-30b-a3b", impl, rows, *what, us, us * 0.9, us, 1.0, base_us, 4.0)
    return asdict(line) | changes


RESULTS = {
    "engine": [
        engine(1, 999.0, commit="old"),
        engine(1, 100.0),
        engine(8, 500.0),
        engine(1, 80.0, EIGHT),
        engine(8, 400.0, EIGHT, prefill_tokens_per_s=None),
        engine(8, 450.0, Setting(True, 64, 4, "zipf")),
    ],
    "peers": [peer({"1": 50}, 6000), peer({"1": [30, 40]}, 3000, EIGHT)],
    "kernels": [
        kernel("experts", "base", 2.0),
        kernel("experts", "fused", 3.0),
        kernel("experts", "merged", 2.5),
        kernel("experts", "fused", 5.0, rank=64),
        kernel("qkv", "base", 2.0),
        kernel("qkv", "csgmv", 2.2),
        kernel("qkv", "triton", 4.4, mix="zipf"),
        kernel("qkv", "csgmv", 3.3, mix="zipf"),
        kernel("experts", "base", 2.1),
    ],
    "quick": [
        kernel("experts", name, us) for name, us in (("base", 2.0), ("fused", 2.4), ("merged", 4.0), ("vllm", 6.0))
    ],
    "other": [{"benchmark": "throughput"}, {"op": "prefill", "backend": "triton"}],
}


def read(folder: Path, *names: str) -> tables.Results:
    for name in names:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RESULTS[name]) + "\n")
    return tables.read(folder)


def test_engine_beside_its_peers(tmp_path: Path):
    section = report.sections(read(tmp_path, "engine", "peers"))["engine"]
    assert [line for line in section.splitlines() if line.startswith("|")] == [
        "| requests | engine | decode, batch 1 | decode, batch 8 | prefill |",
        "|---|---|---|---|---|",
        "| base, no LoRA | Lorry | 100 | 500 | 5,000 |",
        "| base, no LoRA | vLLM | 50 |  | 6,000 |",
        "| 8 x rank 16 | Lorry | 80 (0.80) | 400 (0.80) |  |",
        "| 8 x rank 16 | vLLM | 30 to 40 (0.70) |  | 3,000 (0.50) |",
        "| 64 x rank 4, zipf | Lorry |  | 450 (0.90) | 4,500 (0.90) |",
    ]
    text = " ".join(section.split())
    assert "Qwen3-30B-A3B's shape on G, commit abc, torch 2: 1,024 tokens in" in text
    assert "the median of 9 steps, p20 to p80 at most 10 %" in text
    assert "vLLM 1.2 (all on; measured)" in text


def test_kernels_by_the_run_that_has_the_most(tmp_path: Path):
    sections = report.sections(read(tmp_path, "kernels", "quick", "other"))
    assert "Experts block of Qwen3-30B-A3B (`quick.jsonl`)" in sections["experts"]
    assert "| 8 | 2.0 | 2.00 | 2.4 (1.20) | 4.0 (2.00) | 6.0 (3.00) |" in sections["experts"]
    assert "| 8 | 2.0 | 2.00 | 2.2 (1.10) |" in sections["linears"]
    assert "| 8 | 1.50 (1.25) |  |  |  | 2.50 |" in sections["sets"]
    assert "| 8 | 0.75 (0.75) |" in sections["ratios"]
    assert (
        "| `fused`, `merged` | 2 | 1 | 1.20 at `experts` of Qwen3-30B-A3B, 8 rows, 8 x rank 16 |"
        in sections["losses"]
    )
    assert "| `csgmv`, `triton` | 1 | 0 |  |" in sections["losses"]
    assert "9 measurements; from p20 to p80" in " ".join(sections["runs"].split())
    assert (sections["engine"], sections["attention"]) == ("", "")


def test_only_marked_parts_with_lines_are_written(tmp_path: Path):
    page = "a\n<!-- report: engine -->\nold\n<!-- end -->\nb\n<!-- report: ratios -->\nold\n<!-- end -->\nc\n"
    found = report.sections(read(tmp_path, "kernels"))
    new = report.written(page, found)
    assert new == page.replace("ratios -->\nold\n", f"ratios -->\n\n{found['ratios']}\n\n")
    assert report.written(new, found) == new
    with pytest.raises(ValueError, match="nobody"):
        report.written(page.replace("ratios", "nobody"), found)


def test_the_page_has_a_place_for_everything(capsys):
    page = (report.ROOT / "docs/performance.md").read_text()
    assert {match[2] for match in report.BLOCK.finditer(page)} == report.sections(tables.Results({}, {}, {})).keys()
    report.main(["--print"])
    assert "| rows | base | times its floor |" in capsys.readouterr().out


@pytest.mark.parametrize("names", [(), ("engine",), ("kernels", "quick"), tuple(RESULTS)])
def test_plots_are_the_same_every_time(tmp_path: Path, names: tuple[str, ...]):
    pytest.importorskip("matplotlib")
    results = read(tmp_path, *names)
    for folder in ("one", "two"):
        report.draw_all(results, tmp_path / folder)
    drawn = {file.name: file.read_bytes() for file in tmp_path.glob("one/*.svg")}
    engine_plots = {f"{plot}-qwen3-30b-a3b.svg" for plot in report.ENGINE_PLOTS}
    assert drawn.keys() == (engine_plots if "engine" in names else set()) | (
        {"experts.svg"} if "kernels" in names else set()
    )
    for name, plot in drawn.items():
        assert plot == (tmp_path / "two" / name).read_bytes()
        assert b"<dc:date>" not in plot
