"""What is noticed during a soak: how long steps take, whether anything moves, and what memory the process has."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import psutil

from lorry.engine.engine import Engine
from lorry.types import EngineStats, TokenOutput

STALL_SECONDS = 60.0
"""Without a token, a read or a copy for so long, while there is work, the soak ends."""

SAMPLE_SECONDS, SAY_SECONDS = 0.5, 10.0

GROWTH, GROWTH_BYTES = 1.05, 2**25
"""The process' memory may be so much larger in the last quarter than in the second; the first is its warm-up."""

FEWEST_SAMPLES = 100
"""Fewer do not tell whether memory grows."""


class Times:
    """Of steps or calls, in seconds."""

    def __init__(self) -> None:
        self._all = array("d")

    def add(self, seconds: float) -> None:
        self._all.append(seconds)

    def summary(self) -> dict[str, float]:
        """Their number, and milliseconds."""
        ordered = sorted(self._all) or [0.0]
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        found = {"p50": p50, "p99": p99, "longest": ordered[-1]}
        return {"count": len(self._all)} | {name: round(1e3 * value, 1) for name, value in found.items()}


class Watch:
    """Steps an engine. `begin` forgets all that was noticed before."""

    def __init__(self, engine: Engine, say: Callable[[str], None]) -> None:
        """`say` gets a line every ten seconds."""
        self._engine, self._say = engine, say
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        self._steps, self._cpu, self._loading, self._calls = Times(), Times(), Times(), Times()
        self._rss = array("d")
        self._start = self._moved = self._sampled = self._said = time.perf_counter()
        self._before = self._first = self._engine.stats()
        self._most_on_host = self._most_on_device = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._start

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Between two steps: what it takes, running requests wait."""
        start = time.perf_counter()
        result = function(*args)
        self._calls.add(time.perf_counter() - start)
        return result

    def step(self, loading: bool) -> list[TokenOutput]:
        """A step; it is one during loads where files are read or adapters are copied too."""
        start, cpu = time.perf_counter(), time.thread_time()
        outputs = self._engine.step()
        took = time.perf_counter() - start
        self._cpu.add(time.thread_time() - cpu)
        self._steps.add(took)
        stats = self._engine.stats()
        moved = _moves(stats) != _moves(self._before)
        if loading or moved:
            self._loading.add(took)
        self._before = stats
        self._most_on_host = max(self._most_on_host, stats.adapters_on_host)
        self._most_on_device = max(self._most_on_device, stats.adapters_on_device)
        if moved or outputs:
            self._moved = time.perf_counter()
        return outputs

    def look(self, line: Callable[[], str]) -> None:
        """Between steps, often: sample, say a `line` where it is time to, raise where nothing moves."""
        now = time.perf_counter()
        if not self._engine.has_work:
            self._moved = now
        elif now - self._moved > STALL_SECONDS:
            raise TimeoutError(f"nothing has moved for {STALL_SECONDS} s: {self._engine.stats()}")
        if now - self._sampled >= SAMPLE_SECONDS:
            self._sampled = now
            self._rss.append(self._process.memory_info().rss)
        if now - self._said >= SAY_SECONDS:
            self._said = now
            stats, rss = self._before, self._process.memory_info().rss
            self._say(
                f"{self.seconds:5.0f} s  {line()}, {stats.num_adapter_evictions} evictions, "
                f"{stats.num_adapter_reads} reads, {stats.num_adapter_drains} drains; {rss / 2**20:.0f} MiB"
            )

    def growth(self) -> str | None:
        """How the process grew, where that is too much."""
        second, last = self._quarter(1), self._quarter(3)
        if len(self._rss) < FEWEST_SAMPLES or last <= GROWTH * second + GROWTH_BYTES:
            return None
        return f"the process grew from {second / 2**20:.0f} to {last / 2**20:.0f} MiB"

    def record(self) -> dict[str, Any]:
        """The part of the line of JSON."""
        stats, first = self._before, self._first
        rss = {
            "second_quarter": self._quarter(1),
            "last_quarter": self._quarter(3),
            "peak": max(self._rss, default=0),
        }
        return {
            "evictions": stats.num_adapter_evictions - first.num_adapter_evictions,
            "reads": stats.num_adapter_reads - first.num_adapter_reads,
            "copies": stats.num_adapter_copies - first.num_adapter_copies,
            "drains": stats.num_adapter_drains - first.num_adapter_drains,
            "preemptions": stats.num_preemptions - first.num_preemptions,
            "most_on_host": self._most_on_host,
            "most_on_device": self._most_on_device,
            "rss_mib": {name: round(value / 2**20) for name, value in rss.items()},
            "step_ms": self._steps.summary(),
            "step_ms_during_loads": self._loading.summary(),
            "step_cpu_ms": self._cpu.summary(),
            "call_ms": self._calls.summary(),
        }

    def _quarter(self, number: int) -> float:
        """Median of the process' memory in a quarter of the time."""
        size = len(self._rss) // 4
        return statistics.median(self._rss[number * size : (number + 1) * size] or [0.0])


def _moves(stats: EngineStats) -> tuple[int, int]:
    return stats.num_adapter_reads, stats.num_adapter_copies
