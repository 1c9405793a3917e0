"""The engine's loop: add requests, step, and read the tokens of each step. The whole path of a request is here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lorry.config import EngineConfig
from lorry.engine.build import Parts, build
from lorry.engine.runner import LaunchedStep
from lorry.engine.sequence import Sequence
from lorry.errors import AdapterCapacity, ContextLengthExceeded, InvalidRequest, LorryError
from lorry.lora.adapter import load_adapter
from lorry.lora.card import AdapterCard, read_card
from lorry.lora.store import AdapterStore
from lorry.lora.weights import AdapterWeights
from lorry.types import (
    AdapterInfo,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    TokenLogprobs,
    TokenOutput,
)

_QUIET: Callable[[str], None] = lambda text: None  # noqa: E731


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read and checked, and waits to be put on the device."""

    name: str
    path: str
    weights: AdapterWeights
    card: AdapterCard


class Engine:
    """Serves one base model and its adapters. Not thread-safe, except for `prepare_adapter`."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str], None] = _QUIET, parts: Parts | None = None
    ) -> None:
        self._config = config
        self._parts = build(config, progress) if parts is None else parts
        self._scheduler = self._parts.scheduler
        self._store = AdapterStore(self._parts.lora.unload)
        self._sequences: dict[str, Sequence] = {}
        self._finished: list[TokenOutput] = []
        self._launched: LaunchedStep | None = None
        self._random = random.Random(config.random_seed)
        for dummy in self._parts.dummies:
            self._store.add(dummy.info(self._store.next_uid()), dummy.slot)
        for name, path in config.lora_paths.items():
            progress(f"loading adapter {name} from {path}")
            self.register_adapter(self.prepare_adapter(name, path))

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; `LorryError` when it cannot be taken, and then it has no effect."""
        max_tokens = self._check(request)
        seed = request.params.seed if request.params.seed is not None else self._random.getrandbits(63)
        slot = self._store.acquire(request.adapter_uid)
        sequence = Sequence(request, slot, seed, max_tokens, list(request.token_ids))
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request early; its last output comes with the next step. Unknown ones are ignored."""
        if request_id in self._sequences:
            self._finished.append(self._end(self._sequences[request_id], "abort"))

    def drop_finished(self) -> None:
        """Forget the last outputs of aborted requests, when nobody waits for them; end the step they were in."""
        self._finished.clear()
        if not self._sequences:
            self.step()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._launched is not None or bool(self._finished)

    def step(self) -> list[TokenOutput]:
        """Plan and launch a step, then read the one before; returns what that gave each request.

        So the device has the next step before it has done with this one. With --disable-overlap-schedule, and where
        the step before leaves nothing to plan, each step is read before the next is planned.
        """
        outputs, self._finished = self._finished, []
        before, self._launched = self._launched, self._launch()
        if before is not None:
            outputs += self._read(before)
        if self._launched is not None and self._config.disable_overlap_schedule:
            launched, self._launched = self._launched, None
            outputs += self._read(launched)
        return outputs

    def _launch(self) -> LaunchedStep | None:
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return None
        launched = self._parts.runner.launch(plan)
        self._scheduler.launched(plan)
        return launched

    def _read(self, step: LaunchedStep) -> list[TokenOutput]:
        """Take the tokens of a step; those of requests that had ended when it was read are dropped."""
        sampled = step.sample.read()
        for sequence in self._scheduler.landed(step.plan):
            self._store.release(sequence.adapter_uid)
        return [
            self._append(chunk.sequence, token, logprobs)
            for chunk, token, logprobs in zip(step.plan.sampling, sampled.token_ids, sampled.logprobs, strict=True)
            if not chunk.sequence.ended
        ]

    def stats(self) -> EngineStats:
        """Live counts."""
        pool = self._scheduler.pool
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            pages_in_use=pool.num_in_use,
            pages_total=pool.num_pages,
            adapter_references=self._store.num_references,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_hit_tokens=pool.hit_tokens,
            prefix_query_tokens=pool.query_tokens,
        )

    def _check(self, request: EngineRequest) -> int:
        """Raise where a request cannot be served; returns how many tokens it may generate."""
        limit = self.info.context_length
        length = len(request.token_ids)
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if not length:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        vocab = self._parts.loaded.model.get_input_embeddings().weight.shape[0]
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab:
            raise InvalidRequest(f"the prompt has token ids outside of the vocabulary (0 to {vocab - 1})", "prompt")
        wanted = request.params.max_tokens
        if length + (wanted or 1) > limit:
            raise ContextLengthExceeded(
                f"the context holds {limit} tokens, but the prompt has {length} and {wanted or 1} are to be "
                f"generated ({length + (wanted or 1)} in all): shorten the prompt or lower max_tokens",
                "max_tokens" if length < limit else "prompt",
            )
        return wanted or limit - length

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        self._scheduler.append(sequence, token)
        params = sequence.params
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in self.info.eos_token_ids)
        reason: FinishReason | None = None
        if stops:
            reason = "stop"
        elif sequence.num_output >= sequence.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(sequence, reason)
        return TokenOutput(
            request_id=sequence.request_id,
            token_ids=(token,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            stop_token_id=token if stops else None,
            num_cached_tokens=sequence.num_hit_tokens,
        )

    def _end(self, sequence: Sequence, reason: FinishReason) -> TokenOutput:
        del self._sequences[sequence.request_id]
        if self._scheduler.remove(sequence):
            self._store.release(sequence.adapter_uid)
        return TokenOutput(request_id=sequence.request_id, finish_reason=reason)

    # Adapters

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Adapters by name."""
        return {info.name: info for info in self._store.infos()}

    def prepare_adapter(self, name: str, path: str) -> PreparedAdapter:
        """Read and check an adapter's files, on any thread; nothing of the engine changes."""
        if not name or len(name) > 256 or not name.isprintable():
            raise InvalidRequest(f"adapter name {name!r} must have 1 to 256 printable characters", "lora_name")
        if not self._config.enable_lora:
            raise AdapterCapacity("this engine was started with --no-enable-lora: start it without that flag")
        config = self._config
        weights = load_adapter(
            name, path, self._parts.sites, self._parts.loaded.dtype, config.max_lora_rank, config.lora_target_modules
        )
        return PreparedAdapter(name, path, weights, read_card(path))

    def register_adapter(self, prepared: PreparedAdapter) -> AdapterInfo:
        """Put a prepared adapter on the device under its name; `LorryError` when taken or full."""
        self._store.check_name_is_free(prepared.name)
        try:
            slot = self._parts.lora.load(prepared.weights)
        except LorryError as error:
            raise type(error)(f"adapter {prepared.name!r}: {error}") from None
        info = AdapterInfo(
            name=prepared.name,
            uid=self._store.next_uid(),
            path=prepared.path,
            rank=prepared.weights.rank,
            num_bytes=prepared.weights.num_bytes,
            target_modules=prepared.weights.target_modules,
            base_model_name=prepared.weights.base_model_name,
            warnings=prepared.weights.warnings,
            description=prepared.card.description,
            examples=prepared.card.examples,
        )
        self._store.add(info, slot)
        return info

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a name at once; requests that run on it finish, then its memory comes back."""
        return self._store.unload(name)
