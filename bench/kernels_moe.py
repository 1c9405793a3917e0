"""Microseconds of one experts block, base and with LoRA, by graph replay, beside its byte and FLOP floors.

    python bench/kernels_moe.py --out results.jsonl     every shape, row count, rank and number of adapters
    python bench/kernels_moe.py --quick                 Qwen3-30B-A3B with 8 adapters of rank 16

Prints as it goes and appends one JSON line for each measurement. Four layers of weights are used in turn, so that
nothing is read from cache. `unfused` is the same layer by `merged_experts_fused_moe_lora_add` over plain products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from lorry.kernels.moe import fused_experts, grouped_product, sum_choices
from lorry.kernels.moe_plan import MAX_RANK, LoRASites, LoRATables
from lorry.kernels.moe_shrink import merged_experts_fused_moe_lora_add
from lorry.kernels.moe_sort import sort_pairs
from lorry.kernels.moe_weights import Activation, ExpertsWeights, Projection, choose_tile

BYTES_PER_S, FLOPS = 4.3e12, 790e12  # measured on an H200: a large copy, a large bfloat16 product
NUM_LAYERS = 4
DECODE, PREFILL = (1, 8, 32, 128), (2048, 4096, 8192)


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inter: int
    experts: int
    choices: int
    oss: bool = False

    def weights(self) -> ExpertsWeights:
        h, i, e = self.hidden, self.inter, self.experts
        if not self.oss:
            first, second = Projection(normal(e, 2 * i, h), "concatenated"), Projection(normal(e, h, i))
            return ExpertsWeights(first, second, Activation("glu"))
        first = Projection(normal(e, h, 2 * i), "interleaved", True, normal(e, 2 * i))
        second = Projection(normal(e, i, h), "no", True, normal(e, h))
        return ExpertsWeights(first, second, Activation("glu_clamped", 1.702, 1.0, 7.0))


MODELS = (Model("qwen3-30b-a3b", 2048, 768, 128, 8), Model("gpt-oss-20b", 2880, 2880, 32, 4, True))


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


class Adapters:
    """`num` adapters of one rank at every site of every layer, as an arena holds them."""

    def __init__(self, model: Model, num: int, rank: int) -> None:
        self.num, self.rank = num, rank
        e, widths = model.experts, ((model.hidden, model.inter),) * 2 + ((model.inter, model.hidden),)
        sizes = [e * rank * w for pair in widths for w in pair] * (num * NUM_LAYERS)
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].view(NUM_LAYERS, num, 3, 2)
        data = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda").normal_(0, 0.05)
        by_site = starts.transpose(1, 2).reshape(NUM_LAYERS * 3, num, 2).cuda()
        full = torch.full((NUM_LAYERS * 3, num), rank, dtype=torch.int32, device="cuda")
        offsets = (by_site[..., 0].contiguous(), by_site[..., 1].contiguous())
        self.tables = LoRATables(data, *offsets, full, torch.ones_like(full, dtype=torch.float32))

    def at(self, layer: int, slots: Tensor, max_rank: int) -> LoRASites:
        first = 3 * layer
        return LoRASites(self.tables, slots, (first, first + 1), first + 2, max_rank)


@dataclass
class Rows:
    """Random rows and routing, another for each layer; adapters in turn, row by row."""

    model: Model
    num: int

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.num)
        shape = (self.num, self.model.experts)
        self.x = torch.randn(self.num, self.model.hidden, device="cuda", dtype=torch.bfloat16)
        self.index = [
            torch.rand(shape, generator=draw).topk(self.model.choices, 1).indices.cuda() for _ in range(NUM_LAYERS)
        ]
        self.weights = torch.rand(self.num, self.model.choices, device="cuda").softmax(-1).bfloat16()

    def slots(self, num_adapters: int) -> Tensor:
        """Decode: a new adapter every row; prefill: requests of 256 rows."""
        run = 1 if self.num < 1024 else 256
        return (torch.arange(self.num, dtype=torch.int32, device="cuda") // run) % num_adapters

    def floors(self, adapters: Adapters | None) -> tuple[float, float]:
        """Microseconds that the bytes of the weights and the FLOPs need at least."""
        m, moved, work = self.model, 0.0, 0.0
        per_rank = 2 * m.hidden + 2 * m.inter + m.inter + m.hidden
        for index in self.index:
            moved += index.unique().numel() * 3 * m.hidden * m.inter / NUM_LAYERS
            work += index.numel() * 3 * m.hidden * m.inter / NUM_LAYERS
            if adapters is not None:
                keys = self.slots(adapters.num)[:, None] * m.experts + index
                moved += keys.unique().numel() * adapters.rank * per_rank / NUM_LAYERS
                work += index.numel() * adapters.rank * per_rank / NUM_LAYERS
        return moved * 2 / BYTES_PER_S * 1e6, work * 2 / FLOPS * 1e6


def graph_us(step: Callable[[int], Any], repeats: int = 40) -> tuple[float, float, float]:
    """(median, p20, p80) microseconds of one layer's step, over graphs of all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(NUM_LAYERS):
            step(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            step(layer)
    for _ in range(3):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) * 1e3 / NUM_LAYERS for start, stop in events)
    return statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5]


