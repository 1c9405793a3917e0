"""From prompts to pieces of text: checks, tokens, one engine request per choice, detokenised as outputs come."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from lorry.config import ServerConfig
from lorry.errors import (
    AdapterExists,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    from_code,
)
from lorry.server.client import EngineClient
from lorry.server.metrics import Metrics, RequestTimes
from lorry.server.names import Target, adapter_part, check_adapter_name, resolve
from lorry.server.protocol import PromptTokensDetails, Usage
from lorry.server.roots import find_below
from lorry.text import Detokenizer, Tokenizer
from lorry.types import AdapterInfo, EngineRequest, SamplingParams, TokenLogprobs, TokenOutput

T = TypeVar("T")

log = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Characters from which on a text is tokenised on a thread, so that nobody else waits for it."""


@dataclass(frozen=True)
class Token:
    """A generated token with its log probabilities; its text begins `offset` characters into the answer."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class Piece:
    """The next part of a choice. `tokens` is empty where no log probabilities were asked for."""

    index: int
    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One sequence that is being generated, on its way from tokens to text."""

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: Tokenizer, is_continuation: bool, times: RequestTimes
    ) -> None:
        self.index = index
        self.request = request
        self.times = times
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._wants_logprobs = request.params.logprobs is not None
        self._held: list[Token] = []
        self._detokenizer = Detokenizer(
            tokenizer, request.params.stop, prompt_ids=request.token_ids if is_continuation else ()
        )

    def take(self, output: TokenOutput) -> Piece | None:
        """What an output adds; None where all of it is held back. Raises the error that ended the request."""
        if output.finish_reason == "error":
            raise from_code(output.error_code or "", output.error or "the engine gave no reason")
        if output.finish_reason == "abort":
            raise EngineUnavailable("the engine ended the request before it was complete")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = self._take_tokens(output)
        if self._detokenizer.stopped is None and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            self.finish_reason = "stop"
        tokens = self._release_tokens()
        if not (text or tokens or self.finish_reason):
            return None
        return Piece(self.index, text, tokens, self.finish_reason)

    def _take_tokens(self, output: TokenOutput) -> str:
        text = ""
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if position == last and output.stop_token_id is not None:
                break  # it ended the answer and is not part of it
            if self._wants_logprobs:
                self._held.append(Token(token_id, output.logprobs[position], self._detokenizer.num_chars))
            text += self._detokenizer.push([token_id])
            if self._detokenizer.stopped is not None:
                break
        return text

    def _release_tokens(self) -> tuple[Token, ...]:
        """The tokens whose text has been emitted; at the end all, but for those that a stop string cut away."""
        cut = self._detokenizer.num_emitted
        keep_all = self.finish_reason is not None and self._detokenizer.stopped is None
        released = [token for token in self._held if keep_all or token.offset < cut]
        self._held = [] if self.finish_reason is not None else self._held[len(released) :]
        return tuple(released)


class Generation:
    """The choices of one HTTP request, running in the engine from when this exists until they end or `close`."""

    def __init__(self, client: EngineClient, target: Target, response_id: str, choices: list[Choice]) -> None:
        """Hands all choices to the engine; raises `EngineUnavailable` where it cannot take them."""
        self.target = target
        self.response_id = response_id
        self.choices = choices
        self._client = client
        self._outputs: asyncio.Queue[tuple[Choice, TokenOutput]] = asyncio.Queue()
        self._num_running = len(choices)
        try:
            for choice in choices:
                client.submit(choice.request, partial(self._on_output, choice))
        except BaseException:
            self.close()
            raise

    def _on_output(self, choice: Choice, output: TokenOutput) -> None:
        choice.times.tokens(len(output.token_ids))
        if output.finish_reason is not None:
            choice.times.end(output.finish_reason)
        self._outputs.put_nowait((choice, output))

    async def next_piece(self) -> Piece | None:
        """The next piece of any choice; None when all have ended. Raises the error of the first that fails."""
        while self._num_running:
            choice, output = await self._outputs.get()
            if choice.finish_reason is not None:  # outputs that were under way when a stop string was found
                continue
            piece = choice.take(output)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                choice.times.end(piece.finish_reason)
                self._num_running -= 1
                self._client.abort(choice.request.request_id)
            return piece
        return None

    def close(self) -> None:
        """Abort what still runs. Safe to call at any time and again."""
        for choice in self.choices:
            choice.times.end("abort")
            self._client.abort(choice.request.request_id)

    def usage(self, choices_per_prompt: int) -> Usage:
        """Tokens so far; a prompt counts once for all its choices."""
        prompts = self.choices[::choices_per_prompt]
        num_prompt = sum(len(choice.request.token_ids) for choice in prompts)
        num_generated = sum(choice.num_tokens for choice in self.choices)
        cached = PromptTokensDetails(cached_tokens=sum(choice.num_cached_tokens for choice in prompts))
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=cached,
        )


