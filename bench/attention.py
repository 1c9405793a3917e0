"""Times paged attention of one layer: `python -m bench.attention --out results.jsonl` (`--sweep`: tiles of prefill).

Prefill is beside torch's `varlen_attn` on contiguous keys and values, where that runs; decode beside the bytes of the
context's keys and values. Layers have pools of their own, as many as keep their bytes out of the caches.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import ceilings, git_commit, times
from lorry.attention.base import AttentionBatch, AttentionParams
from lorry.attention.triton import TritonAttention, upload_step
from lorry.config import PAGE_SIZE
from lorry.kernels import paged_attention
from lorry.kernels.prefill_attention import Tile, paged_prefill, prefill_tile
from lorry.kv.pool import LayerKV

HEADS = {"qwen3-30b-a3b": (32, 4), "llama-3.1-8b": (32, 8)}
HEAD_DIM = 128
Lens = list[tuple[int, int]]
"""(query length, context length) of each sequence."""

PREFILLS: dict[str, Lens] = {
    "8 x 1,024": [(1024, 1024)] * 8,
    "1 x 8,192": [(8192, 8192)],
    "4 x 2,048 behind 2,048": [(2048, 4096)] * 4,
    "16 x 64 behind 2,048": [(64, 2112)] * 16,
    "ragged": [(3000, 3000), (1, 1200), (700, 5000), (1, 1024), (17, 900), (2048, 2048), (1, 30), (900, 900)],
}
DECODES: dict[str, Lens] = {
    **{f"{n} x 1,024 to 1,280": [(1, 1024 + 256 * i // max(n - 1, 1)) for i in range(n)] for n in (1, 8, 32, 128)},
    "1 x 32,768": [(1, 32768)],
    "31 x 1,024 and 32,768": [(1, 1024)] * 31 + [(1, 32768)],
}
TILES = (
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 5),
    Tile(128, 32, 8, 5),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 5),
    Tile(64, 128, 4, 3),
    Tile(64, 32, 4, 5),
)


class Case:
    """One step of one layer shape, with the pools of several layers; pages are in random order."""

    def __init__(self, heads: tuple[int, int], lens: Lens) -> None:
        self.heads, self.lens = heads, lens
        counts = [-(-context // PAGE_SIZE) for _, context in lens]
        num_pages = sum(counts)
        self.context_bytes = sum(context for _, context in lens) * heads[1] * HEAD_DIM * 4
        self.layers = max(2, min(64, 256 * 2**20 // self.context_bytes))
        order = torch.randperm(num_pages).tolist()
        pages = [tuple(order.pop() for _ in range(count)) for count in counts]
        slots = [
            own[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE
            for own, (query, context) in zip(pages, lens, strict=True)
            for n in range(context - query, context)
        ]
        self.kv = [
            LayerKV(*(_randn(num_pages * PAGE_SIZE, heads[1], HEAD_DIM) for _ in "kv")) for _ in range(self.layers)
        ]
        num_rows = len(slots)
        self.q, self.k, self.v = (_randn(num_rows, count, HEAD_DIM) for count in (heads[0], heads[1], heads[1]))
        query_lens, context_lens = (tuple(x) for x in zip(*lens, strict=True))
        self.batch = AttentionBatch(query_lens, context_lens, tuple(pages), torch.tensor(slots, device="cuda"))
        self.backend = TritonAttention()
        decodes = upload_step(self.batch, ()).decodes
        if decodes is not None and len(decodes.context_lens) == num_rows:  # as a captured graph runs it
            self.backend.plan_decode(decodes)
        else:
            self.backend.plan(self.batch)

    @property
    def flops(self) -> int:
        """Of both products, over the pairs of query and key that see each other."""
        pairs = sum(query * (context - query) + query * (query + 1) // 2 for query, context in self.lens)
        return 4 * HEAD_DIM * self.heads[0] * pairs

    def run(self, layer: int) -> Tensor:
        """All of a layer: the write of keys and values, prefill and decode."""
        return self.backend.run(self.q, self.k, self.v, self.kv[layer], AttentionParams(HEAD_DIM**-0.5))

    def prefill_alone(self, tile: Tile) -> Callable[[int], None]:
        cut = (self.heads[0] // self.heads[1], tile.rows)
        prefills = upload_step(self.batch, [cut]).prefills
        assert prefills is not None
        out = torch.full_like(self.q, float("nan"))
        self.out = out
        return lambda layer: paged_prefill(
            self.q,
            self.kv[layer].keys,
            self.kv[layer].values,
            prefills[cut],
            out,
            HEAD_DIM**-0.5,
            PAGE_SIZE,
            tile=tile,
        )

    def varlen(self) -> Callable[[int], None]:
        """torch's, on contiguous keys and values of each sequence's context."""
        from torch.nn.attention.varlen import varlen_attn

        query, context = (torch.tensor([0, *x]).cumsum(0).int().cuda() for x in zip(*self.lens, strict=True))
        length = int(context[-1])
        k, v = (_randn(length, self.heads[1], HEAD_DIM) for _ in "kv")
        longest = [max(x) for x in zip(*self.lens, strict=True)]
        known = inspect.signature(varlen_attn).parameters
        settings: dict[str, Any] = {"scale": HEAD_DIM**-0.5}
        settings |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        settings |= {"enable_gqa": True} if "enable_gqa" in known else {}
        return lambda _: varlen_attn(self.q, k, v, query, context, *longest, **settings)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def times_of_calls(run: Callable[[int], None], calls: int = 4, repeats: int = 9) -> tuple[float, ...]:
    """p20, p50, p80 in microseconds of one call without a graph, several calls long enough to hide their launch."""
    for _ in range(2):
        run(0)
    each = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for i in range(calls):
            run(i)
        stop.record()
        stop.synchronize()
        each.append(start.elapsed_time(stop) * 1e3 / calls)
    quantiles = statistics.quantiles(each, n=5)
    return quantiles[0], statistics.median(each), quantiles[3]


@dataclass(frozen=True)
class Result:
    """One line of the output file; times are microseconds of one layer."""

    op: str
    shape: str
    case: str
    backend: str
    p20_us: float
    p50_us: float
    p80_us: float
    tflops: float
    ratio_to_byte_floor: float
    commit: str
    gpu: str


def report(op: str, shape: str, name: str, backend: str, case: Case, us: Sequence[float], out: Path | None) -> None:
    floor = case.context_bytes / ceilings().bytes_per_us
    result = Result(
        op,
        shape,
        name,
        backend,
        *us,
        case.flops / us[1] / 1e6,
        us[1] / floor,
        git_commit(),
        torch.cuda.get_device_name(),
    )
    print(
        f"{op:8s} {shape:14s} {name:24s} {backend:26s} {us[1]:9.1f} us ({us[0]:.1f}..{us[2]:.1f})  "
        f"{result.tflops:6.1f} TFLOP/s  x{result.ratio_to_byte_floor:.2f} of the byte floor {floor:.1f}",
        flush=True,
    )
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def bench_prefill(shape: str, name: str, out: Path | None) -> None:
    case = Case(HEADS[shape], PREFILLS[name])
    report("prefill", shape, name, "triton, with write", case, times(case.run, case.layers, 1, 9), out)
    tile = prefill_tile(HEAD_DIM, HEAD_DIM, torch.bfloat16, case.q.device)
    if all(query > 1 for query, _ in case.lens):
        report("prefill", shape, name, "triton", case, times(case.prefill_alone(tile), case.layers, 1, 9), out)
    try:
        us = times_of_calls(case.varlen())
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"varlen_attn does not run here: {error!r}"[:300], flush=True)
    else:
        report("prefill", shape, name, "varlen_attn", case, us, out)


def bench_decode(shape: str, name: str, out: Path | None) -> None:
    """All of a layer, with pipelines of 3 and of 5 stages."""
    case = Case(HEADS[shape], DECODES[name])
    default = paged_attention.DECODE_STAGES
    for stages in (3, 5):
        paged_attention.DECODE_STAGES = stages
        us = times(case.run, case.layers, max(1, 32 // case.layers), 15)
        report("decode", shape, name, f"triton, {stages} stages", case, us, out)
    paged_attention.DECODE_STAGES = default


def sweep(shape: str, name: str, out: Path | None) -> None:
    """Every tile on one prefill, each checked against the default one."""
    case = Case(HEADS[shape], PREFILLS[name])
    case.prefill_alone(prefill_tile(HEAD_DIM, HEAD_DIM, torch.bfloat16, case.q.device))(0)
    expected = case.out.float()
    for tile in TILES:
        run = case.prefill_alone(tile)
        run(0)
        error = float((case.out.float() - expected).norm() / expected.norm())
        label = f"{tile.rows} x {tile.keys}, {tile.num_warps} w, {tile.num_stages} s"
        if not error < 1e-2:
            print(f"{label} is wrong: {error}", flush=True)
        report("sweep", shape, name, label, case, times(run, case.layers, 1, 7), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--shapes", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--sweep", action="store_true", help="time tiles of the prefill kernel instead")
    args = parser.parse_args()
    for shape in args.shapes:
        if args.sweep:
            for name in ("8 x 1,024", "4 x 2,048 behind 2,048"):
                sweep(shape, name, args.out)
            continue
        for name in PREFILLS:
            bench_prefill(shape, name, args.out)
        for name in DECODES:
            bench_decode(shape, name, args.out)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
