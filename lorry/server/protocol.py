"""The bodies of requests (validated, unknown fields refused) and of responses, in the shapes of the OpenAI API.

Requests are pydantic models. Responses are msgspec structs: a field that is `UNSET` is absent, and None is null,
a difference that clients of the streaming API see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lorry.errors import InvalidRequest
from lorry.types import MAX_LOGPROBS, SamplingParams

_UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": ("tool calls are not supported", ([],)),
    "tool_choice": ("tool calls are not supported", ("none",)),
    "parallel_tool_calls": ("tool calls are not supported", ()),
    "functions": ("function calls are not supported", ([],)),
    "function_call": ("function calls are not supported", ("none",)),
    "response_format": ("only text is generated: leave it out, or send {'type': 'text'}", ({"type": "text"},)),
    "logit_bias": ("token biases are not supported", ({},)),
    "audio": ("only text is generated", ()),
    "modalities": ("only text is generated", (["text"],)),
    "prediction": ("predicted outputs are not supported", ()),
    "reasoning_effort": ("it is not supported; say it in a message where the model's template has a way", ()),
    "verbosity": ("it is not supported", ()),
    "web_search_options": ("web search is not supported", ()),
    "metadata": ("completions are not stored", ({},)),
    "store": ("completions are not stored", (False,)),
    "service_tier": ("there is one service tier", ("auto", "default")),
    "safety_identifier": ("it is not supported", ()),
    "prompt_cache_key": ("equal prefixes are found without a key", ()),
    "echo": ("the prompt cannot be repeated in the answer", (False,)),
    "suffix": ("text cannot be inserted before a suffix", ("",)),
}
"""Fields of the OpenAI API that are refused: why, and the values besides null that ask for nothing."""


class Body(BaseModel):
    """A request's body: a field that is not known is an error, because ignoring it would give a wrong answer."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(Body, ABC):
    """What chat and text completions have in common."""

    model: str | None = Field(None, description="base or adapter, as in /v1/models; the base where missing or empty")
    max_tokens: int | None = Field(None, description="most tokens to generate (default: the rest of the context)")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="accepted and ignored")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in _UNSUPPORTED.keys() & data.keys():
            why, neutral = _UNSUPPORTED[name]
            value = data[name]
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                raise InvalidRequest(f"{name}: {why}", name)
        return {name: value for name, value in data.items() if name not in _UNSUPPORTED}

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options are for requests with stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted for each position; None where no log probabilities are."""

    def sampling(self) -> SamplingParams:
        """The sampling parameters asked for, with `n` as asked; raises `InvalidRequest` for one out of range."""
        named = {
            name: value
            for name in SamplingParams.__struct_fields__
            if name not in ("stop", "stop_token_ids", "logprobs", "max_tokens")
            and (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            **named,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message; content parts are joined with line breaks."""

    role: str = Field(min_length=1)
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else part
                raise InvalidRequest(f"content parts must be text: {kind!r} is not supported", "messages")
        return "\n".join(TextPart.model_validate(part).text for part in content)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="the same as max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
            self.max_tokens = self.max_completion_tokens
        param = "top_logprobs"
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}: it must be 0 to {MAX_LOGPROBS}", param)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest(f"best_of is {self.best_of}: it must be n ({self.n or 1}) or null", "best_of")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one answer (or `n`) for each."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is empty", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


class LoadAdapterBody(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(description="name by which requests will ask for it")
    lora_path: str = Field(min_length=1, description="folder on the server with adapter_config.json and weights")
    load_inplace: bool = Field(
        False, description="let the name have an adapter already: running requests finish on it, later ones get this"
    )
    pinned: bool = Field(False, description="keep it on the device")


class UnloadAdapterBody(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    abort: bool = Field(False, description="end its running requests too, instead of letting them finish")


class PinAdapterBody(Body):
    """Body of `POST /v1/pin_lora_adapter` and `/v1/unpin_lora_adapter`."""

    lora_name: str


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_tokens` counts each prompt once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole message or, with fields left out, what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of one; in chunks `usage` is absent unless it was asked for.

    `system_fingerprint` names the exact weights: the model, and for an adapter the version of its load.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice | CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    root: str
    parent: str | None
    rank: int | UnsetType = UNSET
    description: str | UnsetType = UNSET
    examples: tuple[str, ...] | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "lorry"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: str = "list"
