"""Faults that users met with adapters that come and go, over HTTP, one test each."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorry.text import Tokenizer
from tests.server.harness import RunningServer, write_adapter


def load(server: RunningServer, name: str, path: Path, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def send(server: RunningServer, name: str, rank: int) -> httpx.Response:
    """Load an adapter from a request, which the fake engine takes for one of the rank of its length."""
    params = {"lora_name": name}
    return server.http.post("/v1/load_lora_adapter_from_tensors", params=params, content=b"x" * rank)


def version_of(response: httpx.Response) -> int:
    assert response.status_code == 200
    return int(response.headers["x-lora-version"])


def fingerprint(server: RunningServer, model: str | None) -> str:
    return str(server.chat("who?", model=model, max_tokens=2).json()["system_fingerprint"])


def versions(server: RunningServer) -> dict[str, int]:
    """As the engine lists them, which are those that the front end knows."""
    listed = server.http.get("/v1/lora_adapters").json()["data"]
    assert [item["id"] for item in listed] == server.model_ids()[1:]
    return {item["id"]: item["version"] for item in listed}


def test_a08_parallel_loads_and_unloads_of_one_name(server: RunningServer, tmp_path: Path):
    path = write_adapter(tmp_path / "x", seconds=0.002)

    def come_and_go(_: int) -> list[tuple[str, int]]:
        loads = ("load", load(server, "same", path).status_code)
        return [loads, ("unload", server.unload("same").status_code)]

    with ThreadPoolExecutor(16) as pool:
        found = Counter(answer for answers in pool.map(come_and_go, range(64)) for answer in answers)
    assert set(found) <= {("load", 200), ("load", 400), ("unload", 200), ("unload", 404)}
    assert found["load", 200] == found["unload", 200] >= 1
    assert list(versions(server)) == ["french"]


def test_a09_whoever_waits_for_a_name_gets_a_version_of_its_own(server: RunningServer, tmp_path: Path):
    """Replaced by many at once, while it is unloaded again and again: what is left is the last, once."""
    path = write_adapter(tmp_path / "x", seconds=0.002)

    def replace(i: int) -> int:
        if i % 4 == 3:
            assert server.unload("same").status_code in (200, 404)
            return 0
        return version_of(load(server, "same", path, load_inplace=True))

    with ThreadPoolExecutor(12) as pool:
        made = [version for version in pool.map(replace, range(48)) if version]
    assert len(set(made)) == len(made) == 36
    last = version_of(load(server, "same", path, load_inplace=True))
    assert last > max(made)
    assert versions(server)["same"] == last
    assert fingerprint(server, "same") == f"same@{last}"


def test_a11_there_is_one_registry_of_names(server: RunningServer, tmp_path: Path):
    """Files and requests, many at once: one load wins. The names of the base are taken."""
    path = write_adapter(tmp_path / "x", seconds=0.01)

    def one(i: int) -> int:
        return (load(server, "same", path) if i % 2 else send(server, "same", 3)).status_code

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(one, range(16))) == {200: 1, 400: 15}
    assert list(versions(server)) == ["french", "same"]
    for name in ("base-model", server.config.model):
        for refused in (load(server, name, path), send(server, name, 3), load(server, name, path, load_inplace=True)):
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")


def test_l06_what_a_load_has_confirmed_can_be_asked_for_at_once(server: RunningServer, tmp_path: Path):
    """From another connection too."""
    path = write_adapter(tmp_path / "x")
    with httpx.Client(base_url=server.url, timeout=20) as other:
        for step in range(10):
            for name, fields in ((f"step-{step}", {}), ("policy", {"load_inplace": True})):
                made = version_of(load(server, name, path, **fields))
                body = {"model": name, "prompt": "who?", "max_tokens": 1}
                answer = other.post("/v1/completions", json=body).json()
                assert (answer["model"], answer["system_fingerprint"]) == (name, f"{name}@{made}")
            assert server.unload(f"step-{step}").status_code == 200
            assert other.post("/v1/completions", json=body | {"model": f"step-{step}"}).status_code == 404


def test_l18_every_answer_names_the_weights_that_gave_it(server: RunningServer):
    """A client that forgets the adapter sees so in the answer."""
    french = f"french@{versions(server)['french']}"
    for model, id, weights in (
        (None, "base-model", "base-model"),
        ("base-model", "base-model", "base-model"),
        ("french", "french", french),
        ("base-model:french", "french", french),
    ):
        named = {} if model is None else {"model": model}
        text = server.http.post("/v1/completions", json={"prompt": "who?", "max_tokens": 2, **named})
        for answer in (server.chat("who?", max_tokens=2, **named), text):
            assert (answer.json()["model"], answer.json()["system_fingerprint"]) == (id, weights)
        stream = server.openai.chat.completions.create(
            model=model or "", messages=[{"role": "user", "content": "who?"}], max_tokens=2, stream=True
        )
        assert {(chunk.model, chunk.system_fingerprint) for chunk in stream} == {(id, weights)}


@pytest.mark.parametrize("again", [False, True])
def test_w25_a_request_that_is_tokenised_while_its_adapter_leaves(
    again: bool, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is refused, or gets what its name means by then; never the adapter that came in the place of its own."""
    path = write_adapter(tmp_path / "x")
    old = version_of(load(server, "x", path))
    held, go = threading.Event(), threading.Event()
    render = Tokenizer.render_chat

    def slow(tokenizer: Tokenizer, messages: Any) -> list[int]:
        held.set()
        assert go.wait(10)
        return render(tokenizer, [{"role": "user", "content": "who?"}])

    monkeypatch.setattr(Tokenizer, "render_chat", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "long " * 1000, model="x", max_tokens=8)
        assert held.wait(10)
        assert server.unload("x").status_code == 200
        version_of(load(server, "y", path))
        new = version_of(load(server, "x", path)) if again else None
        go.set()
        body = answer.result().json()
    if new is None:
        assert body["error"]["code"] == "model_not_found"
    else:
        assert old < new
        assert body["system_fingerprint"] == f"x@{new}"
        assert body["choices"][0]["message"]["content"].startswith("[x]")
