"""Bodies of requests: what is understood, what is harmless, and what is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from lorry.config import EngineConfig
from lorry.errors import InvalidRequest, ModelNotFound
from lorry.server.names import check_adapter_name, resolve
from lorry.server.protocol import ChatBody, CompletionBody
from lorry.types import AdapterInfo, AdapterUid

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "hello", **fields})


def test_sampling_parameters_arrive():
    params = chat(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        stop="x",
        stop_token_ids=[3],
        ignore_eos=True,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        n=2,
    ).sampling()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (0.1, 7, ("x",), (3,))
    assert (params.ignore_eos, params.presence_penalty, params.frequency_penalty) == (True, 1.0, -1.0)
    assert (params.repetition_penalty, params.n, params.logprobs) == (1.1, 2, None)


def test_null_is_the_default():
    names = [
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "n",
        "max_tokens",
        "stream",
        "logprobs",
        "model",
        "user",
    ]
    assert chat(**dict.fromkeys(names)).sampling() == chat().sampling()


def test_stop_may_be_a_list():
    assert chat(stop=["a", "b"]).sampling().stop == ("a", "b")


def test_logprobs_of_chat_and_of_completions():
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling().logprobs == 3
    assert chat(logprobs=False).sampling().logprobs is None
    assert completion(logprobs=2).sampling().logprobs == 2


def test_max_completion_tokens_is_max_tokens():
    assert chat(max_completion_tokens=5).sampling().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling().max_tokens == 5
    with pytest.raises(InvalidRequest, match="differ"):
        chat(max_completion_tokens=5, max_tokens=6)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"store": False, "metadata": {}, "service_tier": "auto"},
        {"user": "someone"},
        {"audio": None, "modalities": ["text"]},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]):
    assert chat(**fields).sampling() == chat().sampling()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"best_of": 2, "n": 1}])
def test_refused_completion_fields(fields: dict[str, Any]):
    with pytest.raises(InvalidRequest):
        completion(**fields)


def test_harmless_completion_fields():
    assert completion(echo=False, suffix=None, best_of=2, n=2).sampling().n == 2


@pytest.mark.parametrize("fields", [{"temprature": 0}, {"messages": []}, {"n": "many"}, {"guided_json": None}])
def test_unknown_and_malformed_fields_are_errors(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        chat(**fields)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts(prompt: Any, expected: Any):
    assert completion(prompt=prompt).prompts() == expected


def test_an_empty_list_of_prompts_is_refused():
    with pytest.raises(InvalidRequest):
        completion(prompt=[]).prompts()


def adapters(*names: str) -> dict[str, AdapterInfo]:
    return {
        name: AdapterInfo(name=name, uid=AdapterUid(i + 1), path="/p", rank=8, num_bytes=1, target_modules=())
        for i, name in enumerate(names)
    }


def test_exact_names_come_before_split_ones():
    config = EngineConfig(model="gpt:20b", served_model_name="gpt")
    known = adapters("20b:x", "gpt:y", "y", "x")
    assert resolve("gpt:20b", config, known).id == "gpt"  # a name of the base
    assert resolve("gpt:y", config, known).id == "gpt:y"  # an adapter's own name
    assert resolve("gpt:x", config, known).id == "x"
    assert resolve("gpt:20b:x", config, known).id == "20b:x"  # the first position at which both sides are known
    assert resolve("gpt:20b:y", config, known).id == "y"


def test_unknown_names_are_refused_with_close_ones():
    config = EngineConfig(model="base")
    with pytest.raises(ModelNotFound, match="did you mean 'french'"):
        resolve("frensh", config, adapters("french", "german"))
    with pytest.raises(ModelNotFound):
        resolve("other:french", config, adapters("french"))


@pytest.mark.parametrize("name", ["", " x", "x\n", "a\x00b", "x" * 257, "base", "served"])
def test_names_that_no_adapter_may_have(name: str):
    with pytest.raises(InvalidRequest):
        check_adapter_name(name, EngineConfig(model="base", served_model_name="served"))
