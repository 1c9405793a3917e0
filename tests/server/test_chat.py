"""`/v1/chat/completions`, whole and streamed, through the real openai client."""

import json
import math
from typing import Any

import pytest

from tests.server.harness import RunningServer

TRICKY = "naïve 🙂 漢字"


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def test_an_answer_with_its_usage(server: RunningServer):
    answer = server.openai.chat.completions.create(model="base-model", messages=user(f"say:{TRICKY}"))
    assert answer.object == "chat.completion"
    assert answer.model == "base-model"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TRICKY, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 16 * 16


def test_max_tokens_ends_with_length(server: RunningServer):
    answer = server.openai.chat.completions.create(model="french", messages=user("who?"), max_completion_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_max_tokens_is_by_default_the_rest_of_the_context(server: RunningServer):
    answer = server.chat("who?", ignore_eos=True).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


def test_a_stream_adds_up_to_the_answer(server: RunningServer):
    stream = server.openai.chat.completions.create(
        model="base-model",
        messages=user(f"say:{TRICKY}"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TRICKY
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > len(chunks) - 3


def test_events_on_the_wire(server: RunningServer):
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"messages": user("say:hello"), "stream": True}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *_, last = (json.loads(event.removeprefix("data: ")) for event in events[:-2])
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert "usage" not in first


def test_several_choices_have_seeds_of_their_own(server: RunningServer):
    answer = server.openai.chat.completions.create(model="french", messages=user("seed?"), n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["seed=7", "seed=8", "seed=9"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 30  # counted once


def test_several_choices_in_one_stream(server: RunningServer):
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in server.openai.chat.completions.create(
        model="french", messages=user("seed?"), n=2, seed=2**63 - 1, stream=True
    ):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: f"seed={2**63 - 1}", 1: f"seed={-(2**63)}"}
    assert reasons == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_add_up_to_the_text(server: RunningServer, stream: bool):
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = server.openai.chat.completions.create(model="base-model", messages=user(f"say:{TRICKY}"), **fields)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == TRICKY
    assert all(token.logprob == -0.5 and math.isclose(token.top_logprobs[1].logprob, -1.5) for token in tokens)
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_and_log_probabilities(server: RunningServer, stream: bool):
    fields: dict[str, Any] = {"stop": ["lazy dog", "nothing"], "logprobs": True, "stream": stream}
    answer = server.openai.chat.completions.create(
        model="base-model", messages=user("say:over the lazy dog, slowly"), **fields
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join((choice.delta.content or "") if stream else choice.message.content for choice in choices)
    assert text == "over the "
    assert choices[-1].finish_reason == "stop"
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith("over the")
    assert not any("dog" in token.token for token in tokens)


def test_stop_token_ids_end_an_answer(server: RunningServer):
    token_id = server.token_ids(" world")[0]
    answer = server.chat("say:hello world hello", stop_token_ids=[token_id]).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_long_conversation_is_too_long_with_numbers(server: RunningServer):
    response = server.chat("hello " * 5000)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "50" in error["message"]
    response = server.chat("hello", max_tokens=250)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "250" in response.json()["error"]["message"]


def test_text_parts_are_a_message(server: RunningServer):
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "say:hello"}]}]
    answer = server.openai.chat.completions.create(model="", messages=messages)
    assert answer.choices[0].message.content == "hello"
