"""Builds the parts of an engine from its configuration: model, LoRA, KV pool, runner, scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

from lorry.attention.base import AttentionBackend, CapturableAttention, make_attention_backend
from lorry.config import PAGE_SIZE, EngineConfig
from lorry.engine.graphs import StepGraphs
from lorry.engine.memory import (
    HOST_FRACTION,
    KVSize,
    MemoryBudget,
    StepLimits,
    largest_step,
    measure_step,
    size_kv,
    used_bytes,
    wanted_context,
)
from lorry.engine.runner import ModelRunner
from lorry.engine.scheduler import Scheduler
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.errors import AdapterCapacity
from lorry.kv.pool import LayerKV, allocate_kv, grow_kv
from lorry.kv.prefix import PagePool
from lorry.lora.arena import Arena
from lorry.lora.dummy import DummyAdapter, dummy_bytes, dummy_sites, random_weights, zero_weights
from lorry.lora.layers import attach_lora
from lorry.lora.manager import LoRAManager
from lorry.models.hooks import bind_attention
from lorry.models.loader import LoadedModel, load_model, make_dummy_model, read_config, resolve_device
from lorry.models.reference import self_check
from lorry.models.sites import Site, find_sites
from lorry.types import BASE_SLOT, EngineInfo, EngineRequest, SamplingParams

_DEFAULT_CPU_ARENA = 2**30

_RANK_OF_LARGEST_STEP = 64
"""Rank of the adapter that the largest step is measured with, where --max-lora-rank gives no other."""

_LONG_CONTEXT = 2**14
"""Tokens of the longest context in the largest step, where memory does not depend on it but time does."""


@dataclass(frozen=True)
class Parts:
    """Everything an engine works with."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    lora: LoRAManager
    runner: ModelRunner
    scheduler: Scheduler
    info: EngineInfo = field(repr=False)
    dummies: tuple[DummyAdapter, ...] = ()


def build(config: EngineConfig, progress: Callable[[str], None]) -> Parts:
    """Load the model of the configuration and build around it."""
    start = time.perf_counter()
    device = resolve_device(config.device)
    skeleton = read_config(config.model)
    dtype = skeleton.dtype(config.dtype)
    budget = MemoryBudget.of(device, config)
    num_bytes = skeleton.num_parameters * dtype.itemsize
    budget.take("weights", num_bytes)
    load = make_dummy_model if config.load_format == "dummy" else load_model
    with budget.explained("weights", num_bytes):
        loaded = load(config.model, skeleton, dtype, device, progress)
    return build_around(loaded, config, progress, start)


