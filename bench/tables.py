"""Reads bench/results and makes the Markdown of docs/performance.md; for `bench/report.py`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.kernels import slower
from bench.plots import Range
from bench.timing import Line
from bench.workload import FIRST_SET, MAX_DECODE, SETS

NAMES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "llama-3.1-8b": "Llama-3.1-8B", "gpt-oss-20b": "gpt-oss-20b"}
TITLES = {"experts": "Experts block", "attention": "Attention projections", "qkv": "q, k and v", "o": "o"}
TITLES |= {"gate_up": "gate and up", "down": "down"}
LINEAR_WAYS = ("csgmv", "triton", "sglang csgmv", "sglang triton", "vllm")
WAYS = {"experts": ("fused", "plain", "merged", "sglang", "vllm"), "attention": ("best", "separate")}
"""Of the other ops: LINEAR_WAYS. Ours come first."""
RIVALS = (
    *(("fused", way) for way in WAYS["experts"][2:]),
    ("best", "separate"),
    *(("csgmv", way) for way in LINEAR_WAYS[1:]),
)
SET_NAMES = [f"{adapters} x rank {rank}" for adapters, rank in SETS]


class Setting(NamedTuple):
    """What is on, and the adapters of the requests; rank and mix are empty without."""

    lora: bool
    adapters: int = 0
    rank: int = 0
    mix: str = ""


BASE = Setting(False)
Rates = dict[tuple[str, Setting, str, int], Range]
"""Tokens per second by engine, setting, `decode` or `prefill`, and batch (0: not recorded). Lorry comes first."""


@dataclass(frozen=True)
class Results:
    """Lines of our engine by workload, of the peers' by workload, and of kernels by file, each of which is a run."""

    engine: dict[str, list[dict[str, Any]]]
    peers: dict[str, list[dict[str, Any]]]
    kernels: dict[str, list[Line]]

    def rates(self, workload: str) -> Rates:
        """A peer's number may be a pair, from and to."""
        rates: Rates = {}
        for line in self.engine[workload]:
            for metric in ("decode", "prefill"):
                if of := line[f"{metric}_tokens_per_s"]:
                    rates["Lorry", setting(line), metric, line["batch"]] = (of["p20"], of["p50"], of["p80"])
        for line in self.peers.get(workload, []):
            name = ", ".join(filter(None, (line["engine"], line["variant"])))
            given = {("decode", int(batch)): value for batch, value in line["decode_tokens_per_s"].items()}
            for (metric, batch), value in (given | {("prefill", 0): line["prefill_tokens_per_s"]}).items():
                if value is not None:
                    low, high = value if isinstance(value, list) else (value, value)
                    rates[name, setting(line), metric, batch] = (low, (low + high) / 2, high)
        return rates


def read(folder: Path) -> Results:
    """Lines are known by their keys. Of lines of our engine that measure the same the last counts."""
    results = Results({}, {}, {})
    latest: dict[str, dict[tuple[int, Setting], dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, filter(str.strip, file.read_text().splitlines())):
            if line.get("benchmark") == "engine":
                latest.setdefault(line["workload"], {})[line["batch"], setting(line)] = line
            elif line.get("benchmark") == "peer engine":
                results.peers.setdefault(line["workload"], []).append(line)
            elif "impl" in line:
                results.kernels.setdefault(file.stem, []).append(Line(**line))
    results.engine.update({workload: [*lines.values()] for workload, lines in latest.items()})
    return results


def setting(line: dict[str, Any]) -> Setting:
    adapters = (line["adapters"], line["rank"], line.get("mix") or "distinct") if line["adapters"] else ()
    return Setting(line["lora"], *adapters)


def share(rates: Rates, engine: str, of: Setting, metric: str, batch: int) -> float | None:
    """Of the same engine's speed without LoRA."""
    key, base = (engine, of, metric, batch), (engine.partition(",")[0], BASE, metric, batch)
    return rates[key][1] / rates[base][1] if of != BASE and key in rates and base in rates else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, *rows)).replace("\n", f"\n|{'---|' * len(head)}\n", 1)