class Launches:
    """Records Triton launches instead of making them, to count them or to compile all kernels in threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __enter__(self) -> Launches:
        self._run = JITFunction.run
        calls = self.calls

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            calls.append((kernel, args, grid, options))

        JITFunction.run = run
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run

    def compile(self) -> None:
        from triton.runtime._async_compile import AsyncCompileMode

        with ThreadPoolExecutor(16) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for kernel, args, grid, options in self.calls:
                kernel.run(*args, grid=grid, warmup=True, **options)


def count_launches(step: Callable[[int], Any]) -> int:
    with Launches() as launches:
        step(0)
    return len(launches.calls)


def unfused(rows: Rows, weights: ExpertsWeights, lora: LoRASites, layer: int) -> Tensor:
    """The stand-alone add over plain products, activation in torch."""
    index, none = rows.index[layer], Activation("none")
    tiles = choose_tile(rows.x, weights, index.numel())
    order = sort_pairs(index, lora.token_slots, lora.tables.num_slots, weights.num_experts, tiles[0].block_m)
    first, oss = weights.first, weights.first.gated == "interleaved"
    inter = grouped_product(rows.x, replace(first, gated="no"), none, order, tiles[0])
    common = {"order": order, "num_experts": weights.num_experts, "max_rank": lora.max_rank}
    merged_experts_fused_moe_lora_add(
        inter, rows.x, index, lora.token_slots, lora.tables, lora.first, interleaved=oss, **common
    )
    gate, up = (inter[:, ::2], inter[:, 1::2]) if oss else inter.chunk(2, 1)
    act = torch.nn.functional.silu(gate) * up
    out = grouped_product(act, weights.second, none, order, tiles[1])
    merged_experts_fused_moe_lora_add(out, act, index, lora.token_slots, lora.tables, (lora.down,), **common)
    return sum_choices(out, index, weights.num_experts, rows.weights)


class Bench:
    def __init__(self, out: str | None, budget: float) -> None:
        self.start, self.budget = time.time(), budget
        self.file = open(out, "a") if out else None  # noqa: SIM115  (it lives as long as the run)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        self.head = {"commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    @property
    def left(self) -> float:
        return self.budget - (time.time() - self.start)

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.start:6.1f}] {text}", flush=True)

    def measure(self, what: dict[str, Any], step: Callable[[int], Any], floor: float, base: float | None) -> float:
        try:
            median, low, high = graph_us(step)
        except Exception as error:  # a configuration that does not run must not end the others
            self.say(f"!! {what}: {type(error).__name__}: {str(error)[:200]}")
            return float("inf")
        ratio = "" if base is None else f"  x{median / base:.3f} of base"
        name = " ".join(str(v) for v in what.values())
        self.say(f"{name:70s} {median:8.1f} us ({low:.1f}..{high:.1f})  x{median / floor:.2f} of floor{ratio}")
        if self.file:
            row = {**self.head, **what, "us": median, "p20": low, "p80": high, "floor_us": floor, "base_us": base}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        return median

    def blocks(self, model: Model, layers: list[ExpertsWeights], num_rows: int, kinds: list[Adapters]) -> None:
        """Base block, and for each set of adapters the block with LoRA, fused and not."""
        rows = Rows(model, num_rows)

        def block(layer: int, adapters: Adapters | None) -> Tensor:
            rank = 0 if adapters is None else MAX_RANK if num_rows < 1024 else adapters.rank
            lora = None if adapters is None else adapters.at(layer, slots, rank)
            return fused_experts(rows.x, rows.index[layer], rows.weights, layers[layer], lora)

        def plain(layer: int) -> Tensor:
            return unfused(rows, layers[layer], adapters.at(layer, slots, adapters.rank), layer)

        what = {"model": model.name, "rows": num_rows}
        steps = count_launches(lambda i: block(i, None))
        base = self.measure({**what, "what": "base", "launches": steps}, lambda i: block(i, None),
                            max(rows.floors(None)), None)  # fmt: skip
        for adapters in kinds:
            if self.left < 10:
                self.say("out of time")
                return
            slots = rows.slots(adapters.num)
            own = {**what, "rank": adapters.rank, "adapters": adapters.num}
            floor = max(rows.floors(adapters))
            for name, step in (("fused", lambda i, adapters=adapters: block(i, adapters)), ("unfused", plain)):
                launches = count_launches(step)
                self.measure({**own, "what": name, "launches": launches}, step, floor, base)
        torch.cuda.empty_cache()


def run_all(bench: Bench, quick: bool) -> None:
    for model in MODELS[: 1 if quick else None]:
        layers = [model.weights() for _ in range(NUM_LAYERS)]
        sets = ((8, 16),) if quick else ((8, 16), (1, 16), (64, 16), (8, 8), (8, 64))
        kinds = [Adapters(model, num, rank) for num, rank in sets]
        for num_rows in (*DECODE, *reversed(PREFILL)):
            if bench.left < 10:
                bench.say("out of time")
                return
            bench.blocks(model, layers, num_rows, kinds)
        del layers, kinds
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument("--budget", type=float, default=600, help="seconds")
    parser.add_argument("--quick", action="store_true", help="Qwen3-30B-A3B with 8 adapters of rank 16 only")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        run_all(Bench(options.out, options.budget), options.quick)


if __name__ == "__main__":
    main()
