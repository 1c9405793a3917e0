"""Decode steps by CUDA graph: for each batch size of a ladder one without LoRA, and one for each kind of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorry.attention.base import CapturableAttention, DecodeBatch
from lorry.config import PAGE_SIZE
from lorry.engine.memory import used_bytes
from lorry.engine.sequence import ScheduledChunk, StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager, Variant
from lorry.upload import upload


def ladder(max_batch_size: int) -> list[int]:
    """Batch sizes that are captured: dense at the small end, where padding costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class DecodeInputs:
    """Fixed device buffers of a decode step, filled by copies as large as what is new in the step.

    `token_ids` are those that the host knows; the token of row i is element `sources[i]` of what the last step
    sampled, `sampled`, with `token_ids` behind it. `pages` keeps what earlier steps wrote: a sequence that stays in
    its row adds a page in one step of 16.
    """

    def __init__(self, sampled: Tensor, max_batch_size: int, max_pages: int, device: torch.device) -> None:
        self._sampled = sampled
        self._data = torch.zeros(5, max_batch_size, dtype=torch.int32, device=device)
        self.sources, self.token_ids, self.positions, self.write_slots, self.context_lens = self._data
        self.pages = torch.zeros(max_batch_size, max_pages, dtype=torch.int32, device=device)
        self._padding = np.zeros((5, max_batch_size), dtype=np.int32)
        self._padding[0] = len(sampled) + np.arange(max_batch_size)
        self._padding[3] = -1
        self._owners: list[list[int] | None] = [None] * max_batch_size
        self._counts = [0] * max_batch_size

    def fill(self, plan: StepPlan | None) -> None:
        """Pack a plan of decodes; rows behind it are padding (no context, written nowhere)."""
        packed = self._padding.copy()
        arrays = [packed]
        if plan is not None:
            packed[1:, : len(plan.chunks)] = np.array([_row(chunk) for chunk in plan.chunks], dtype=np.int32).T
            for i, chunk in enumerate(plan.chunks):
                if chunk.source >= 0:
                    packed[0, i] = chunk.source
            arrays += self._new_pages(plan)
        rows, *new_pages = upload(arrays, self._data.device)
        self._data.copy_(rows)
        if new_pages:
            self.pages.view(-1).index_copy_(0, *new_pages)

    def input_ids(self, size: int) -> Tensor:
        """Token ids [size] int64 of the step; part of its graph."""
        known = torch.cat([self._sampled, self.token_ids[:size]])
        return known.index_select(0, self.sources[:size]).long()

    def _new_pages(self, plan: StepPlan) -> list[npt.NDArray[Any]]:
        """Places (int64) and numbers (int32) of the pages that are new in their row; empty where none are.

        A sequence's list of pages only grows, and is another list once the sequence has lost its pages: the list
        itself tells whether a row still holds what was written.
        """
        places, new = [], []
        for i, chunk in enumerate(plan.chunks):
            pages = chunk.sequence.pages
            start = self._counts[i] if self._owners[i] is pages else 0
            if start < len(pages):
                first = i * self.pages.shape[1]
                places.append(np.arange(first + start, first + len(pages)))
                new += pages[start:]
            self._owners[i], self._counts[i] = pages, len(pages)
        return [np.concatenate(places), np.array(new, dtype=np.int32)] if new else []


def _row(chunk: ScheduledChunk) -> tuple[int, int, int, int]:
    """Token id, position, write slot and context length of a decode."""
    sequence, position = chunk.sequence, chunk.start
    token = sequence.token_ids[position] if chunk.source < 0 else 0
    slot = sequence.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    return token, position, slot, position + 1


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
        sampled: Tensor,
        max_context: int,
    ) -> None:
        """`sampled` [largest batch] int32: where every step leaves the tokens that it sampled."""
        self._model = model
        self._attention = attention
        self._lora = lora
        self._sizes = ladder(len(sampled))
        self._inputs = DecodeInputs(sampled, len(sampled), -(-max_context // PAGE_SIZE), model.device)
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
        return len(plan.chunks) <= self._sizes[-1] and all(c.num_tokens == 1 for c in plan.chunks)

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
            input_ids=self._inputs.input_ids(size)[None],
            position_ids=self._inputs.positions[:size].long()[None],
            use_cache=False,
        )
        logits: Tensor = output.logits[0]
        return logits
