"""Microseconds of every kernel with LoRA on this machine's GPU, beside the base without it, its floor, and the peers.

    python bench/kernels.py --out results.jsonl     every op, model, number of rows, rank and number of adapters
    python bench/kernels.py --quick                 Qwen3-30B-A3B with 8 adapters of rank 16
    python bench/kernels.py --ops qkv experts --models qwen3-30b-a3b --rows 32 2048 --ranks 16 --adapters 1 64

Needs torch and Triton on a CUDA device; the peers also `pip install sglang` and `pip install vllm`, and are left out
where these are not there. Ops: linears (`qkv`, `o`, `gate_up`, `down`: product and LoRA), `attention` (the four
projections with the norm, rotary, KV write, add and norm that read them) and `experts` (the block behind the router).

Every number is of one layer, by replay of a CUDA graph over layers with weights of their own. Launches are the
graph's nodes. The floor is the larger of bytes and FLOPs at the rates of a large copy and a large product, measured
at the start. Before it is timed, each implementation's result is compared with that of the first. Each measurement is
a line of JSON (`timing.Line`), printed and appended as it is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

if __name__ == "__main__":  # a script's folder comes first, where this file would hide the package `kernels`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.kernels_dense import run_attention, run_linear
from bench.kernels_moe import run_experts
from bench.timing import Line, Results, ceilings
from bench.workload import DECODE, FIRST_SET, MODELS, PREFILL, Choice, Model, sets
from tests.kernels.workloads import Mix

OPS = ("attention", "experts", "qkv", "o", "gate_up", "down")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="Qwen3-30B-A3B, 8 adapters of rank 16, mix distinct")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--models", nargs="+", choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=(*DECODE, *PREFILL), help="up to 1024: decode")
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--adapters", nargs="+", type=int)
    parser.add_argument(
        "--mixes", nargs="+", choices=get_args(Mix), help="of adapters; linears: all, others: the first"
    )
    parser.add_argument("--peers", nargs="*", choices=("sglang", "vllm"), default=("sglang", "vllm"))
    parser.add_argument("--seconds", type=float, default=600.0, help="start no measurement after so long")
    parser.add_argument("--commit", help="for the lines; default: what git says")
    options = parser.parse_args(arguments)
    options.models = options.models or names[: 1 if options.quick else None]
    options.mixes = options.mixes or (("distinct",) if options.quick else ("distinct", "zipf"))
    options.sets = (FIRST_SET,) if options.quick else sets(options.adapters, options.ranks)
    return options


def run_all(results: Results, options: argparse.Namespace) -> None:
    """The first set of adapters for everything, then the next."""
    choice = Choice(tuple(options.rows), tuple(options.mixes), tuple(options.peers))
    for adapters, rank in options.sets:
        for model in (model for model in MODELS if model.name in options.models):
            run_model(results, model, choice, options.ops, adapters, rank)


def run_model(results: Results, model: Model, choice: Choice, ops: Sequence[str], adapters: int, rank: int) -> None:
    if "experts" in ops and model.experts and results.left > 0:
        run_experts(results, model, choice, adapters, rank)
        torch.cuda.empty_cache()
    if "attention" in ops and not model.oss and results.left > 0:  # the fused projections have no biases
        run_attention(results, model, choice, adapters, rank)
    for group in model.groups:
        if group.name in ops and results.left > 0:
            run_linear(results, model, group, choice, adapters, rank)
            torch.cuda.empty_cache()


def slower(lines: Sequence[Line], first: str, second: str, margin: float = 1.02) -> list[tuple[Line, float]]:
    """Lines of implementation `first` that take longer than those of `second` for the same, and how many times."""

    def key(line: Line) -> tuple[object, ...]:
        return line.op, line.model, line.rows, line.mix, line.rank, line.adapters

    other = {key(line): line.us for line in lines if line.impl == second}
    ratios = [(line, line.us / other[key(line)]) for line in lines if line.impl == first and key(line) in other]
    return [(line, ratio) for line, ratio in ratios if ratio > margin]


def summarise(results: Results) -> None:
    """Where one of ours is not the fastest of those that do the same."""
    impls = sorted({line.impl for line in results.lines} - {"base", "plain", "attention"})
    pairs = [("csgmv", other) for other in impls] + [("fused", other) for other in impls] + [("best", "separate")]
    for first, second in pairs:
        for line, ratio in slower(results.lines, first, second):
            results.say(
                f"{line.op} {line.model} rows {line.rows} {line.mix} {line.adapters} x r{line.rank}: "
                f"{first} takes {ratio:.2f} times {second}"
            )


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    with torch.inference_mode():
        rates = ceilings()
        results = Results(rates, options.seconds, options.out, options.commit)
        results.say(f"copy {rates.bytes_per_us / 1e6:.2f} TB/s, product {rates.flops_per_us / 1e6:.0f} TFLOP/s")
        run_all(results, options)
        summarise(results)
        results.say(f"{len(results.lines)} measurements")


if __name__ == "__main__":
    main()