def prose(text: str) -> str:
    return textwrap.fill(text, 124, break_on_hyphens=False)


def each(values: Iterable[object]) -> str:
    """Distinct values, in order."""
    return ", ".join(dict.fromkeys(map(str, values)))


def bounds(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def spread(values: Iterable[Range]) -> str:
    """The widest, in shares of the median."""
    return f"{max(((high - low) / middle for low, middle, high in values), default=0) * 100:.0f} %"


# The engine


def engine_caption(lines: Sequence[dict[str, Any]], rates: Rates) -> str:
    ours = [values for (engine, _, metric, _), values in rates.items() if (engine, metric) == ("Lorry", "decode")]
    workload, gpu, commit, torch = (
        each(line[key] for line in lines) for key in ("workload", "gpu", "commit", "torch")
    )
    keys = ("input", "output", "decode_steps", "prefill_repeats")
    num_input, num_output, steps, repeats = (bounds([line[key] for line in lines]) for key in keys)
    return prose(
        f"Tokens per second of {NAMES.get(workload, workload)}'s shape on {gpu}, commit {commit}, torch {torch}: "
        f"{num_input} tokens in, up to {num_output} out, adapters by number and rank; in brackets the share of the "
        f"same engine's speed without LoRA. Decode is the median of {steps} steps, p20 to p80 at most "
        f"{spread(ours)} of it; prefill are the medians of {repeats} repeats with batches of 8 and more."
    )


def peers_caption(peers: Sequence[dict[str, Any]]) -> str:
    keys = ("engine", "version", "settings", "source")
    known = dict.fromkeys(tuple(line[key] or "" for key in keys) for line in peers)
    text = "; ".join(f"{name} {version}".strip() + f" ({how}; {source})" for name, version, how, source in known)
    return prose(
        f"The others, of which neither spread nor the batch of the prefill was recorded: {text}. In the plot of the "
        "prefill their one number stands at each batch of 8 and more."
    )


def setting_name(of: Setting) -> str:
    if not of.adapters:
        return "base, LoRA on" if of.lora else "base, no LoRA"
    return f"{of.adapters} x rank {of.rank}{', zipf' * (of.mix == 'zipf')}"


def engine_table(rates: Rates) -> str:
    batches = sorted({batch for _, _, metric, batch in rates if metric == "decode"})
    columns = [("decode", [batch]) for batch in batches] + [("prefill", [0, *(b for b in batches if b >= 8)])]

    def cell(engine: str, of: Setting, metric: str, among: Sequence[int]) -> str:
        keys = [(engine, of, metric, batch) for batch in among if (engine, of, metric, batch) in rates]
        values = [value for key in keys for value in (rates[key][1:2] if engine == "Lorry" else rates[key])]
        kept = [part for key in keys if (part := share(rates, *key)) is not None]
        return (bounds(values) if values else "") + (f" ({bounds(kept, 2)})" if kept else "")

    pairs = sorted(dict.fromkeys((of, engine) for engine, of, _, _ in rates), key=lambda pair: pair[0])
    rows = [[setting_name(of), engine, *(cell(engine, of, *column) for column in columns)] for of, engine in pairs]
    return table(["requests", "engine", *(f"decode, batch {batch}" for batch in batches), "prefill"], rows)


# Kernels


def kernels_caption(file: str, lines: Sequence[Line]) -> str:
    gpu, commit, torch, triton = (
        each(getattr(x, key) for x in lines) for key in ("gpu", "commit", "torch", "triton")
    )
    few, many = (
        spread((x.p20, x.us, x.p80) for x in lines if (x.rows > MAX_DECODE) == prefill) for prefill in (False, True)
    )
    return (
        f"`{file}.jsonl`: {gpu}, commit {commit}, torch {torch}, Triton {triton}, {len(lines):,} measurements; from "
        f"p20 to p80 it is at most {few} of the median up to {MAX_DECODE:,} rows, {many} above."
    )


def fullest(results: Results, op: str, model: str) -> tuple[str, dict[tuple[str, int], Line]]:
    """The run with the most implementations; its lines of the first set of adapters, by implementation and rows."""
    runs = {}
    for file, lines in results.kernels.items():
        runs[file] = {
            (x.impl, x.rows): x
            for x in reversed(lines)  # bases are measured with every set of adapters: the first are this set's
            if (x.op, x.model) == (op, model)
            and (x.mix, x.adapters, x.rank) in (("none", 0, 0), ("distinct", *FIRST_SET))
        }
    return max(runs.items(), key=lambda run: len({impl for impl, _ in run[1]}), default=("", {}))


def kernel_table(results: Results, op: str, model: str) -> str:
    file, found = fullest(results, op, model)
    ways = [way for way in WAYS.get(op, LINEAR_WAYS) if any(way == impl for impl, _ in found)]
    rows = []
    for number in sorted({rows for impl, rows in found if impl == "base"}):
        base, lines = found["base", number], [found.get((way, number)) for way in ways]
        times = [f"{x.us:,.1f} ({x.us / x.base_us:.2f})" if x and x.base_us else "" for x in lines]
        rows.append([f"{number:,}", f"{base.us:,.1f}", f"{base.us / base.floor_us:.2f}", *times])
    head = ["rows", "base", "times its floor", *(f"`{way}`" for way in ways)]
    return f"{TITLES[op]} of {NAMES[model]} (`{file}.jsonl`):\n\n{table(head, rows)}" if rows else ""


def sets_table(lines: Sequence[Line], op: str, model: str) -> str:
    """Times base with every set of adapters, by ours and, in brackets, by what it replaces."""
    ours, other = {"experts": ("fused", "merged"), "attention": ("best", "separate")}[op]
    mine = [x for x in lines if (x.op, x.model, x.mix) == (op, model, "distinct")]
    found = {(x.impl, x.rows, x.adapters, x.rank): f"{x.us / x.base_us:.2f}" for x in mine if x.base_us}

    def cell(number: int, of: tuple[int, int]) -> str:
        first, second = (found.get((way, number, *of)) for way in (ours, other))
        return (first or "") + (f" ({second})" if second else "")

    rows = [[f"{number:,}", *(cell(number, of) for of in SETS)] for number in sorted({key[1] for key in found})]
    title = f"{TITLES[op]} of {NAMES[model]}, times the base by `{ours}` and in brackets by `{other}`:\n\n"
    return title + table(["rows", *SET_NAMES], rows) if rows else ""


def ratios_table(lines: Sequence[Line]) -> str:
    """`csgmv` as a multiple of `triton`, over all linears and mixes."""
    ratios: dict[tuple[int, int, int], list[float]] = {}
    for line, ratio in slower(lines, "csgmv", "triton", 0.0):
        ratios.setdefault((line.rows, line.adapters, line.rank), []).append(ratio)

    def cell(number: int, of: tuple[int, int]) -> str:
        some = ratios.get((number, *of))
        return f"{median(some):.2f} ({bounds(some, 2)})" if some else ""

    rows = [[f"{number:,}", *(cell(number, of) for of in SETS)] for number in sorted({key[0] for key in ratios})]
    return table(["rows", *SET_NAMES], rows) if rows else ""


def losses_table(runs: Iterable[Sequence[Line]]) -> str:
    """How often ours is the slower of two by more than 2 %, and where the most; within each run."""
    runs, rows = list(runs), []
    for ours, other in RIVALS:
        pairs = [pair for lines in runs for pair in slower(lines, ours, other, 0.0)]
        lost = sorted((pair for pair in pairs if pair[1] > 1.02), key=lambda pair: -pair[1])
        worst = "; ".join(f"{ratio:.2f} at {case_name(line)}" for line, ratio in lost[:2])
        if pairs:
            rows.append([f"`{ours}`, `{other}`", str(len(pairs)), str(len(lost)), worst])
    return table(["ours, other", "cases", "slower by over 2 %", "the worst, times the other"], rows) if rows else ""


def case_name(line: Line) -> str:
    rows = f"{line.rows:,} row{'s' * (line.rows > 1)}"
    mix = ", zipf" if line.mix == "zipf" else ""
    return f"`{line.op}` of {NAMES[line.model]}, {rows}, {line.adapters} x rank {line.rank}{mix}"
