"""Builds the parts of an engine from its configuration: model, LoRA, KV pool, runner, scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from lorry.attention.base import CapturableAttention, make_attention_backend
from lorry.config import PAGE_SIZE, EngineConfig
from lorry.engine.graphs import DecodeGraphs
from lorry.engine.runner import ModelRunner
from lorry.engine.scheduler import Scheduler
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.errors import ConfigError
from lorry.kv.pool import allocate_kv
from lorry.kv.prefix import PagePool
from lorry.lora.arena import Arena
from lorry.lora.layers import attach_lora
from lorry.lora.manager import LoRAManager
from lorry.models.hooks import bind_attention
from lorry.models.loader import LoadedModel, check_against_reference, load_model, resolve_device
from lorry.models.sites import Site, find_sites
from lorry.types import BASE_SLOT, EngineInfo, EngineRequest, SamplingParams

_DEFAULT_CPU_ARENA = 2**30


@dataclass(frozen=True)
class Parts:
    """Everything an engine works with."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    lora: LoRAManager
    runner: ModelRunner
    scheduler: Scheduler
    info: EngineInfo = field(repr=False)


def build(config: EngineConfig, progress: Callable[[str], None]) -> Parts:
    """Load the model of the configuration and build around it."""
    start = time.perf_counter()
    loaded = load_model(config.model, config.dtype, resolve_device(config.device), progress)
    return build_around(loaded, config, progress, start)


def build_around(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None], start: float | None = None
) -> Parts:
    """Build around a model that is loaded: LoRA, memory, runner; ends with the self-check."""
    start = time.perf_counter() if start is None else start
    all_sites = find_sites(loaded.model)
    sites = all_sites if config.enable_lora else ()
    arena = _make_arena(sites, loaded, config) if config.enable_lora else None
    lora = LoRAManager(arena, config.lora_backend, config.lora_use_virtual_experts, loaded.device)
    attention = make_attention_backend(config.attention_backend, loaded.device)
    grafts = attention.name == "triton" and not config.disable_grafts
    if grafts:
        from lorry.models.grafts import graft_leaves

        graft_leaves(loaded.model, progress)
    lora.bind_experts(loaded.model, all_sites)
    attach_lora(loaded.model, sites, lora)

    num_pages, context = _size_kv(loaded, config)
    pool = allocate_kv(loaded.kv_shapes, num_pages, loaded.dtype, loaded.device)
    bind_attention(loaded.model, attention, pool)
    if grafts:
        from lorry.lora.grafting import graft_layers

        graft_layers(loaded.model, sites, lora, attention, pool, progress)
    runner = ModelRunner(loaded, attention, lora, config.max_running_requests)
    scheduler = Scheduler(
        PagePool(num_pages, PAGE_SIZE, not config.disable_radix_cache),
        config.max_running_requests,
        max(config.chunked_prefill_size, config.max_running_requests),
    )
    _self_check(loaded, runner)
    if loaded.device.type == "cuda" and not config.disable_cuda_graph and isinstance(attention, CapturableAttention):
        runner.graphs = DecodeGraphs(loaded.model, attention, lora, runner.sampler.tokens, context)
        runner.graphs.capture(progress)
    progress(f"self-check passed; {num_pages * PAGE_SIZE:,} tokens of KV, {len(sites):,} LoRA sites")

    has_experts = any(site.kind == "experts" for site in all_sites)
    info = EngineInfo(
        model=config.model,
        architecture=type(loaded.model).__name__,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        context_length=context,
        kv_tokens=num_pages * PAGE_SIZE,
        kv_bytes=num_pages * PAGE_SIZE * _kv_bytes_per_token(loaded),
        lora_bytes=arena.num_bytes if arena is not None else 0,
        num_lora_sites=len(sites),
        max_loras=config.max_loras_per_batch if config.enable_lora else 0,
        eos_token_ids=loaded.eos_token_ids,
        attention_backend=attention.name,
        lora_backend=lora.dense.name if lora.dense is not None else "none",
        experts_backend=lora.experts.name if has_experts else None,
        load_seconds=time.perf_counter() - start,
    )
    return Parts(loaded, sites, lora, runner, scheduler, info)


def _make_arena(sites: tuple[Site, ...], loaded: LoadedModel, config: EngineConfig) -> Arena:
    num_bytes = config.lora_memory
    if num_bytes is None:
        on_gpu = loaded.device.type == "cuda"
        num_bytes = torch.cuda.mem_get_info()[1] // 8 if on_gpu else _DEFAULT_CPU_ARENA
    return Arena(sites, num_bytes, config.max_loras_per_batch, loaded.dtype, loaded.device)


def _kv_bytes_per_token(loaded: LoadedModel) -> int:
    return sum(shape.bytes_per_token(loaded.dtype) for shape in loaded.kv_shapes.values())


def _size_kv(loaded: LoadedModel, config: EngineConfig) -> tuple[int, int]:
    """Pages of the pool and the context length, which is at most the model's and at most what the pool holds."""
    wanted = config.context_length or loaded.max_context
    if wanted > loaded.max_context:
        raise ConfigError(
            f"--context-length {wanted} is more than the {loaded.max_context} positions that the model has"
        )
    if config.max_total_tokens is not None:
        tokens = config.max_total_tokens
    else:
        on_gpu = loaded.device.type == "cuda"
        free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
        tokens = int(free * config.mem_fraction_static) // _kv_bytes_per_token(loaded)
        tokens = min(tokens, config.max_running_requests * wanted)
    num_pages = tokens // PAGE_SIZE
    if num_pages < 1:
        raise ConfigError(
            f"there is no memory for one page of KV ({PAGE_SIZE} tokens of {_kv_bytes_per_token(loaded):,} bytes): "
            "raise --mem-fraction-static or give --max-total-tokens"
        )
    context = min(wanted, num_pages * PAGE_SIZE)
    if config.context_length is not None and context < config.context_length:
        raise ConfigError(
            f"--context-length {wanted} does not fit into the {num_pages * PAGE_SIZE} tokens of the KV pool: "
            "lower it, or raise --max-total-tokens or --mem-fraction-static"
        )
    return num_pages, context


def _self_check(loaded: LoadedModel, runner: ModelRunner) -> None:
    """Prefill the reference prompt in two chunks on pages 0 and following, and compare with the plain model."""
    token_ids = list(loaded.reference.token_ids)
    request = EngineRequest(request_id="self-check", token_ids=tuple(token_ids), params=SamplingParams())
    sequence = Sequence(request, BASE_SLOT, 0, 1, token_ids, pages=[0])
    first, second = StepPlan((ScheduledChunk(sequence, 0, 7),)), StepPlan((ScheduledChunk(sequence, 7, 5),))
    logits = torch.cat([runner.forward(first, list(range(7))), runner.forward(second, list(range(5)))])
    check_against_reference(loaded, logits)
