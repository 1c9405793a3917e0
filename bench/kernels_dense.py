"""Times LoRA on linear layers, beside the product it belongs to: `python -m bench.kernels_dense --out results.jsonl`.

Every number is of one layer, out of a CUDA graph that runs `LAYERS` layers with weights of their own, several times:
so nothing but activations comes from a cache. The floor counts the bytes of x, A and B of the adapters present, and y
read and written, once each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from lorry.kernels.dense import DenseConfig, LoRATables, Segments, add_lora
from lorry.kernels.dense_fused import (
    GroupLoRA,
    Heads,
    Projected,
    add_and_norm,
    norm_rotate_write,
    product_and_shrink,
    project,
    shrink_after,
)
from lorry.lora.arena import Arena
from lorry.lora.backends.base import make_dense_backend
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site
from tests.kernels.workloads import Mix, routing

LAYERS = 4
BYTES_PER_US = 4.3e6
"""What a large copy moves on an H200 of ours, read and written."""


@dataclass(frozen=True)
class Shape:
    """One group of sibling linears of a model."""

    name: str
    in_features: int
    widths: tuple[int, ...]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b.qkv", 2048, (4096, 512, 512)),
        Shape("qwen3-30b-a3b.o", 4096, (2048,)),
        Shape("llama-3.1-8b.qkv", 4096, (4096, 1024, 1024)),
        Shape("llama-3.1-8b.o", 4096, (4096,)),
        Shape("llama-3.1-8b.gate_up", 4096, (14336, 14336)),
        Shape("llama-3.1-8b.down", 14336, (4096,)),
    )
}


class Layers:
    """`LAYERS` copies of a shape with base weights, and adapters of one rank for them."""

    def __init__(self, shape: Shape, rank: int, num_adapters: int) -> None:
        self.shape, self.rank, self.num_adapters = shape, rank, num_adapters
        count = len(shape.widths)
        sites = [
            Site(layer * count + i, f"{layer}.{i}", "linear", "m", shape.in_features, width)
            for layer in range(LAYERS)
            for i, width in enumerate(shape.widths)
        ]
        self.groups = [tuple(range(layer * count, (layer + 1) * count)) for layer in range(LAYERS)]
        elements = sum(site.num_elements(rank) + 128 for site in sites)
        device = torch.device("cuda")
        self.arena = Arena(sites, 2 * elements * num_adapters + 4096, num_adapters, torch.bfloat16, device)
        for _ in range(num_adapters):
            weights = {
                site.index: SiteWeights(
                    torch.randn(1, rank, site.in_features, device=device).bfloat16() * site.in_features**-0.5,
                    torch.randn(1, rank, site.out_features, device=device).bfloat16(),
                    1.0,
                )
                for site in sites
            }
            self.arena.allocate(AdapterWeights(weights, ("bench",)))
        size = (sum(shape.widths), shape.in_features)
        self.base = [torch.randn(size, device=device).bfloat16() * size[1] ** -0.5 for _ in range(LAYERS)]
        arena = self.arena
        self.tables = LoRATables(arena.data, arena.a_offset, arena.b_offset, arena.rank, arena.scale)


class Step:
    """A batch of rows over `Layers`: how to run one layer's base product and its LoRA."""

    def __init__(self, layers: Layers, backend: str, num_rows: int, mix: Mix = "distinct", seq_len: int = 1) -> None:
        self.layers, shape = layers, layers.shape
        self.backend = make_dense_backend(backend, layers.arena, torch.device("cuda"))
        steps = routing(mix, num_rows, layers.num_adapters, False, seq_len)
        self.num_present = len(steps.adapter_slots)
        decode = seq_len == 1
        if decode:
            self.backend.init_cuda_graph_batch_info(num_rows, num_rows)
        self.info = self.backend.prepare_lora_batch(steps, num_rows if decode else None)
        self.x = torch.randn(num_rows, shape.in_features, device="cuda").bfloat16()
        self.y = torch.zeros(num_rows, sum(shape.widths), device="cuda").bfloat16()
        self.segments = Segments(
            self.info.seg_indptr, self.info.weight_indices, self.info.permutation, self.info.max_seg_len
        )

    def product(self, layer: int) -> None:
        torch.mm(self.x, self.layers.base[layer].T, out=self.y)

    def lora(self, layer: int, config: DenseConfig | None = None) -> None:
        if config is None:
            self.backend.add_lora(self.y, self.x, self.layers.groups[layer], self.info)
        else:
            shape, groups = self.layers.shape, self.layers.groups
            sites, widths, max_rank = groups[layer], shape.widths, self.info.max_rank
            add_lora(self.y, self.x, self.layers.tables, sites, widths, self.segments, max_rank, config)

    def both(self, layer: int, config: DenseConfig | None = None) -> None:
        self.product(layer)
        self.lora(layer, config)

    def group_lora(self, layer: int) -> GroupLoRA:
        """What the fused ops need to know."""
        groups, info = self.layers.groups, self.info
        return GroupLoRA(self.layers.tables, groups[layer], self.segments, info.token_slots, info.max_rank)

    @property
    def floor_us(self) -> float:
        """Microseconds that LoRA's bytes take."""
        weights = self.num_present * self.layers.rank * sum(self.x.shape[1] + w for w in self.layers.shape.widths)
        return 2 * (weights + self.x.numel() + 2 * self.y.numel()) / BYTES_PER_US


