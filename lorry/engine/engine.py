"""The engine's loop: add requests, step, and read the tokens of each step. The whole path of a request is here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import msgspec

from lorry.config import EngineConfig
from lorry.engine.adapters import AdapterDesk, PreparedAdapter
from lorry.engine.build import Parts, build
from lorry.engine.gate import Gate
from lorry.engine.runner import LaunchedStep
from lorry.engine.sequence import Sequence
from lorry.engine.turns import ByArrival, FairShare
from lorry.errors import ContextLengthExceeded, InvalidRequest, LorryError
from lorry.lora.store import Version
from lorry.types import (
    BASE_SLOT,
    AdapterInfo,
    AdapterList,
    AdapterStatus,
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


class Engine:
    """Serves one base model and its adapters. Not thread-safe, except for `prepare_adapter`."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str], None] = _QUIET, parts: Parts | None = None
    ) -> None:
        self._config = config
        self._parts = build(config, progress) if parts is None else parts
        self._scheduler = self._parts.scheduler
        self._desk = AdapterDesk(self._parts, config, self._scheduler.pool.forget_hits)
        self._gate = Gate(
            self._scheduler,
            self._desk.store,
            self._desk.residency,
            config.lora_drain_wait_threshold,
            config.max_requests_per_lora,
            FairShare() if config.lora_fair_share else ByArrival(),
            time.monotonic,
        )
        self._sequences: dict[str, Sequence] = {}
        self._finished: list[TokenOutput] = []
        self._launched: LaunchedStep | None = None
        self._random = random.Random(config.random_seed)
        for name, path in config.lora_paths.items():
            progress(f"loading adapter {name} from {path}")
            self.register_adapter(self.prepare_adapter(name, path))

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; `LorryError` when it cannot be taken, and then it has no effect."""
        max_tokens = self._check(request)
        seed = request.params.seed if request.params.seed is not None else self._random.getrandbits(63)
        self._desk.store.acquire(request.adapter_uid)
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
        if before is None and self._launched is None and self._desk.residency is not None:
            self._desk.residency.wait(IDLE_SECONDS)
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
            adapter_references=self._desk.store.num_references,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_hit_tokens=pool.hit_tokens.total(),
            prefix_query_tokens=pool.query_tokens.total(),
            num_waiting_for_adapter=self._gate.num_waiting,
            num_adapter_drains=self._gate.num_drains,
            **self._desk.counts(),
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
        return {info.name: info for info in self._desk.store.infos()}

    def prepare_adapter(self, name: str, path: str, content: bytes | None = None) -> PreparedAdapter:
        """Read and check an adapter's files, or `content` (see `weights_from_bytes`), on any thread.

        Nothing of the engine changes.
        """
        return self._desk.prepare(name, path, content)

    def register_adapter(self, prepared: PreparedAdapter, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Make a prepared adapter known under its name; `LorryError` when the name is taken or it can never run.

        To `replace`: where the name has an adapter already, running requests end on the weights that they began with,
        and later ones get the new.
        """
        info = self._desk.register(prepared, replace, pinned)
        self._advance()
        return info

    def unload_adapter(self, name: str, abort: bool = False) -> AdapterInfo:
        """Forget a name at once; requests that run on it finish, or are ended; then its memory comes back."""
        versions = {version.info.uid for version in self._desk.store if version.info.name == name}
        info = self._desk.store.unload(name)
        if abort:
            for sequence in [s for s in self._sequences.values() if s.adapter_uid in versions]:
                self._finished.append(self._end(sequence, "abort"))
        return info

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterInfo:
        """Keep an adapter on the device, or let it go again when others need the room."""
        info = self._desk.pin(name, pinned)
        self._advance()
        return info

    def adapter_list(self) -> AdapterList:
        """Every adapter that requests can name, and where it is."""
        named = [self._desk.store.named(info.name) for info in self._desk.store.infos()]
        return AdapterList(adapters=tuple(self._status(version) for version in named))

    def _status(self, version: Version) -> AdapterStatus:
        uid = version.info.uid
        return AdapterStatus(
            info=version.info,
            residency=version.residency,
            num_running=version.users,
            num_waiting=self._gate.waiting(uid),
            pinned=version.pinned,
            draining=self._gate.is_draining(uid),
            num_requests=version.num_requests,
            idle_seconds=time.monotonic() - version.used_at,
            prefix_hit_tokens=self._scheduler.pool.hit_tokens[uid],
            prefix_query_tokens=self._scheduler.pool.query_tokens[uid],
        )

    def _advance(self) -> None:
        """Move adapters; requests whose adapter cannot be read end with the reason."""
        for sequence, error in self._gate.advance():
            code = error.code if isinstance(error, LorryError) else LorryError.code
            message = str(error) if isinstance(error, LorryError) else f"{type(error).__name__}: {error}"
            output = self._end(sequence, "error")
            self._finished.append(msgspec.structs.replace(output, error=message, error_code=code))
