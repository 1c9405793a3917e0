"""Writes the tables of docs/performance.md and draws docs/plots, from the lines in bench/results.

    python -m bench.report            # needs matplotlib: the extra `bench`
    python -m bench.report --print    # only print the tables

A part of the page that is written stands between `<!-- report: NAME -->` and `<!-- end -->`, and stays as it is while
there are no lines for it. The lines are those of `bench.engine` and `bench/kernels.py`, in files of any name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bench import tables
from bench.plots import Panel, Series, draw
from bench.tables import NAMES, TITLES, Rates, Results, Setting
from bench.workload import FIRST_SET

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCKS = {"experts": ("qwen3-30b-a3b", "gpt-oss-20b"), "attention": ("qwen3-30b-a3b", "llama-3.1-8b")}
"""Models of the ops that have plots."""
LINEARS = (("qkv", "qwen3-30b-a3b"), ("o", "qwen3-30b-a3b"), ("gate_up", "llama-3.1-8b"), ("down", "llama-3.1-8b"))
COLOURS = {"Lorry": 0, "SGLang": 1, "vLLM": 2}
COLOURS |= {"fused": 0, "best": 0, "sglang": 1, "vllm": 2, "merged": 3, "separate": 3}
MARKERS = {"Lorry": "bar", "SGLang": "o", "SGLang, triton": "D", "vLLM": "^", "byte floor": "_"}
ENGINE_PLOTS = {"decode": "decode", "prefill": "prefill", "share": "share of the base's speed"}


def sections(results: Results) -> dict[str, str]:
    """What stands at each mark of the page; empty where there are no lines."""
    runs = results.kernels
    broadest = max(runs.values(), key=len, default=[])
    parts = {
        "engine": [engine_section(results, workload) for workload in results.engine],
        "runs": [tables.prose(tables.kernels_caption(file, lines)) for file, lines in runs.items()],
        "linears": [tables.kernel_table(results, op, model) for op, model in LINEARS],
        "ratios": [tables.ratios_table(broadest)],
        "sets": [tables.sets_table(broadest, op, model) for op, models in BLOCKS.items() for model in models],
        "losses": [tables.losses_table(runs.values())],
    }
    for op, models in BLOCKS.items():
        parts[op] = [tables.kernel_table(results, op, model) for model in models]
        if any(parts[op]):
            parts[op].insert(0, f"![{TITLES[op]}: times the base and times the floor](plots/{op}.svg)")
    return {name: "\n\n".join(filter(None, found)) for name, found in parts.items()}


def engine_section(results: Results, workload: str) -> str:
    rates, peers = results.rates(workload), results.peers.get(workload)
    name = NAMES.get(workload, workload)
    parts = [f"![{name}: {what}](plots/{plot}-{workload}.svg)" for plot, what in ENGINE_PLOTS.items()]
    parts += [tables.engine_caption(results.engine[workload], rates), tables.engine_table(rates)]
    return "\n\n".join([*parts, tables.peers_caption(peers)] if peers else parts)


def written(page: str, found: dict[str, str]) -> str:
    """The page with its marked parts as they are found; a mark that nobody knows is an error."""
    if unknown := {match[2] for match in BLOCK.finditer(page)} - found.keys():
        raise ValueError(f"the page has marks that no part belongs to: {', '.join(sorted(unknown))}")
    return BLOCK.sub(lambda m: f"{m[1]}\n{found[m[2]]}\n\n{m[3]}" if found[m[2]] else m[0], page)


def draw_all(results: Results, folder: Path) -> None:
    for workload in results.engine:
        rates = results.rates(workload)
        for metric in ("decode", "prefill"):
            draw(folder / f"{metric}-{workload}.svg", [rate_panels(rates, metric)], 2.3)
        draw(folder / f"share-{workload}.svg", [[share_panel(rates, "decode"), share_panel(rates, "prefill")]], 2.2)
    for op, models in BLOCKS.items():
        if any(op == line.op for lines in results.kernels.values() for line in lines):
            panels = [[kernel_panel(results, op, model, floor) for model in models] for floor in (False, True)]
            draw(folder / f"{op}.svg", panels, 2.1)


def place(of: Setting) -> str:
    """A setting on an axis of adapters."""
    if not of.adapters:
        return "0" if of.lora else "none"
    return f"{of.adapters}" + (f"\nrank {of.rank}" if of.rank != FIRST_SET[1] else "")


def look(engine: str) -> tuple[str, int | None]:
    """Kind and colour of an engine's series."""
    return MARKERS.get(engine, "s"), COLOURS.get(engine.partition(",")[0])