def build_around(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None], start: float | None = None
) -> Parts:
    """Build around a model that is loaded: LoRA, memory, runner, with a self-check on the way."""
    start = time.perf_counter() if start is None else start
    budget = MemoryBudget.of(loaded.device, config)
    budget.take("weights", loaded.weight_bytes)
    all_sites = find_sites(loaded.model)
    sites = all_sites if config.enable_lora else ()
    arena = _make_arena(sites, loaded, config, budget) if config.enable_lora else None
    lora = LoRAManager(arena, config.lora_backend, config.lora_use_virtual_experts, loaded.device)
    with budget.explained("arena of adapters"):
        dummies = _load_dummies(lora, sites, loaded, config, progress) if config.dummy_adapters else ()
    attention = make_attention_backend(config.attention_backend, loaded.device)
    grafts = attention.name == "triton" and not config.disable_grafts
    if grafts:
        from lorry.models.grafts import graft_leaves

        graft_leaves(loaded.model, progress)
    lora.bind_experts(loaded.model, all_sites)
    attach_lora(loaded.model, sites, lora)

    pool = allocate_kv(loaded.kv_shapes, 1, loaded.dtype, loaded.device)  # grows when it is known what is left
    bind_attention(loaded.model, attention, pool)
    if grafts:
        from lorry.lora.grafting import graft_layers

        graft_layers(loaded.model, sites, lora, attention, pool, progress)
    limits = StepLimits.of(config, loaded.device)
    runner = ModelRunner(loaded, attention, lora, limits.num_requests)
    self_check(loaded.model, loaded.reference, _check_forward(loaded, runner))
    if loaded.device.type == "cuda":
        kv = _finish_on_cuda(
            _Unfinished(loaded, lora, runner, attention, config, limits, budget, dummies), pool, progress
        )
    else:
        free = psutil.virtual_memory().available * (config.mem_fraction_static or HOST_FRACTION)
        kv = size_kv(config, limits, loaded.max_context, _kv_bytes_per_token(loaded), int(free))
        grow_kv(pool, kv.num_pages)
    progress(f"self-check passed; {kv.num_tokens:,} tokens of KV, {len(sites):,} LoRA sites")
    scheduler = Scheduler(
        PagePool(kv.num_pages, PAGE_SIZE, not config.disable_radix_cache),
        limits.num_requests,
        limits.num_rows,
    )

    has_experts = any(site.kind == "experts" for site in all_sites)
    info = EngineInfo(
        model=config.model,
        architecture=type(loaded.model).__name__,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        context_length=kv.context,
        kv_tokens=kv.num_tokens,
        kv_bytes=kv.num_tokens * _kv_bytes_per_token(loaded),
        lora_bytes=arena.num_bytes if arena is not None else 0,
        num_lora_sites=len(sites),
        max_loras=config.max_loras_per_batch if config.enable_lora else 0,
        eos_token_ids=loaded.eos_token_ids,
        attention_backend=attention.name,
        lora_backend=lora.dense.name if lora.dense is not None else "none",
        experts_backend=lora.experts.name if has_experts else None,
        load_seconds=time.perf_counter() - start,
    )
    return Parts(loaded, sites, lora, runner, scheduler, info, dummies)


def _make_arena(sites: tuple[Site, ...], loaded: LoadedModel, config: EngineConfig, budget: MemoryBudget) -> Arena:
    num_bytes = config.lora_memory
    if num_bytes is None:
        num_bytes = budget.total // 8 if loaded.device.type == "cuda" else _DEFAULT_CPU_ARENA
        if config.dummy_adapters:
            chosen = dummy_sites(loaded.model, sites, config.lora_target_modules)
            needed = config.dummy_adapters * dummy_bytes(chosen, config.dummy_rank, loaded.dtype)
            num_bytes = max(num_bytes, needed)
    budget.take("arena of adapters", num_bytes)
    with budget.explained("arena of adapters"):
        return Arena(sites, num_bytes, config.max_loras_per_batch, loaded.dtype, loaded.device)


def _load_dummies(
    lora: LoRAManager,
    sites: tuple[Site, ...],
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Callable[[str], None],
) -> tuple[DummyAdapter, ...]:
    """The dummy adapters, on the device before the rest of its memory is divided: each is there twice at first."""
    chosen = dummy_sites(loaded.model, sites, config.lora_target_modules)
    dummies = []
    for seed in range(config.dummy_adapters):
        weights = random_weights(chosen, config.dummy_rank, loaded.dtype, loaded.device, seed)
        try:
            slot = lora.load(weights)
        except AdapterCapacity as error:
            raise AdapterCapacity(f"adapter 'dummy-{seed}' of {config.dummy_adapters}: {error}") from None
        dummies.append(DummyAdapter(f"dummy-{seed}", slot, weights.rank, weights.num_bytes, weights.target_modules))
    size = sum(dummy.num_bytes for dummy in dummies)
    progress(f"made {len(dummies)} dummy adapters of rank {config.dummy_rank}, {size / 2**30:.2f} GiB")
    return tuple(dummies)


def _kv_bytes_per_token(loaded: LoadedModel) -> int:
    return sum(shape.bytes_per_token(loaded.dtype) for shape in loaded.kv_shapes.values())