def times(run: Callable[[int], None], layers: int = LAYERS, rounds: int = 3, replays: int = 25) -> tuple[float, ...]:
    """p20, p50, p80 in microseconds of one layer, by replay of a graph of `rounds` times all layers."""
    run(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(layers):
            run(layer)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds * layers):
            run(i % layers)
    for _ in range(3):
        graph.replay()
    events = [(_event(), _event()) for _ in range(replays)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    each = sorted(start.elapsed_time(stop) * 1e3 / (rounds * layers) for start, stop in events)
    quantiles = statistics.quantiles(each, n=5)
    return quantiles[0], statistics.median(each), quantiles[3]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Result:
    """One line of the output file; times are microseconds of one layer."""

    op: str
    shape: str
    backend: str
    rows: int
    mix: str
    rank: int
    adapters: int
    launches: int
    base_us: float
    p20_us: float
    p50_us: float
    p80_us: float
    ratio_to_base: float
    ratio_of_lora_to_floor: float
    commit: str
    gpu: str


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def bench(shape: Shape, rank: int, num_adapters: int, row_counts: Sequence[int], out: Path | None) -> None:
    """Base product alone and with LoRA by both kernel backends; prints and appends a line for each."""
    layers = Layers(shape, rank, num_adapters)
    for num_rows in row_counts:
        seq_len = 1 if num_rows <= 128 else num_rows // max(8, num_adapters)
        for backend in ("csgmv", "triton"):
            step = Step(layers, backend, num_rows, seq_len=seq_len)
            base = times(step.product)[1]
            p20, p50, p80 = times(step.both)
            result = Result(
                "product+lora", shape.name, backend, num_rows, "distinct", rank, step.num_present, 3,
                base, p20, p50, p80, p50 / base, (p50 - base) / step.floor_us, commit(), torch.cuda.get_device_name(),
            )  # fmt: skip
            print(
                f"{shape.name:22s} {backend:7s} rows {num_rows:5d} rank {rank:3d} adapters {step.num_present:3d}: "
                f"base {base:8.2f}, with LoRA {p50:8.2f} us ({p20:.2f}..{p80:.2f}), x{p50 / base:.3f}, "
                f"LoRA x{(p50 - base) / step.floor_us:.2f} of its floor",
                flush=True,
            )
            _append(result, out)


class Attention:
    """q, k, v, o of a layer with what follows them (norm, rotary, KV write; add, norm), without attention itself."""

    def __init__(self, qkv: Layers, o: Layers, num_rows: int, heads: tuple[int, int]) -> None:
        seq_len = 1 if num_rows <= 128 else num_rows // max(8, qkv.num_adapters)
        self.qkv, self.o = (Step(layers, "csgmv", num_rows, seq_len=seq_len) for layers in (qkv, o))
        device, width = torch.device("cuda"), qkv.shape.widths[1] // heads[1]
        norms = [torch.ones(width, device=device).bfloat16() for _ in "qk"]
        angles = [torch.rand(num_rows, width, device=device).bfloat16() for _ in "cs"]
        self.heads = Heads(*heads, norms[0], norms[1], 1e-6, angles[0], angles[1])
        self.keys, self.values = (torch.zeros(num_rows, heads[1], width, device=device).bfloat16() for _ in "kv")
        self.write_slots = torch.randperm(num_rows, device=device)
        self.residual = torch.zeros(num_rows, qkv.shape.in_features, device=device).bfloat16()
        self.norm = torch.ones(qkv.shape.in_features, device=device).bfloat16()

    def run(self, layer: int, way: Way) -> None:
        """One layer; `way` computes a projection and says which LoRA its reader adds."""
        projected, lora = way(self.qkv, self.qkv.x, layer)
        q = norm_rotate_write(projected, lora, self.heads, self.keys, self.values, self.write_slots)
        projected, lora = way(self.o, q, layer)
        add_and_norm(projected, lora, self.residual, self.norm, 1e-6)


Way = Callable[[Step, torch.Tensor, int], tuple[Projected, GroupLoRA | None]]


def _base(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    return Projected(torch.mm(x, step.layers.base[layer].T, out=step.y)[None], None), None


def _separate(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    torch.mm(x, step.layers.base[layer].T, out=step.y)
    step.backend.add_lora(step.y, x, step.layers.groups[layer], step.info)
    return Projected(step.y[None], None), None


def _beside(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    lora = step.group_lora(layer)
    return shrink_after(x, torch.mm(x, step.layers.base[layer].T, out=step.y), lora), lora


def _inside(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    lora = step.group_lora(layer)
    return product_and_shrink(x, step.layers.base[layer], lora), lora


def _ours(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    return product_and_shrink(x, step.layers.base[layer], None), None


def _best(step: Step, x: torch.Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    lora = step.group_lora(layer)
    return project(x, step.layers.base[layer], lora), lora


WAYS: dict[str, tuple[Way, int]] = {
    "best": (_best, 4),
    "separate": (_separate, 8),
    "beside": (_beside, 6),
    "inside": (_inside, 4),
    "no LoRA": (_ours, 4),
}
"""Name -> (projection, launches of a layer, at least): LoRA as `project` chooses; by its own two launches for each
projection; by a shrink beside the library's product; by our product with the shrink inside; our product without."""


def bench_attention(rank: int, num_adapters: int, row_counts: Sequence[int], out: Path | None) -> None:
    """Qwen3-30B-A3B: q, k, v, o with what is before and after, each way, as a multiple of the library's products."""
    qkv, o = (Layers(SHAPES[f"qwen3-30b-a3b.{name}"], rank, num_adapters) for name in ("qkv", "o"))
    for num_rows in row_counts:
        attention = Attention(qkv, o, num_rows, (32, 4))
        base = times(lambda layer: attention.run(layer, _base))  # noqa: B023
        line = (
            f"attention rows {num_rows:5d} rank {rank:3d} adapters {attention.o.num_present:3d}: base {base[1]:.2f}"
        )
        floor = attention.qkv.floor_us + attention.o.floor_us
        for name, (way, launches) in WAYS.items():
            if num_rows > 128 and way in (_inside, _ours):
                continue
            p20, p50, p80 = times(lambda layer: attention.run(layer, way))  # noqa: B023
            line += f", {name} {p50:.2f} (x{p50 / base[1]:.3f})"
            result = Result(
                f"attention {name}", "qwen3-30b-a3b", "csgmv", num_rows, "distinct", rank, attention.o.num_present,
                launches, base[1], p20, p50, p80, p50 / base[1], (p50 - base[1]) / floor, commit(),
                torch.cuda.get_device_name(),
            )  # fmt: skip
            _append(result, out)
        print(line, flush=True)


def _append(result: Result, out: Path | None) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--ops", nargs="+", default=["attention", "linear"], choices=["attention", "linear"])
    parser.add_argument("--shapes", nargs="+", default=sorted(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 2048, 8192])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 8, 64])
    parser.add_argument("--adapters", nargs="+", type=int, default=[8, 1, 64])
    parser.add_argument("--seconds", type=float, default=600.0, help="start nothing new after so long")
    args = parser.parse_args()
    start = time.monotonic()
    for adapters, rank in itertools.product(args.adapters, args.ranks):
        runs = [partial(bench_attention, rank, adapters)] if "attention" in args.ops else []
        if "linear" in args.ops:
            runs += [partial(bench, SHAPES[name], rank, adapters) for name in args.shapes]
        for run in runs:
            if time.monotonic() - start > args.seconds:
                print("out of time: the rest is left out", flush=True)
                return
            run(args.rows, args.out)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
