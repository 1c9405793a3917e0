"""How `bench/kernels.py` measures: graph replay, counted launches, floors, lines of results."""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

TOLERANCE = 0.03
"""How far (norm of the difference over norm) implementations of one thing may be apart, in bfloat16."""


@dataclass(frozen=True)
class Work:
    """What one layer must do at least: bytes of device memory, each once, and floating-point operations."""

    num_bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Ceilings:
    """What the device does at most, in a microsecond."""

    bytes_per_us: float
    flops_per_us: float

    def floor_us(self, work: Work) -> float:
        """The larger of the two times that no implementation can beat by much."""
        return max(work.num_bytes / self.bytes_per_us, work.flops / self.flops_per_us)


@dataclass(frozen=True)
class Case:
    """What is measured; `rank` and `adapters` are 0 without LoRA."""

    op: str
    model: str
    impl: str
    rows: int
    mix: str = "none"
    rank: int = 0
    adapters: int = 0


@dataclass(frozen=True)
class Task:
    """A case, how to run its layer of a number, and how to get a result that equals that of its neighbours."""

    case: Case
    step: Callable[[int], object]
    num_layers: int
    work: Work
    result: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Line:
    """One line of the output file; times are microseconds of one layer, `us` the median."""

    gpu: str
    commit: str
    torch: str
    triton: str
    op: str
    model: str
    impl: str
    rows: int
    mix: str
    rank: int
    adapters: int
    us: float
    p20: float
    p80: float
    floor_us: float
    base_us: float | None
    launches: float


class Captured:
    """A CUDA graph that runs `num_layers` layers `rounds` times, after a run that compiles and warms up."""

    def __init__(self, step: Callable[[int], object], num_layers: int, rounds: int = 1) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for layer in range(num_layers):
                step(layer)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._num_steps = rounds * num_layers
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph):
            for i in range(self._num_steps):
                step(i % num_layers)

    @property
    def launches(self) -> float:
        """Nodes of the graph for each layer: kernels of anybody, copies and fills."""
        count = ctypes.c_size_t(0)
        graph = ctypes.c_void_p(self._graph.raw_cuda_graph())
        error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(graph, None, ctypes.byref(count))
        assert error == 0, f"cuGraphGetNodes: error {error}"
        return round(count.value / self._num_steps, 2)

    def times(self, replays: int = 25) -> tuple[float, float, float]:
        """p20, p50, p80 of a layer, in microseconds."""
        for _ in range(3):
            self._graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(replays)]
        for start, stop in events:
            start.record()
            self._graph.replay()
            stop.record()
        torch.cuda.synchronize()
        each = [start.elapsed_time(stop) * 1e3 / self._num_steps for start, stop in events]
        cuts = statistics.quantiles(each, n=5)
        return cuts[0], statistics.median(each), cuts[3]


def times(
    step: Callable[[int], object], num_layers: int, rounds: int = 3, replays: int = 25
) -> tuple[float, float, float]:
    """p20, p50, p80 in microseconds of one layer."""
    return Captured(step, num_layers, rounds).times(replays)


@cache
def ceilings() -> Ceilings:
    """Measured here and now: 1 GiB read and written by one kernel, and the fastest of some bfloat16 products."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    moved_us = times(lambda _: torch.neg(source, out=target), 1)[0]
    rates = []
    for m, n, k in ((4096, 4096, 4096), (8192, 2048, 4096), (8192, 8192, 8192)):
        a, b = (torch.randn(size, k, device="cuda").bfloat16() for size in (m, n))
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        rates.append(2 * m * n * k / times(partial(_product, a, b, c), 1, replays=10)[0])
    return Ceilings(2 * 2**30 / moved_us, max(rates))


def _product(a: Tensor, b: Tensor, out: Tensor, _: int) -> None:
    torch.mm(a, b.T, out=out)


def compile_ahead(steps: Sequence[Callable[[int], object]], threads: int = 16) -> None:
    """Compile the Triton kernels of all steps in parallel: runs them with every Triton launch recorded, none made."""
    from triton.runtime._async_compile import AsyncCompileMode

    run, calls = JITFunction.run, []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, args, grid, options))

    JITFunction.run = record
    try:
        for step in steps:
            with suppress(Exception):  # it comes again when the step is measured
                step(0)
    finally:
        JITFunction.run = run
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for kernel, args, grid, options in calls:
            kernel.run(*args, grid=grid, warmup=True, **options)


def git_commit() -> str:
    """Of this checkout; `unknown` where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Results:
    """Runs tasks within a number of seconds; prints each result and appends it to a file."""

    def __init__(
        self, ceilings: Ceilings, seconds: float, out: Path | None = None, commit: str | None = None
    ) -> None:
        self.ceilings = ceilings
        self.lines: list[Line] = []
        self._start, self._seconds, self._out = time.monotonic(), seconds, out
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        self._head = (gpu, commit or git_commit(), str(torch.__version__), triton.__version__)

    @property
    def left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f}] {text}", flush=True)

    def run(self, tasks: Sequence[Task]) -> None:
        """Tasks of the same op, model, rows, mix and adapters follow each other, `base` before the rest.

        The first with a `result` is the measure of the others: those that differ from it are reported, not timed.
        """
        if self.left < 0:
            return
        compile_ahead([task.step for task in tasks])
        base: dict[tuple[str, str, int], float] = {}
        like, expected = None, None
        for task in tasks:
            if self.left < 0:
                self.say("out of time: the rest is left out")
                return
            case = task.case
            try:
                if task.result is not None:
                    actual = task.result().float()
                    if like != replace(case, impl="") or expected is None:
                        like, expected = replace(case, impl=""), actual
                    elif not (error := distance(actual, expected)) < TOLERANCE:
                        self.say(f"!! {case} differs by {error:.3f}: not timed")
                        continue
                us = self._measure(task, base.get((case.op, case.model, case.rows)))
                if case.impl == "base":
                    base[case.op, case.model, case.rows] = us
            except Exception as error:  # a case that does not run must not end the others
                self.say(f"!! {case}: {type(error).__name__}: {' '.join(str(error).split())[-300:]}")

    def _measure(self, task: Task, base_us: float | None) -> float:
        captured = Captured(task.step, task.num_layers, rounds=3 if task.case.rows <= 1024 else 1)
        p20, us, p80 = captured.times(25 if task.case.rows <= 1024 else 15)
        floor_us = self.ceilings.floor_us(task.work)
        fields = asdict(task.case)
        self.add(Line(*self._head, **fields, us=us, p20=p20, p80=p80, floor_us=floor_us, base_us=base_us,
                      launches=captured.launches))  # fmt: skip
        return us

    def add(self, line: Line) -> None:
        self.lines.append(line)
        ratio = "" if line.base_us is None else f"  x{line.us / line.base_us:.3f} of base"
        what = f"{line.op:9s} {line.model:13s} {line.impl:16s} rows {line.rows:4d} {line.mix:8s}"
        self.say(
            f"{what} {line.adapters:2d} x r{line.rank:<2d} {line.us:8.2f} us ({line.p20:.2f}..{line.p80:.2f})"
            f"  x{line.us / line.floor_us:.2f} of floor{ratio}  {line.launches:g} launches"
        )
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")


def distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual - expected).norm() / expected.norm())
