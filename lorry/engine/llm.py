"""Offline use: give prompts, get answers, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorry.config import EngineConfig
from lorry.engine.engine import Engine
from lorry.errors import InvalidRequest, ModelNotFound
from lorry.text import Detokenizer, Tokenizer
from lorry.types import BASE_UID, AdapterInfo, AdapterUid, EngineRequest, SamplingParams, TokenLogprobs, TokenOutput

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """One answer. `finish_reason` is "stop" (end token or stop string, named in `stop_reason`) or "length"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt (`SamplingParams.n` of them), in the order of the prompts given."""

    prompt_token_ids: tuple[int, ...]
    adapter: str | None
    outputs: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text


class LLM:
    """A base model and its adapters.

        llm = LLM("path/to/model", adapters={"sql": "path/to/sql-lora"})
        llm.generate(["How many users?"], SamplingParams(temperature=0, max_tokens=32), adapter="sql")

    Further keyword arguments are the fields of `EngineConfig`. Errors are subclasses of `LorryError`.
    """

    def __init__(
        self,
        model: str,
        adapters: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.parse(model=model, lora_paths=dict(adapters or {}), **settings)
        self.engine = Engine(self.config, progress)
        self.tokenizer = Tokenizer.load(self.config.tokenizer_path or model, self.config.chat_template)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), all with one adapter, or each with its own; None is the base."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        names = [adapter] * len(batch) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(batch):
            raise InvalidRequest(
                f"{len(batch)} prompts, but {len(names)} adapters: give one, or one for each", "adapter"
            )
        params = sampling_params or SamplingParams()
        token_ids = [tuple(self.tokenizer.encode(p) if isinstance(p, str) else p) for p in batch]
        requests = [(ids, name, self._uid(name)) for ids, name in zip(token_ids, names, strict=True)]
        answers = self._run([(ids, uid) for ids, _, uid in requests], params)
        return [
            RequestOutput(ids, name, tuple(answers[i * params.n : (i + 1) * params.n]))
            for i, (ids, name, _) in enumerate(requests)
        ]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, by the model's chat template."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        return self.generate([self.tokenizer.render_chat(c) for c in conversations], sampling_params, adapter)

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter's files under a name."""
        return self.engine.register_adapter(self.engine.prepare_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its memory comes back."""
        self.engine.unload_adapter(name)

    def _uid(self, name: str | None) -> AdapterUid:
        if name is None:
            return BASE_UID
        if name not in self.engine.adapters:
            known = ", ".join(sorted(self.engine.adapters)) or "none"
            raise ModelNotFound(f"no adapter {name!r} is loaded (loaded: {known})")
        return self.engine.adapters[name].uid

    def _run(
        self, requests: Sequence[tuple[tuple[int, ...], AdapterUid]], params: SamplingParams
    ) -> list[Completion]:
        """`params.n` answers for each request; when one cannot be taken, none of them stays behind."""
        open_answers: dict[str, tuple[Completion, Detokenizer]] = {}
        answers: list[Completion] = []
        try:
            for (ids, uid), choice in itertools.product(requests, range(params.n)):
                request_id = f"llm-{next(self._ids)}"
                self.engine.add_request(
                    EngineRequest(
                        request_id=request_id, token_ids=ids, params=params.for_choice(choice), adapter_uid=uid
                    )
                )
                answers.append(Completion())
                open_answers[request_id] = (answers[-1], Detokenizer(self.tokenizer, params.stop, prompt_ids=ids))
            while open_answers:
                for output in self.engine.step():
                    self._take(output, open_answers)
        finally:
            for request_id in open_answers:
                self.engine.abort(request_id)
            self.engine.drop_finished()
        return answers

    def _take(self, output: TokenOutput, open_answers: dict[str, tuple[Completion, Detokenizer]]) -> None:
        if output.request_id not in open_answers:
            return
        answer, text = open_answers[output.request_id]
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs
        visible = [t for t in output.token_ids if t != output.stop_token_id]
        answer.text += text.push(visible)
        if text.stopped is not None and output.finish_reason is None:
            self.engine.abort(output.request_id)
        if text.stopped is None and output.finish_reason is not None:
            answer.text += text.finish()
        if text.stopped is not None:
            answer.finish_reason, answer.stop_reason = "stop", text.stopped
        else:
            answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_token_id
        if answer.finish_reason is not None:
            del open_answers[output.request_id]