@dataclass(frozen=True)
class _Unfinished:
    """An engine that runs, on a pool of one page."""

    loaded: LoadedModel
    lora: LoRAManager
    runner: ModelRunner
    attention: AttentionBackend
    config: EngineConfig
    limits: StepLimits
    budget: MemoryBudget
    dummies: tuple[DummyAdapter, ...]

    def make_graphs(self, context: int) -> StepGraphs | None:
        if self.config.disable_cuda_graph or not isinstance(self.attention, CapturableAttention):
            return None
        tokens = self.runner.sampler.tokens
        return StepGraphs(self.loaded.model, self.attention, self.lora, tokens, self.limits.num_rows, context)


def _finish_on_cuda(parts: _Unfinished, pool: dict[str, LayerKV], progress: Callable[[str], None]) -> KVSize:
    """Measure the largest step and the graphs, give KV the rest, capture, and run the largest step once more."""
    loaded, config, budget, device = parts.loaded, parts.config, parts.budget, parts.loaded.device
    bytes_per_token = _kv_bytes_per_token(loaded)
    wanted = wanted_context(config, loaded.max_context)
    bound = min(wanted, max(PAGE_SIZE, budget.left // bytes_per_token), config.max_total_tokens or wanted)
    if isinstance(parts.attention, CapturableAttention):  # it reads pages in place: no memory grows with the context
        bound = min(bound, _LONG_CONTEXT)
    with _any_adapter(parts) as slot:
        plan = largest_step(parts.limits, bound, slot)
        progress("measuring the memory of the largest step")
        measure_step(budget, device, lambda: parts.runner.launch(plan))
        trial = parts.make_graphs(bound)
        if trial is not None:
            with budget.explained("graphs"):
                budget.take("graphs", trial.estimate_bytes())
            del trial
        kv = size_kv(config, parts.limits, loaded.max_context, bytes_per_token, budget.left)
        budget.take("KV pool", kv.num_tokens * bytes_per_token)
        with budget.explained("KV pool"):
            grow_kv(pool, kv.num_pages)
        with budget.explained("graphs"):
            parts.runner.graphs = parts.make_graphs(kv.context)
            if parts.runner.graphs is not None:
                before, estimate = used_bytes(device), budget.parts["graphs"]
                parts.runner.graphs.capture(progress)
                budget.parts["graphs"] = used_bytes(device) - before
                progress(
                    f"graphs take {budget.parts['graphs'] / 2**30:.2f} GiB, {estimate / 2**30:.2f} GiB were set aside"
                )
        with budget.explained("largest step"):
            parts.runner.launch(largest_step(parts.limits, min(bound, kv.context), slot))
            torch.cuda.synchronize(device)
    progress(budget.table())
    return kv


@contextmanager
def _any_adapter(parts: _Unfinished) -> Iterator[int]:
    """Slot of an adapter that touches every site, for as long as the context lasts; of the largest rank that fits."""
    lora, config = parts.lora, parts.config
    if lora.arena is None or lora.dense is None or not lora.arena.sites:
        yield BASE_SLOT
        return
    rank = min(config.max_lora_rank or _RANK_OF_LARGEST_STEP, lora.dense.max_rank or 2**20)
    slot = None
    while slot is None and rank:
        try:
            slot = lora.load(zero_weights(lora.arena.sites, rank, parts.loaded.dtype, parts.loaded.device))
        except AdapterCapacity:
            rank //= 2
    if slot is None:  # no room beside the dummies, or for anything
        yield parts.dummies[0].slot if parts.dummies else BASE_SLOT
        return
    try:
        yield slot
    finally:
        lora.unload(slot)


def _check_forward(loaded: LoadedModel, runner: ModelRunner) -> Callable[[int, int], Tensor]:
    """Logits of a part of the reference prompt, whose keys and values are in page 0."""
    token_ids = list(loaded.reference.token_ids)
    request = EngineRequest(request_id="self-check", token_ids=tuple(token_ids), params=SamplingParams())
    sequence = Sequence(request, BASE_SLOT, 0, 1, token_ids, pages=[0])

    def forward(start: int, stop: int) -> Tensor:
        plan = StepPlan((ScheduledChunk(sequence, start, stop - start),))
        return runner.forward(plan, list(range(stop - start)))

    return forward