def rate_panels(rates: Rates, metric: str) -> list[Panel]:
    """One for each batch: ours as bars, the peers as marks; of adapters the mix `distinct`."""
    settings = sorted({of for _, of, what, _ in rates if what == metric and of.mix != "zipf"})
    panels: list[Panel] = []
    for batch in sorted({batch for engine, _, what, batch in rates if (engine, what) == ("Lorry", metric)}):
        series = []
        for engine in dict.fromkeys(engine for engine, *_ in rates):
            known = {of: rates.get((engine, of, metric, batch)) for of in settings}
            if batch >= 8:  # whole steps of prefill, as the peers' must have been
                known = {of: value or rates.get((engine, of, metric, 0)) for of, value in known.items()}
            series.append(Series(engine, {place(of): value for of, value in known.items() if value}, *look(engine)))
        y = "" if panels else f"{metric}, tokens/s"
        panels.append(Panel(f"batch {batch}", tuple(map(place, settings)), tuple(series), "adapters", y))
    return panels


def share_panel(rates: Rates, metric: str) -> Panel:
    """By batch, for each number of adapters of ours; the peers' where their batch is known."""
    batches = sorted({batch for _, _, what, batch in rates if what == metric and batch})
    series: list[Series] = []
    lines = iter((0, 3, 4) * 9)
    pairs = dict.fromkeys((engine, of) for engine, of, what, _ in rates if what == metric and of.adapters)
    for engine, of in sorted(pairs, key=lambda pair: pair[1]):
        shares = {str(batch): tables.share(rates, engine, of, metric, batch) for batch in batches}
        points = {batch: (kept, kept, kept) for batch, kept in shares.items() if kept is not None}
        if points and of.mix != "zipf":
            kind = ("line", next(lines)) if engine == "Lorry" else look(engine)
            series.append(Series(f"{engine}, {tables.setting_name(of)}", points, *kind))
    y = "times the base" if metric == "decode" else ""
    return Panel(metric, tuple(map(str, batches)), tuple(series), "batch", y, True)


def kernel_panel(results: Results, op: str, model: str, floor: bool) -> Panel:
    """Times the base, or times the floor (also of the base), by rows."""
    _, found = tables.fullest(results, op, model)
    numbers = sorted({rows for _, rows in found})
    series = []
    for way in (*(["base"] if floor else []), *tables.WAYS[op]):
        points = {}
        for rows in numbers:
            if (line := found.get((way, rows))) and (unit := line.floor_us if floor else line.base_us):
                points[f"{rows:,}"] = (line.p20 / unit, line.us / unit, line.p80 / unit)
        if way != "plain":
            series.append(Series(way, points, "line", COLOURS.get(way)))
    y = ("times the floor" if floor else "times the base") if model == BLOCKS[op][0] else ""
    title = f"{TITLES[op]}, {NAMES[model]}" if not floor else ""
    return Panel(title, tuple(f"{rows:,}" for rows in numbers), tuple(series), "rows" if floor else "", y, True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="only print the tables")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    args = parser.parse_args(argv)
    results = tables.read(args.results)
    found = sections(results)
    if args.print:
        print("\n\n".join(filter(None, found.values())))
        return
    page = written(args.page.read_text(), found)
    draw_all(results, args.page.parent / "plots")
    args.page.write_text(page)


if __name__ == "__main__":
    main()
