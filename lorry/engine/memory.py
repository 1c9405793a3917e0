"""How a GPU's memory is divided: what each part takes, what is left for KV, and an error that explains itself.

Weights and the arena are allocated first. With a KV pool of one page, whose pages stand for all others, the largest
step is run and the largest graphs are captured on trial; both are measured. The rest is the KV pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lorry.config import PAGE_SIZE, EngineConfig
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.errors import ConfigError
from lorry.types import EngineRequest, SamplingParams

GPU_FRACTION = 0.9
"""Of a GPU's memory, for all that we allocate. The rest is for what cannot be foreseen, such as fragmentation."""

HOST_FRACTION = 0.3
"""Of the free memory of a host, for KV alone."""

FOREIGN = "CUDA and other processes"

_WAYS = {
    FOREIGN: "end other processes on this GPU",
    "weights": "--dtype bfloat16, or a smaller model",
    "arena of adapters": "--lora-memory, or --no-enable-lora",
    "largest step": "--chunked-prefill-size, --max-running-requests",
    "graphs": "--max-running-requests, --chunked-prefill-size, or --disable-cuda-graph",
    "KV pool": "--max-total-tokens, --context-length",
}
"""The parts, and the flags that lower each."""


@dataclass
class MemoryBudget:
    """Bytes of each part of a device's memory. Without a `limit`, as on a host, parts are counted, none refused."""

    name: str = "host"
    total: int = 0
    limit: int | None = None
    parts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, config: EngineConfig) -> MemoryBudget:
        """For a device as it is now."""
        if device.type != "cuda":
            return cls()
        total: int = torch.cuda.mem_get_info(device)[1]
        budget = cls(
            f"{device} ({torch.cuda.get_device_name(device)})",
            total,
            int(total * (config.mem_fraction_static or GPU_FRACTION)),
        )
        free, total = torch.cuda.mem_get_info(device)
        budget.take(FOREIGN, total - free - torch.cuda.memory_reserved(device))
        return budget

    @property
    def left(self) -> int:
        """Bytes that no part has taken yet; negative where they are too many."""
        return (self.limit or 0) - sum(self.parts.values())

    def take(self, part: str, num_bytes: int) -> None:
        """Count a part, or count it anew; `ConfigError` with the table where it does not fit."""
        assert part in _WAYS, part
        self.parts[part] = num_bytes
        if self.limit is not None and self.left < 0:
            raise self.error(f"{part} and what comes before do not fit")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"out of memory on {self.name}: {reason}\n{self.table()}")

    @contextmanager
    def explained(self, part: str, num_bytes: int = 0) -> Iterator[None]:
        """Turns the allocator's error within the block into ours; the block allocates `part`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.parts[part] = max(self.parts.get(part, 0), num_bytes)
            raise self.error(f"there was no memory for: {part}. {error}") from None

    def table(self) -> str:
        """A line for each part: GiB, and what lowers it."""
        limit = self.limit or self.total
        lines = [f"memory of {self.name}, GiB", _line("in all", self.total, "")]
        lines.append(_line("of which may be used", limit, "--mem-fraction-static raises it"))
        lines += [_line(f"  {part}", size, f"lower: {_WAYS[part]}") for part, size in self.parts.items()]
        return "\n".join([*lines, _line("left", self.left, "")])


def _line(name: str, num_bytes: int, remark: str) -> str:
    return f"  {name:<28}{num_bytes / 2**30:8.2f}  {remark}".rstrip()


def used_bytes(device: torch.device) -> int:
    """Memory in use on a GPU, by anyone, once what only lies in the allocator's cache is given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure_step(budget: MemoryBudget, device: torch.device, run: Callable[[], object]) -> None:
    """Count the peak of `run` beyond what is allocated now; what no part accounts for is CUDA's."""
    used_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with budget.explained("largest step"):
        for _ in range(2):  # the first compiles kernels
            run()
            torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    own = sum(size for part, size in budget.parts.items() if part != FOREIGN)
    budget.take(FOREIGN, max(0, used_bytes(device) - own))
    budget.take("largest step", peak)


@dataclass(frozen=True)
class StepLimits:
    """Most requests and most rows of one step."""

    num_requests: int
    num_rows: int

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> StepLimits:
        """As asked for, else what suits the device."""
        requests, rows = (128, 8192) if device.type == "cuda" else (64, 512)
        requests = config.max_running_requests or requests
        return cls(requests, max(config.chunked_prefill_size or rows, requests))


def largest_step(limits: StepLimits, context: int, slot: int) -> StepPlan:
    """As many rows and requests as a step may have, one of them at the end of a whole context, all of them sampled
    in the most expensive way. Every page is page 0, so it runs with a pool of any size and overwrites that page.
    """
    further = limits.num_rows - limits.num_requests
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20, repetition_penalty=1.1)
    chunks = []
    for i in range(limits.num_requests):
        rows = 1 + min(further, context - 1)
        further -= rows - 1
        length = context if i == 0 else rows
        request = EngineRequest(request_id=f"largest-{i}", token_ids=(0,) * length, params=params)
        pages = [0] * -(-length // PAGE_SIZE)
        sequence = Sequence(request, slot, i, 1, [0] * length, pages=pages, num_computed=length - rows)
        chunks.append(ScheduledChunk(sequence, length - rows, rows, samples=True))
    return StepPlan(tuple(chunks))


@dataclass(frozen=True)
class KVSize:
    """Pages of the pool, and the context length: at most the model's, and at most what the pool holds."""

    num_pages: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE_SIZE


def wanted_context(config: EngineConfig, max_context: int) -> int:
    """The context length asked for, or the model's."""
    wanted = config.context_length or max_context
    if wanted > max_context:
        raise ConfigError(f"--context-length {wanted} is more than the {max_context} positions that the model has")
    return wanted


def size_kv(
    config: EngineConfig, limits: StepLimits, max_context: int, bytes_per_token: int, available: int
) -> KVSize:
    """The pool for `available` bytes, or of the size asked for; `ConfigError` where it holds not even one page."""
    wanted = wanted_context(config, max_context)
    tokens = config.max_total_tokens
    if tokens is None:
        tokens = min(max(0, available) // bytes_per_token, limits.num_requests * wanted)
    num_pages = tokens // PAGE_SIZE
    if num_pages < 1:
        raise ConfigError(
            f"there is no memory for one page of KV ({PAGE_SIZE} tokens of {bytes_per_token:,} bytes): "
            "raise --mem-fraction-static or give --max-total-tokens"
        )
    context = min(wanted, num_pages * PAGE_SIZE)
    if config.context_length is not None and context < config.context_length:
        raise ConfigError(
            f"--context-length {wanted} does not fit into the {num_pages * PAGE_SIZE} tokens of the KV pool: "
            "lower it, or raise --max-total-tokens or --mem-fraction-static"
        )
    return KVSize(num_pages, context)
