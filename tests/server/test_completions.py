"""`/v1/completions`: texts, tokens and lists of both."""

from typing import Any

import pytest

from tests.server.harness import RunningServer


def test_a_text_is_continued(server: RunningServer):
    answer = server.openai.completions.create(model="base-model", prompt="say:hello world")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello world", "stop")


def test_each_of_several_prompts_has_n_choices(server: RunningServer):
    answer = server.openai.completions.create(model="base-model", prompt=["say:one", "seed?"], n=2, seed=5)
    assert [choice.text for choice in answer.choices] == ["one", "one", "seed=5", "seed=6"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_tokens_are_prompts_too(server: RunningServer):
    tokens = server.token_ids("say:hello")
    one = server.openai.completions.create(model="base-model", prompt=tokens)
    two = server.openai.completions.create(model="base-model", prompt=[tokens, server.token_ids("say:world")])
    assert one.choices[0].text == "hello"
    assert [choice.text for choice in two.choices] == ["hello", "world"]
    assert one.usage is not None
    assert one.usage.prompt_tokens == len(tokens)


def test_a_stream(server: RunningServer):
    chunks = list(server.openai.completions.create(model="base-model", prompt="say:hello world", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_offsets(server: RunningServer, stream: bool):
    text = "hello 🙂 world"
    fields: dict[str, Any] = {"logprobs": 1, "stream": stream}
    answer = server.openai.completions.create(model="base-model", prompt=f"say:{text}", **fields)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert len(tokens) == len(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert {top[token] for part in parts for token, top in zip(part.tokens, part.top_logprobs, strict=True)} == {-0.5}


@pytest.mark.parametrize(("prompt", "word"), [("", "empty"), ([], "empty"), ([10**6], "1000000"), ([-1], "-1")])
def test_prompts_that_cannot_be_are_refused(server: RunningServer, prompt: Any, word: str):
    response = server.http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert word in error["message"]


def test_prompt_of_a_wrong_type(server: RunningServer):
    response = server.http.post("/v1/completions", json={"prompt": {"text": "hello"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