class Front:
    """What the endpoints share: names, the tokenizer, and the engine."""

    def __init__(self, config: ServerConfig, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = Metrics(client, config.metrics_max_models)
        self._loads: dict[str, asyncio.Task[AdapterInfo]] = {}

    async def find(self, model: str | None) -> Target:
        """As `resolve`; a name that is not known is looked for below `--lora-root`, and loaded."""
        try:
            return self.resolve(model)
        except ModelNotFound:
            name = adapter_part(model or "", self.config)
            folder = await asyncio.to_thread(find_below, name, self.config.lora_root)
            if folder is None or not self.config.enable_lora:
                raise
            await self._load_once(name, str(folder))
            return self.resolve(model)

    async def _load_once(self, name: str, path: str) -> None:
        """Load an adapter; requests that ask for it meanwhile wait for the same load."""
        if name not in self._loads:
            check_adapter_name(name, self.config)
            load = asyncio.create_task(self.client.load_adapter(name, path))
            load.add_done_callback(lambda _: self._loads.pop(name))
            self._loads[name] = load
        try:
            await asyncio.shield(self._loads[name])  # who asked first may have gone
        except AdapterExists:
            log.debug("adapter %r was loaded by somebody else meanwhile", name)

    def resolve(self, model: str | None) -> Target:
        """What `model` means now; raises `ModelNotFound`."""
        return resolve(model, self.config, self.client.adapters)

    async def render_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation."""
        num_chars = sum(len(message["content"]) for message in messages)
        return await _on_thread_if(num_chars > LONG_TEXT, lambda: self.tokenizer.render_chat(messages))

    async def encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts; those given as ids are checked against the vocabulary."""
        size = sum(map(len, prompts))
        return await _on_thread_if(size > LONG_TEXT, lambda: [self._encode(prompt) for prompt in prompts])

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        size = self.tokenizer.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            wrong = next(token for token in prompt if not 0 <= token < size)
            raise InvalidRequest(f"the prompt has token id {wrong}: ids are 0 to {size - 1}", "prompt")
        return prompt

    def start(
        self, model: str | None, prompts: list[list[int]], params: SamplingParams, kind: str, param: str
    ) -> Generation:
        """Start the choices of all prompts, `params.n` for each; `param` names the field that the prompts are from.

        The name is looked up here, at the moment of the hand-over: an adapter may have gone, or been loaded anew,
        while the prompt was tokenised.
        """
        target = self.resolve(model)
        response_id = f"{kind}-{uuid.uuid4().hex}"
        choices: list[Choice] = []
        for token_ids in prompts:
            max_tokens = self._max_tokens(len(token_ids), params.max_tokens, param)
            for offset in range(params.n):
                request = EngineRequest(
                    request_id=f"{response_id}-{len(choices)}",
                    token_ids=tuple(token_ids),
                    params=msgspec.structs.replace(params.for_choice(offset), max_tokens=max_tokens),
                    adapter_uid=target.adapter_uid,
                )
                times = self.metrics.request(target.id, 0 if offset else len(token_ids))
                is_continuation = kind == "cmpl"
                choices.append(Choice(len(choices), request, self.tokenizer, is_continuation, times))
        return Generation(self.client, target, response_id, choices)

    def _max_tokens(self, prompt_len: int, max_tokens: int | None, param: str) -> int:
        context_length = self.client.info.context_length
        if not prompt_len:
            raise InvalidRequest("the prompt is empty: it must have at least one token", param)
        if prompt_len + (max_tokens or 1) > context_length:
            asked = f" and max_tokens asks for {max_tokens}" if max_tokens else ""
            raise ContextLengthExceeded(
                f"the context length is {context_length} tokens, prompt and answer together:"
                f" the prompt has {prompt_len}{asked}",
                param,
            )
        return max_tokens or context_length - prompt_len


async def _on_thread_if(long: bool, call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call) if long else call()
