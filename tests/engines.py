"""Engines around tiny models, and packed steps cut by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorry.config import PAGE_SIZE, EngineConfig
from lorry.engine.build import Parts, build_around
from lorry.engine.engine import Engine
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.lora.adapter import load_adapter
from lorry.models.loader import hook_model
from lorry.types import BASE_SLOT, BASE_UID, EngineRequest, SamplingParams, TokenOutput


def make_parts(model: PreTrainedModel, eos: tuple[int, ...] = (), **settings: Any) -> Parts:
    """All parts of an engine around a model in memory; `settings` are fields of `EngineConfig`."""
    defaults = {"model": "tiny", "max_total_tokens": 1024, "lora_memory": 2**22}
    config = EngineConfig.parse(**(defaults | settings))
    return build_around(hook_model(model, eos), config, lambda text: None)


def make_engine(
    model: PreTrainedModel, adapters: dict[str, Path] | None = None, eos: tuple[int, ...] = (), **settings: Any
) -> Engine:
    """An engine around a model in memory, with adapters by name."""
    parts = make_parts(model, eos, **settings)
    paths = {name: str(path) for name, path in (adapters or {}).items()}
    return Engine(EngineConfig.parse(model="tiny", lora_paths=paths, **settings), parts=parts)


def load_slot(parts: Parts, path: Path) -> int:
    """Put an adapter's files on the device; returns the slot."""
    return parts.lora.load(load_adapter(path.name, str(path), parts.sites, parts.loaded.dtype))


def packed_logits(
    parts: Parts, prompts: Seq[Seq[int]], slots: Seq[int], steps: Seq[Seq[tuple[int, int]]]
) -> list[Tensor]:
    """Logits of all tokens of each prompt [length, vocab], computed in packed steps.

    `steps[s][i]` is the half-open range of prompt i that step s computes; an empty range leaves it out of the step.
    """
    sequences, next_page = [], 0
    for i, (tokens, slot) in enumerate(zip(prompts, slots, strict=True)):
        count = -(-len(tokens) // PAGE_SIZE)
        request = EngineRequest(request_id=str(i), token_ids=tuple(tokens), params=SamplingParams())
        pages = list(range(next_page, next_page + count))
        sequences.append(Sequence(request, slot, 0, 1, list(tokens), pages=pages))
        next_page += count
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for ranges in steps:
        chosen = [(i, start, stop) for i, (start, stop) in enumerate(ranges) if stop > start]
        if not chosen:
            continue
        plan = StepPlan(tuple(ScheduledChunk(sequences[i], start, stop - start) for i, start, stop in chosen))
        rows = parts.runner.forward(plan, list(range(plan.num_tokens)))
        for (i, _, _), part in zip(chosen, rows.split([c.num_tokens for c in plan.chunks]), strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def mixed_steps(lengths: Seq[int]) -> list[list[tuple[int, int]]]:
    """Three steps; the second holds, side by side, a decode, a whole prefill, and the end of a chunked one."""
    steps: list[list[tuple[int, int]]] = [[], [], []]
    for i, length in enumerate(lengths):
        cuts = [(length - 1, length), (0, length), (length // 3, length)][i % 3]
        steps[0].append((0, cuts[0]))
        steps[1].append(cuts if i % 3 != 2 else (cuts[0], length - 1))
        steps[2].append((0, 0) if i % 3 != 2 else (length - 1, length))
    return steps


def request(
    name: str, tokens: Seq[int], engine: Engine | None = None, adapter: str | None = None, **params: Any
) -> EngineRequest:
    """A greedy request for an engine, by the adapter's name."""
    uid = BASE_UID if adapter is None or engine is None else engine.adapters[adapter].uid
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
    return EngineRequest(request_id=name, token_ids=tuple(tokens), params=sampling, adapter_uid=uid)


def run_engine(engine: Engine, requests: Seq[EngineRequest]) -> dict[str, list[TokenOutput]]:
    """Add all requests, step until nothing is left; outputs by request in order."""
    for item in requests:
        engine.add_request(item)
    outputs: dict[str, list[TokenOutput]] = {item.request_id: [] for item in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: Seq[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


BASE = BASE_SLOT


WAYS_OF_SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.2, "top_p": 0.9, "seed": 5},
    {"temperature": 1.0, "top_k": 7, "min_p": 0.02, "seed": 6, "logprobs": 3},
    {"repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 1.5, "presence_penalty": 1.5, "frequency_penalty": 0.7, "seed": 7},
    {"temperature": 0.9},
    {"logprobs": 20},
]
"""Parameters of requests that choose their tokens in every way there is."""
