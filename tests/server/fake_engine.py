"""An engine without a model: what it says depends on the prompt and the adapter, and nothing else.

`say:TEXT` in a prompt is answered with TEXT; `seed?` with the seed; any other with the name of the weights and a long
phrase. `slowly` makes steps take a while, `fail` ends in an error after 3 tokens, `refuse` and `bug` are errors when
the request is added, `crash` is one of the whole engine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from lorry.config import EngineConfig
from lorry.errors import (
    AdapterCapacity,
    AdapterExists,
    AdapterFormatError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
)
from lorry.types import (
    BASE_UID,
    AdapterInfo,
    AdapterList,
    AdapterStatus,
    AdapterUid,
    EngineInfo,
    EngineRequest,
    EngineStats,
    TokenLogprobs,
    TokenOutput,
)

PHRASE = "all work and no play makes jack a dull boy "
CONTEXT_LENGTH = 256
STEP_SECONDS = 0.01


@dataclass
class Sequence:
    request: EngineRequest
    reply: list[int]
    prompt: str
    position: int = 0


@dataclass(frozen=True)
class Prepared:
    name: str
    path: str
    rank: int


class FakeEngine:
    """`Engine`'s interface."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        progress("loading nothing")
        trouble = Path(config.model) / "trouble"  # a file that tests write
        if trouble.exists():
            if trouble.read_text() == "exit":
                os._exit(7)
            raise ConfigError(trouble.read_text())
        self._config = config
        self._tokenizer = Tokenizer.from_file(str(Path(config.model) / "tokenizer.json"))
        self._eos = self._tokenizer.token_to_id("<|im_end|>")
        self._running: dict[str, Sequence] = {}
        self._aborted: list[str] = []
        self._next_uid = 1
        self.adapters: dict[str, AdapterInfo] = {}
        self.pinned: set[str] = set()
        for name, path in config.lora_paths.items():
            self.register_adapter(self.prepare_adapter(name, path))

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._config.model,
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            num_parameters=135_000_000,
            weight_bytes=712 * 2**20,
            context_length=CONTEXT_LENGTH,
            kv_tokens=4096,
            kv_bytes=2**28,
            lora_bytes=2**30,
            num_lora_sites=210,
            max_loras=self._config.max_loras_per_batch,
            eos_token_ids=(self._eos,),
            attention_backend="torch",
            lora_backend="torch",
            experts_backend="fused",
            load_seconds=1.5,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def add_request(self, request: EngineRequest) -> None:
        prompt = self._tokenizer.decode(list(request.token_ids), skip_special_tokens=False)
        if "refuse" in prompt:
            raise InvalidRequest("refused by the engine")
        if "bug" in prompt:
            raise ValueError("an odd thing")
        name = "base"
        if request.adapter_uid != BASE_UID:
            found = [adapter for adapter in self.adapters.values() if adapter.uid == request.adapter_uid]
            if not found:
                raise ModelNotFound(f"no adapter has the uid {request.adapter_uid}")
            name = found[0].name
        self._running[request.request_id] = Sequence(request, self._reply(prompt, name, request), prompt)

    def _reply(self, prompt: str, name: str, request: EngineRequest) -> list[int]:
        if "say:" in prompt:
            text = prompt.rpartition("say:")[2].partition("<|im_end|>")[0]
        elif "seed?" in prompt:
            text = f"seed={request.params.seed}"
        else:
            text = f"[{name}] " + PHRASE * 60
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._eos]

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._aborted.append(request_id)

    def prepare_adapter(self, name: str, path: str, content: bytes | None = None) -> Prepared:
        if content is not None:
            return Prepared(name, path, len(content))
        try:
            content = json.loads((Path(path) / "adapter_config.json").read_text())
        except (OSError, ValueError) as error:
            raise AdapterFormatError(f"adapter {name!r}: {error}") from None
        time.sleep(content.get("seconds", 0))
        return Prepared(name, path, content["r"])

    def register_adapter(self, prepared: Prepared, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        if prepared.name in self.adapters and not replace:
            raise AdapterExists(f"an adapter {prepared.name!r} is loaded already")
        if len(self.adapters) == self._config.max_loras_per_batch:
            raise AdapterCapacity(f"{len(self.adapters)} adapters are loaded, which is the limit")
        info = AdapterInfo(
            name=prepared.name,
            uid=AdapterUid(self._next_uid),
            path=prepared.path,
            rank=prepared.rank,
            num_bytes=prepared.rank * 2**18,
            target_modules=("q_proj", "v_proj"),
        )
        self._next_uid += 1
        self.adapters[prepared.name] = info
        if pinned:
            self.pinned.add(prepared.name)
        return info

    def unload_adapter(self, name: str, abort: bool = False) -> AdapterInfo:
        if name not in self.adapters:
            raise ModelNotFound(f"no adapter {name!r} is loaded")
        info = self.adapters.pop(name)
        self.pinned.discard(name)
        for request_id, sequence in list(self._running.items()):
            if abort and sequence.request.adapter_uid == info.uid:
                self.abort(request_id)
        return info

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterInfo:
        (self.pinned.add if pinned else self.pinned.discard)(name)
        return self.adapters[name]

    def adapter_list(self) -> AdapterList:
        running = [sequence.request.adapter_uid for sequence in self._running.values()]
        return AdapterList(
            adapters=tuple(
                AdapterStatus(
                    info=info,
                    residency="device",
                    num_running=running.count(info.uid),
                    num_waiting=0,
                    pinned=info.name in self.pinned,
                    draining=False,
                )
                for info in self.adapters.values()
            )
        )

    def stats(self) -> EngineStats:
        running = self._running.values()
        return EngineStats(
            num_running=len(running),
            num_waiting=0,
            pages_in_use=len(running),
            pages_total=256,
            adapter_references=sum(sequence.request.adapter_uid != BASE_UID for sequence in running),
            num_preemptions=0,
            prefix_hit_tokens=0,
            prefix_query_tokens=0,
        )

    def step(self) -> list[TokenOutput]:
        outputs = [TokenOutput(request_id=request_id, finish_reason="abort") for request_id in self._aborted]
        self._aborted.clear()
        if any("slowly" in sequence.prompt for sequence in self._running.values()):
            time.sleep(STEP_SECONDS)
        for sequence in list(self._running.values()):
            if "crash" in sequence.prompt:
                raise RuntimeError("the engine has come to an end")
            output = self._advance(sequence)
            outputs.append(output)
            if output.finish_reason is not None:
                del self._running[output.request_id]
        return outputs

    def _advance(self, sequence: Sequence) -> TokenOutput:
        request, params = sequence.request, sequence.request.params
        if "fail" in sequence.prompt and sequence.position == 3:
            return TokenOutput(
                request_id=request.request_id, finish_reason="error", error="it failed", error_code="internal_error"
            )
        token = sequence.reply[sequence.position]
        sequence.position += 1
        is_stop = (token == self._eos and not params.ignore_eos) or token in params.stop_token_ids
        is_last = sequence.position in (params.max_tokens, len(sequence.reply))
        logprobs = ()
        if params.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
            logprobs = (TokenLogprobs(-0.5, top),)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason="stop" if is_stop else "length" if is_last else None,
            stop_token_id=token if is_stop else None,
            num_cached_tokens=len(request.token_ids) // 16 * 16,
        )
