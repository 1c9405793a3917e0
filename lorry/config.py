"""The one typed configuration: it feeds the command line, a YAML file and Python, and prints itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lorry.errors import ConfigError

PAGE_SIZE = 16
"""Tokens of one KV page."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes from `"2GiB"`, `"512M"`, `"1.5g"` or a plain number; units are powers of 1024."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class EngineConfig(BaseModel):
    """Everything the engine needs to start. Immutable: changes make a new one (`model_copy(update=...)`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(description="folder or hub name of the base model")
    tokenizer_path: str | None = Field(None, description="folder or hub name of the tokenizer, if not the model's")
    served_model_name: str | None = Field(None, description="name of the base in the API (default: the model's)")
    chat_template: str | None = Field(None, description="file with a Jinja chat template, if not the tokenizer's")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: the model's files; dummy: random weights from config.json alone, for benchmarks"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type of weights and KV")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    context_length: int | None = Field(None, ge=16, description="longest prompt plus answer, in tokens")
    random_seed: int = Field(0, description="seed of requests that bring none")

    max_running_requests: int | None = Field(
        None, ge=1, description="most requests in one step (default: 64, or 128 on a GPU)"
    )
    chunked_prefill_size: int | None = Field(
        None, ge=1, description="most rows (tokens) in one step (default: 512, or 8192 on a GPU)"
    )
    max_total_tokens: int | None = Field(None, ge=PAGE_SIZE, description="tokens that the KV pool holds")
    disable_cuda_graph: bool = Field(False, description="run steps eagerly on CUDA too")
    disable_overlap_schedule: bool = Field(False, description="read each step's tokens before planning the next")
    disable_grafts: bool = Field(False, description="run every layer as transformers wrote it, on CUDA too")
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's memory for weights, adapters, KV, graphs and the largest step together "
        "(default: 0.9); without a GPU the share of the free memory for KV (default: 0.3)",
    )
    disable_radix_cache: bool = Field(False, description="do not share the KV of equal prefixes")
    attention_backend: Literal["auto", "torch", "triton"] = Field("auto", description="implementation of attention")

    enable_lora: bool = Field(True, description="serve adapters")
    lora_paths: dict[str, str] = Field(default_factory=dict, description="adapters to load at start: NAME=PATH ...")
    lora_backend: Literal["auto", "torch", "triton", "csgmv"] = Field(
        "auto", description="implementation of LoRA on linear layers"
    )
    lora_use_virtual_experts: bool = Field(
        True, description="group LoRA on experts by (adapter, expert); off: one adapter after the other"
    )
    max_lora_rank: int | None = Field(None, ge=1, description="refuse adapters of a larger rank (default: no limit)")
    lora_target_modules: tuple[str, ...] | None = Field(
        None, description="serve only adapters whose modules are all among these, e.g. q_proj v_proj experts"
    )
    max_loras_per_batch: int = Field(64, ge=1, description="most adapters on the device at a time")
    max_loaded_loras: int | None = Field(
        None, ge=1, description="most adapters in the host's memory; others are read again when they are asked for"
    )
    lora_host_memory: int | None = Field(
        None, description="bytes of the host's memory for adapters, e.g. 64GiB (default: no limit)"
    )
    lora_eviction_policy: Literal["lru", "fifo"] = Field(
        "lru", description="which adapter makes room on the device: the least recently used one, or the oldest"
    )
    lora_drain_wait_threshold: float | None = Field(
        None,
        ge=0,
        description="seconds after which a request whose adapter finds no room on the device makes another adapter "
        "finish its requests and yield (default: never)",
    )
    lora_fair_share: bool = Field(
        False, description="let adapters with waiting requests have equal shares, not first come, first served"
    )
    max_requests_per_lora: int | None = Field(
        None, ge=1, description="most requests of one adapter in steps at a time; further ones wait"
    )
    lora_memory: int | None = Field(
        None, description="bytes of the arena that holds adapters, e.g. 2GiB (default: 1GiB, or 1/8 of a GPU)"
    )
    dummy_adapters: int = Field(
        0, ge=0, description="random adapters dummy-0, dummy-1, ... to load at start, with load-format dummy only"
    )
    dummy_rank: int = Field(16, ge=1, description="rank of the dummy adapters")

    @field_validator("lora_memory", "lora_host_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_dummies(self) -> Self:
        if not self.dummy_adapters:
            return self
        if self.load_format != "dummy":
            raise ConfigError(
                "--dummy-adapters would spoil the answers of a real model: add --load-format dummy for a benchmark, "
                "or serve real adapters with --lora-paths"
            )
        if not self.enable_lora:
            raise ConfigError("--dummy-adapters needs LoRA: leave out --no-enable-lora")
        if self.dummy_adapters > self.max_loras_per_batch:
            raise ConfigError(
                f"--dummy-adapters {self.dummy_adapters} is more than --max-loras-per-batch "
                f"{self.max_loras_per_batch}: raise the latter"
            )
        if self.max_lora_rank is not None and self.dummy_rank > self.max_lora_rank:
            raise ConfigError(
                f"--dummy-rank {self.dummy_rank} is above --max-lora-rank {self.max_lora_rank}: raise the latter"
            )
        return self

    @property
    def base_name(self) -> str:
        """Name of the base in the API: as asked for, else the model's path or hub name as given."""
        return self.served_model_name or self.model

    @classmethod
    def parse(cls, **settings: Any) -> Self:
        """Validate settings; the errors of all fields come as one `ConfigError` that names each."""
        try:
            return cls(**settings)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
            raise ConfigError("; ".join(lines)) from None

    @classmethod
    def read_yaml(cls, path: Path) -> dict[str, Any]:
        """Settings of a YAML file: keys are the flags' names, with hyphens or underscores."""
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"config file {path}: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"config file {path}: expected a mapping of settings, found {type(content).__name__}")
        return {str(key).replace("-", "_"): value for key, value in content.items()}

    def to_yaml(self) -> str:
        """The settings as YAML that `--config` reads back."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


class ServerConfig(EngineConfig):
    """The engine's settings and those of the HTTP server in front of it."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: str | None = Field(None, description="require this key as bearer token")
    admin_api_key: str | None = Field(
        None,
        description="require this key to load, pin, list and unload adapters; without it these routes are off, "
        "unless the server listens to this machine alone",
    )
    metrics_max_models: int = Field(
        100, ge=1, description="most models with metrics of their own; the others share one label"
    )
    lora_root: tuple[str, ...] = Field(
        (), description="folders: a model name that is not known is looked for below these, and loaded as an adapter"
    )
    lora_state: str | None = Field(
        None, description="file that keeps which adapters were loaded while the server ran, for its next start"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much is logged")
