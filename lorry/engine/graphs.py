"""Decode steps by CUDA graph: for each batch size of a ladder one without LoRA, and one for each kind of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorry.attention.base import CapturableAttention, DecodeBatch
from lorry.config import PAGE_SIZE
from lorry.engine.memory import used_bytes
from lorry.engine.sequence import StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager, Variant


def ladder(max_batch_size: int) -> list[int]:
    """Batch sizes that are captured: dense at the small end, where padding costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class _Inputs:
    """Fixed device buffers of a decode step, filled by one copy: ids, positions, write slots, lengths, pages."""

    def __init__(self, max_batch_size: int, max_pages: int, device: torch.device) -> None:
        self._max_batch_size = max_batch_size
        self._max_pages = max_pages
        self._data = torch.zeros(max_batch_size * (4 + max_pages), dtype=torch.int32, device=device)
        rows = self._data[: 4 * max_batch_size].view(4, max_batch_size)
        self.token_ids, self.positions, self.write_slots, self.context_lens = rows
        self.pages = self._data[4 * max_batch_size :].view(max_batch_size, max_pages)

    def fill(self, plan: StepPlan | None) -> None:
        """Pack a plan of decodes; rows behind it are padding (no context, written nowhere)."""
        packed = np.zeros(self._data.numel(), dtype=np.int32)
        rows = packed[: 4 * self._max_batch_size].reshape(4, self._max_batch_size)
        pages = packed[4 * self._max_batch_size :].reshape(self._max_batch_size, self._max_pages)
        rows[2] = -1
        for i, chunk in enumerate(plan.chunks if plan is not None else ()):
            sequence, position = chunk.sequence, chunk.start
            slot = sequence.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            rows[:, i] = (sequence.token_ids[position], position, slot, position + 1)
            pages[i, : len(sequence.pages)] = sequence.pages
        self._data.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)


_MIN_GRAPH_BYTES = 2**21
"""Of a captured graph: some kilobytes for each of its kernels."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """Captured decode steps. A plan is padded to the next size of the ladder, and replays a graph without LoRA where
    it is of base rows only, one without LoRA on experts where none of its adapters has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: CapturableAttention,
        lora: LoRAManager,
        max_batch_size: int,
        max_context: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._lora = lora
        self._sizes = ladder(max_batch_size)
        self._inputs = _Inputs(max_batch_size, -(-max_context // PAGE_SIZE), model.device)
        self._graphs: dict[tuple[int, Variant], _Graph] = {}
        self._memory: Any = None

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture every size, largest first so that the smaller ones share its memory. Takes seconds for each."""
        variants = self._lora.init_cuda_graphs(self._sizes[-1])
        with torch.inference_mode():
            for done, size in enumerate(reversed(self._sizes), start=1):
                for variant in variants:
                    self._graphs[size, variant] = self._capture_one(size, variant)
                progress(f"captured decode graphs for batch size {size} ({done} of {len(self._sizes)})")

    def estimate_bytes(self) -> int:
        """Device memory that `capture` will take, by trial captures of the two largest sizes, which are dropped.

        The first brings the memory that all graphs share. Each further graph has its own logits and launches: it is
        taken to cost what the second did, in proportion to its size.
        """
        variants = self._lora.init_cuda_graphs(self._sizes[-1])
        with torch.inference_mode():
            self._capture_one(self._sizes[-1], variants[-1])  # loads kernels, which is no cost of graphs
            self._memory = None
            used = [used_bytes(self._model.device)]
            for size in self._sizes[:-3:-1]:
                self._graphs[size, variants[-1]] = self._capture_one(size, variants[-1])
                used.append(used_bytes(self._model.device))
        self._graphs.clear()
        self._memory = None
        shared, further = used[1] - used[0], used[-1] - used[1]
        costs = [max(further * size // self._sizes[-2:][0], _MIN_GRAPH_BYTES) for size in self._sizes]
        return max(0, shared) + len(variants) * sum(costs)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is decodes alone, and not more than were captured for."""
        return len(plan.chunks) <= self._sizes[-1] and all(c.num_tokens == 1 and c.samples for c in plan.chunks)

    def replay(self, plan: StepPlan, routing: RequestRouting) -> Tensor:
        """Logits [number of chunks, vocab] of a plan that fits; valid until the next replay."""
        count = len(plan.chunks)
        size = next(size for size in self._sizes if size >= count)
        self._inputs.fill(plan)
        self._lora.prepare_lora_batch(routing, num_padded_tokens=size)
        captured = self._graphs[size, self._lora.variant]
        captured.graph.replay()
        return captured.logits[:count]

    def _capture_one(self, size: int, variant: Variant) -> _Graph:
        self._inputs.fill(None)
        self._lora.prepare_capture(size, variant)
        self._attention.plan_decode(self._batch(size))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and settles the allocator
                self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            logits = self._forward(size)
        self._memory = self._memory or graph.pool()
        self._lora.end_capture()
        return _Graph(graph, logits)

    def _batch(self, size: int) -> DecodeBatch:
        inputs = self._inputs
        return DecodeBatch(inputs.pages[:size], inputs.context_lens[:size], inputs.write_slots[:size])

    def _forward(self, size: int) -> Tensor:
        output = self._model(
            input_ids=self._inputs.token_ids[:size].long()[None],
            position_ids=self._inputs.positions[:size].long()[None],
            use_cache=False,
        )
        logits: Tensor = output.logits[0]
        return logits
