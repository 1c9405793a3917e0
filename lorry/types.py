"""What travels between the parts: sampling parameters, requests, token outputs, adapter records."""

from __future__ import annotations

from typing import Literal, NewType, Self

import msgspec

from lorry.errors import InvalidRequest

AdapterUid = NewType("AdapterUid", int)
"""Identity of one immutable load of an adapter's files. Never reused; 0 is the base."""

BASE_UID = AdapterUid(0)

BASE_SLOT = -1
"""Slot of rows that belong to the base model, and of padding rows."""

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_CHOICES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when to stop; the meaning of each field is that of the OpenAI API and of vLLM.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch these filters off. `seed` makes a
    request repeatable whatever else is in the batch. `logprobs` k returns the log probability of each sampled token
    and of the k most likely ones, of the model's own distribution (before temperature, penalties and filters).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: it must be {expected}", name)

        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        check("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100")
        check("top_k", self.top_k >= -1, "-1 or 0 (off), or a positive count")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2")
        check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100")
        check("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        check("n", 1 <= self.n <= MAX_CHOICES, f"1 to {MAX_CHOICES}")
        check("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 non-empty strings")
        check("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "non-negative token ids")

    def for_choice(self, index: int) -> Self:
        """Parameters of one of the `n` answers to a prompt: where a seed was given, each has one of its own."""
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `adapter_uid` names the exact weights; `params.n` is always 1 here."""

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    adapter_uid: AdapterUid = BASE_UID


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probability (natural) of the sampled token, and of the most likely tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one request. The output with a `finish_reason` is its last, and there is exactly one.

    `stop_token_id` is the token that ended it (it is in `token_ids`, but is not part of the text).
    `error` and `error_code` are set when `finish_reason` is "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A loaded adapter, as users see it. `rank` is the largest of its ranks, `num_bytes` its size on the device.

    `description` and `examples` (prompts that show what it does) are from the card in its folder, if it has one.
    """

    name: str
    uid: AdapterUid
    path: str
    rank: int
    num_bytes: int
    target_modules: tuple[str, ...]
    base_model_name: str | None = None
    warnings: tuple[str, ...] = ()
    description: str | None = None
    examples: tuple[str, ...] = ()


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where an adapter is now, and who uses it.

    `residency` is the best place that holds its weights: on the device, in the host's memory, or only registered (its
    files). `num_running` requests are in steps, `num_waiting` wait for it to come to the device, of `num_requests`
    that there have been; the last one came `idle_seconds` ago. Of the prompts' `prefix_query_tokens`,
    `prefix_hit_tokens` were found in the prefix cache.
    """

    info: AdapterInfo
    residency: Literal["device", "host", "registered"]
    num_running: int
    num_waiting: int
    pinned: bool
    draining: bool
    num_requests: int = 0
    idle_seconds: float = 0.0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0


class AdapterList(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All adapters that requests can name."""

    adapters: tuple[AdapterStatus, ...]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is once it is ready; sizes in bytes, `context_length` and `kv_tokens` in tokens."""

    model: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    weight_bytes: int
    context_length: int
    kv_tokens: int
    kv_bytes: int
    lora_bytes: int
    num_lora_sites: int
    max_loras: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    lora_backend: str
    experts_backend: str | None
    adapters: tuple[AdapterInfo, ...] = ()
    load_seconds: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Live counts: all of them are zero, save totals and free pages, when nothing is running."""

    num_running: int
    num_waiting: int
    pages_in_use: int
    pages_total: int
    adapter_references: int
    num_preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    num_waiting_for_adapter: int = 0
    adapters_registered: int = 0
    adapters_on_host: int = 0
    adapters_on_device: int = 0
    adapter_host_bytes: int = 0
    adapter_device_bytes: int = 0
    num_adapter_reads: int = 0
    num_adapter_copies: int = 0
    num_adapter_evictions: int = 0
    num_adapter_drains: int = 0
