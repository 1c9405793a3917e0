"""Every error has the OpenAI shape, a fitting status, and names what is wrong."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import RunningServer, running_server

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_validation_errors_are_400_and_name_the_field(server: RunningServer):
    post = server.http.post
    url = "/v1/chat/completions"
    assert error_of(post(url, json={"messages": MESSAGES, "temprature": 1}), 400)["param"] == "temprature"
    assert error_of(post(url, json={"messages": MESSAGES, "top_k": "many"}), 400)["param"] == "top_k"
    assert error_of(post(url, json={"messages": MESSAGES, "top_p": 2}), 400)["param"] == "top_p"
    assert error_of(post(url, json={"messages": []}), 400)["param"] == "messages"
    assert error_of(post(url, json={}), 400)["param"] == "messages"
    assert error_of(post(url, json={"messages": MESSAGES, "tools": [{}]}), 400)["param"] == "tools"
    assert "JSON" in error_of(post(url, content=b"{", headers={"content-type": "application/json"}), 400)["message"]
    assert error_of(post(url), 400)["type"] == "invalid_request_error"
    assert "application/json" in error_of(post(url, content=b"{}"), 400)["message"]


def test_the_openai_client_understands_errors(server: RunningServer):
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.chat.completions.create(model="unknown", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.chat.completions.create(model="base-model", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"


def test_routes_that_are_not_there(server: RunningServer):
    assert "/v1/nothing" in error_of(server.http.get("/v1/nothing"), 404)["message"]
    error_of(server.http.get("/v1/chat/completions"), 405)


def test_a_template_that_refuses(server: RunningServer):
    response = server.http.post("/v1/chat/completions", json={"messages": [{"role": "pirate", "content": "arr"}]})
    assert "no pirates" in error_of(response, 400)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_that_requests_error(server: RunningServer, stream: bool):
    assert error_of(server.chat("refuse", stream=stream), 400)["message"] == "refused by the engine"
    assert "an odd thing" in error_of(server.chat("bug", stream=stream), 500)["message"]
    assert error_of(server.chat("fail now", n=2), 500)["message"] == "it failed"
    assert server.says(None) == "base"


def test_an_error_in_mid_stream_is_an_event(server: RunningServer):
    stream = server.openai.chat.completions.create(
        model="french", messages=[{"role": "user", "content": "fail please"}], stream=True
    )
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "["]
    with pytest.raises(openai.APIError, match="it failed"):
        list(stream)
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "fail"}], "stream": True}
    ) as response:
        assert b"[DONE]" not in response.read()


def test_the_api_key_guards_every_route_but_the_page_and_health(model: Path):
    with running_server(model, api_key="secret") as server:
        assert server.openai.models.list().data
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai.with_options(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        without = {"Authorization": ""}
        for route in (
            "/v1/load_lora_adapter",
            "/load_lora_adapter",
            "/unload_lora_adapter",
            "/docs",
            "/uix",
            "//v1/models",
        ):
            error_of(server.http.post(route, json={}, headers=without), 401)
        error_of(server.http.post("/v1/chat/completions", content=b"{", headers=without), 401)
        assert server.http.get("/health", headers=without).status_code == 200


def test_the_page_and_its_parts_are_served(server: RunningServer):
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for part in re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text):
        assert server.http.get(part).status_code == 200
    assert server.http.get("/ui/../app.py").status_code == 404


def test_health(server: RunningServer):
    response = server.http.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    engine = response.json()["engine"]
    assert (engine["num_running"], engine["num_waiting"], engine["pages_in_use"]) == (0, 0, 0)
    assert engine["pages_total"] > 0
