"""The engine's loop: add requests, step, and read the tokens of each step. The whole path of a request is here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from lorry.config import EngineConfig
from lorry.engine.build import Parts, build
from lorry.engine.gate import Gate
from lorry.engine.runner import LaunchedStep
from lorry.engine.sequence import Sequence
from lorry.errors import AdapterCapacity, AdapterFormatError, ContextLengthExceeded, InvalidRequest, LorryError
from lorry.lora.adapter import files_stamp, load_adapter
from lorry.lora.card import AdapterCard, read_card
from lorry.lora.packed import PackedAdapter
from lorry.lora.residency import HostLimits, Residency
from lorry.lora.store import AdapterStore, Version
from lorry.types import (
    BASE_SLOT,
    AdapterInfo,
    AdapterList,
    AdapterStatus,
    AdapterUid,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    TokenLogprobs,
    TokenOutput,
)

IDLE_SECONDS = 0.01
"""How long a step waits for an adapter's files where it has nothing else to do."""

_QUIET: Callable[[str], None] = lambda text: None  # noqa: E731


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read and checked; `stamp` tells its files from others."""

    name: str
    path: str
    packed: PackedAdapter
    rank: int
    target_modules: tuple[str, ...]
    base_model_name: str | None
    warnings: tuple[str, ...]
    card: AdapterCard
    stamp: tuple[tuple[str, int, int], ...]


class Engine:
    """Serves one base model and its adapters. Not thread-safe, except for `prepare_adapter`."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str], None] = _QUIET, parts: Parts | None = None
    ) -> None:
        self._config = config
        self._parts = build(config, progress) if parts is None else parts
        self._scheduler = self._parts.scheduler
        self._store = AdapterStore(self._forget, config.lora_eviction_policy)
        self._stamps: dict[AdapterUid, tuple[tuple[str, int, int], ...]] = {}
        self._residency: Residency | None = None
        if self._parts.lora.arena is not None:
            limits = HostLimits(config.max_loaded_loras, config.lora_host_memory)
            self._residency = Residency(self._parts.lora.arena, self._store, self._read_again, limits)
        self._gate = Gate(
            self._scheduler,
            self._store,
            self._residency,
            config.lora_drain_wait_threshold,
            config.max_requests_per_lora,
            time.monotonic,
        )
        self._sequences: dict[str, Sequence] = {}
        self._finished: list[TokenOutput] = []
        self._launched: LaunchedStep | None = None
        self._random = random.Random(config.random_seed)
        for dummy in self._parts.dummies:
            info = dummy.info(self._store.next_uid())
            self._store.add(info, has_files=False)
            self._store.place(info.uid, dummy.slot)
        for name, path in config.lora_paths.items():
            progress(f"loading adapter {name} from {path}")
            self.register_adapter(self.prepare_adapter(name, path))

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; `LorryError` when it cannot be taken, and then it has no effect."""
        max_tokens = self._check(request)
        seed = request.params.seed if request.params.seed is not None else self._random.getrandbits(63)
        self._store.acquire(request.adapter_uid)
        sequence = Sequence(request, BASE_SLOT, seed, max_tokens, list(request.token_ids))
        self._sequences[request.request_id] = sequence
        self._gate.add(sequence)

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
        waiting = self._gate.num_waiting > 0 or self._gate.is_moving
        return waiting or self._scheduler.has_work or self._launched is not None or bool(self._finished)

    def step(self) -> list[TokenOutput]:
        """Plan and launch a step, then read the one before; returns what that gave each request.

        So the device has the next step before it has done with this one. With --disable-overlap-schedule, and where
        the step before leaves nothing to plan, each step is read before the next is planned.
        """
        self._advance()
        outputs, self._finished = self._finished, []
        before, self._launched = self._launched, self._launch()
        if before is None and self._launched is None and self._residency is not None:
            self._residency.wait(IDLE_SECONDS)
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
            self._gate.ended(sequence)
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
            num_waiting_for_adapter=self._gate.num_waiting,
            num_adapter_drains=self._gate.num_drains,
            **({} if self._residency is None else self._residency.counts()),
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
        if self._gate.remove(sequence):
            self._gate.ended(sequence)
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
        return self._read_files(name, path)

    def register_adapter(self, prepared: PreparedAdapter, replace: bool = False) -> AdapterInfo:
        """Make a prepared adapter known under its name; `LorryError` when the name is taken or it can never run.

        To `replace`: where the name has an adapter already, running requests end on the weights that they began with,
        and later ones get the new.
        """
        residency = self._residency
        assert residency is not None
        if not replace:
            self._store.check_name_is_free(prepared.name)
        try:
            self._parts.lora.check_rank(prepared.rank)
            residency.check(prepared.packed)
        except LorryError as error:
            raise type(error)(f"adapter {prepared.name!r}: {error}") from None
        info = AdapterInfo(
            name=prepared.name,
            uid=self._store.next_uid(),
            path=prepared.path,
            rank=prepared.rank,
            num_bytes=prepared.packed.num_bytes,
            target_modules=prepared.target_modules,
            base_model_name=prepared.base_model_name,
            warnings=prepared.warnings,
            description=prepared.card.description,
            examples=prepared.card.examples,
        )
        self._store.add(info, has_files=True, replace=replace)
        self._stamps[info.uid] = prepared.stamp
        residency.put_on_host(info.uid, prepared.packed)
        if residency.has_room(prepared.packed):
            residency.want(info.uid)
            self._advance()
        return info

    def unload_adapter(self, name: str, abort: bool = False) -> AdapterInfo:
        """Forget a name at once; requests that run on it finish, or are ended; then its memory comes back."""
        info = self._store.unload(name)
        if abort:
            for sequence in [s for s in self._sequences.values() if s.adapter_uid == info.uid]:
                self._finished.append(self._end(sequence, "abort"))
        return info

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterInfo:
        """Keep an adapter on the device, or let it go again when others need the room."""
        version = self._store.named(name)
        if pinned and not version.pinned:
            assert self._residency is not None
            others = [v for v in self._store if v.pinned]
            self._residency.check_pins([*others, version])
            self._residency.want(version.info.uid)
        version.pinned = pinned
        return version.info

    def adapter_list(self) -> AdapterList:
        """Every adapter that requests can name, and where it is."""
        return AdapterList(adapters=tuple(self._status(self._store.named(info.name)) for info in self._store.infos()))

    def _status(self, version: Version) -> AdapterStatus:
        uid = version.info.uid
        on_host: Literal["host", "registered"] = "host" if version.host_bytes else "registered"
        return AdapterStatus(
            info=version.info,
            residency="device" if version.slot is not None else on_host,
            num_running=version.users,
            num_waiting=self._gate.waiting(uid),
            pinned=version.pinned,
            draining=self._gate.is_draining(uid),
        )

    def _read_files(self, name: str, path: str) -> PreparedAdapter:
        config = self._config
        stamp = files_stamp(path)
        weights = load_adapter(
            name, path, self._parts.sites, self._parts.loaded.dtype, config.max_lora_rank, config.lora_target_modules
        )
        return PreparedAdapter(
            name=name,
            path=path,
            packed=PackedAdapter.of(weights, pin=self._parts.loaded.device.type == "cuda"),
            rank=weights.rank,
            target_modules=weights.target_modules,
            base_model_name=weights.base_model_name,
            warnings=weights.warnings,
            card=read_card(path),
            stamp=stamp,
        )

    def _read_again(self, info: AdapterInfo) -> PackedAdapter:
        """The weights of a registered adapter; runs on a thread."""
        prepared = self._read_files(info.name, info.path)
        if prepared.stamp != self._stamps.get(info.uid):
            raise AdapterFormatError(
                f"adapter {info.name!r}: the files at {info.path!r} are not those that were loaded: load it again"
            )
        return prepared.packed

    def _advance(self) -> None:
        """Move adapters; requests whose adapter cannot be read end with the reason."""
        for sequence, error in self._gate.advance():
            code = error.code if isinstance(error, LorryError) else LorryError.code
            message = str(error) if isinstance(error, LorryError) else f"{type(error).__name__}: {error}"
            output = self._end(sequence, "error")
            self._finished.append(msgspec.structs.replace(output, error=message, error_code=code))

    def _forget(self, version: Version) -> None:
        assert self._residency is not None
        self._stamps.pop(version.info.uid, None)
        self._residency.forget(version)
