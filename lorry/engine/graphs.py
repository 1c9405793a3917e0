"""Steps by CUDA graph: decodes for a ladder of batch sizes, steps with prefill for a ladder of numbers of rows; of
each one without LoRA, and one for each kind of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorry.attention.base import CapturableAttention, DecodeBatch, PaddedBatch
from lorry.config import PAGE_SIZE
from lorry.engine.inputs import FixedInputs
from lorry.engine.memory import used_bytes
from lorry.engine.sequence import StepPlan
from lorry.lora.batch import RequestRouting
from lorry.lora.manager import LoRAManager, Variant

Kind = Literal["decode", "mixed"]
"""A step of one token for each sequence, or of any chunks."""

_NOTHING = StepPlan(())

_MIN_GRAPH_BYTES = 2**21
"""Of a captured graph: some kilobytes for each of its kernels."""


def decode_ladder(max_batch_size: int) -> list[int]:
    """Batch sizes that are captured: dense at the small end, where padding costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


def mixed_ladder(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: padding is few rows at the small end, a quarter of a large step at most."""
    sizes = [32, 64, 128, 256, 512, 768]
    octave = 1024
    while octave < max_rows:
        sizes += [octave, octave * 5 // 4, octave * 6 // 4]
        octave *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True)
class Shape:
    """What a step is captured for: its kind and its number of rows, padding included."""

    kind: Kind
    num_rows: int


class StepGraphs:
    """Captured steps. A plan is padded to the next size of its ladder, and replays a graph without LoRA where it is
    of base rows only, one without LoRA on experts where none of its adapters has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: CapturableAttention,
        lora: LoRAManager,
        sampled: Tensor,
        max_rows: int,
        max_context: int,
    ) -> None:
        """`sampled` [most requests] int32: where every step leaves the tokens that it sampled."""
        self._model = model
        self._attention = attention
        self._lora = lora
        self._max_requests = len(sampled)
        self._ladders: dict[Kind, list[int]] = {
            "mixed": mixed_ladder(max_rows),
            "decode": decode_ladder(len(sampled)),
        }
        self._inputs = FixedInputs(sampled, max(max_rows, len(sampled)), -(-max_context // PAGE_SIZE))
        self._variants = lora.init_cuda_graphs(len(sampled), max_rows)
        attention.reserve(len(sampled), max_rows, model.device)
        self._graphs: dict[tuple[Shape, Variant], torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        self._memory: Any = None
        self._stream: torch.cuda.Stream | None = None  # the same for all: streams do not share memory

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture everything, largest first so that what follows shares its memory. Takes seconds for each size."""
        shapes = [Shape(kind, size) for kind, sizes in self._ladders.items() for size in reversed(sizes)]
        start = time.perf_counter()
        for done, shape in enumerate(shapes, start=1):
            for variant in self._variants:
                self._graphs[shape, variant] = self._capture_one(shape, variant)
            seconds = time.perf_counter() - start
            progress(f"captured {shape.kind} steps of {shape.num_rows} rows ({done}/{len(shapes)}, {seconds:.0f} s)")

    @torch.inference_mode()
    def estimate_bytes(self) -> int:
        """Device memory that `capture` will take, by trial captures of the two largest sizes of each kind, which are
        dropped.

        The first brings the memory that all graphs share. Each further graph of a kind is taken to cost what the
        second of the kind did: that of its launches.
        """
        device, variant = self._model.device, self._variants[-1]
        self._capture_one(Shape("mixed", self._ladders["mixed"][-1]), variant)  # loads kernels: no cost of graphs
        self._memory = self._logits = None
        trial, used, total = [], [used_bytes(device)], 0
        for kind, sizes in self._ladders.items():
            for size in sizes[:-3:-1]:
                trial.append(self._capture_one(Shape(kind, size), variant))
                used.append(used_bytes(device))
            total += len(sizes) * len(self._variants) * max(used[-1] - used[-2], _MIN_GRAPH_BYTES)
        total += max(0, used[1] - used[0])
        del trial
        self._memory = self._logits = None
        return total

    def fits(self, plan: StepPlan) -> bool:
        """Whether steps were captured that hold the plan."""
        return len(plan.chunks) <= self._max_requests and plan.num_tokens <= self._ladders["mixed"][-1]

    def replay(self, plan: StepPlan, routing: RequestRouting) -> Tensor:
        """Logits [number of chunks that sample, vocab] of a plan that fits; valid until the next replay."""
        kind: Kind = "decode" if all(chunk.num_tokens == 1 for chunk in plan.chunks) else "mixed"
        num_rows = plan.num_tokens
        shape = Shape(kind, next(size for size in self._ladders[kind] if size >= num_rows))
        self._lora.prepare_lora_batch(routing, shape.num_rows)
        self._give(plan, shape)
        self._graphs[shape, self._lora.variant].replay()
        assert self._logits is not None
        return self._logits[: len(plan.sampling)]

    def _give(self, plan: StepPlan, shape: Shape) -> None:
        """Write a plan to where the graphs of the shape read it."""
        inputs, num_rows = self._inputs, shape.num_rows
        inputs.fill(plan, num_rows)
        requests = min(self._max_requests, num_rows)
        pages, write_slots = inputs.pages[:requests], inputs.write_slots[:num_rows]
        if shape.kind == "decode":
            self._attention.plan_decode(DecodeBatch(pages, inputs.context_lens[:requests], write_slots))
        else:
            query_lens = tuple(chunk.num_tokens for chunk in plan.chunks)
            context_lens = tuple(chunk.start + chunk.num_tokens for chunk in plan.chunks)
            self._attention.plan_padded(PaddedBatch(query_lens, context_lens, pages, write_slots))

    def _capture_one(self, shape: Shape, variant: Variant) -> torch.cuda.CUDAGraph:
        self._lora.prepare_capture(shape.num_rows, variant)
        self._give(_NOTHING, shape)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._forward(shape)  # compiles kernels and settles the allocator
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # not `torch.cuda.graph`, which gives all free memory back each time
            graph.capture_begin(**({} if self._memory is None else {"pool": self._memory}))
            self._forward(shape)
            graph.capture_end()
        self._memory = self._memory or graph.pool()
        self._lora.end_capture()
        return graph

    def _forward(self, shape: Shape) -> None:
        """One step; its logits, of the rows that sample, go to where all graphs leave them."""
        inputs = self._inputs
        output = self._model(
            input_ids=inputs.input_ids(shape.num_rows)[None],
            position_ids=inputs.positions[: shape.num_rows].long()[None],
            use_cache=False,
            logits_to_keep=inputs.logit_rows[: min(self._max_requests, shape.num_rows)].long(),
        )
        logits = output.logits[0]
        if self._logits is None:
            self._logits = logits.new_empty(self._max_requests, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)
