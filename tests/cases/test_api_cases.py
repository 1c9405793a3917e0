"""Faults that users met with the API of LoRA servers, one test each."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import RunningServer, model, running_server, server, shared_server, write_adapter

__all__ = ["model", "server", "shared_server"]

ADAPTER_NAMES = [
    "org/name",
    "org/name@v1",
    "org/name@v2",
    "org_name",
    "name:v1.5",
    "a.b-c",
    "two words",
    "ünï🙂",
    "100%",
    "a?b#c",
]


def test_a01_an_unknown_model_is_404_and_never_the_base(server: RunningServer):
    for name in ("frensh", "french ", "French", "base-model:nobody", "nobody:french", "org/french", "base-mode"):
        response = server.chat("who?", model=name)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert "'french'" in server.chat("who?", model="frensh").json()["error"]["message"]
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="nobody", prompt="who?", stream=True)


def test_a02_loading_validates_before_it_replies(server: RunningServer, tmp_path: Path):
    response = server.load("x", tmp_path / "nothing")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_format_error"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    assert server.load("x", tmp_path / "broken").status_code == 400
    assert server.model_ids() == ["base-model", "french"]
    assert server.chat("who?", model="x").status_code == 404
    assert server.load("x", write_adapter(tmp_path / "good")).status_code == 200  # the name is not burnt
    assert server.says("x") == "x"


def test_a04_the_list_of_models_is_the_truth_at_once(server: RunningServer, tmp_path: Path):
    path = write_adapter(tmp_path / "german")
    for _ in range(5):
        assert server.load("german", path).status_code == 200
        base, french, german = server.openai.models.list().data
        assert (base.id, base.object, base.owned_by) == ("base-model", "model", "lorry")
        assert base.model_extra == {"root": server.config.model, "parent": None}
        assert german.id == "german"
        assert german.model_extra == {"root": str(path), "parent": "base-model", "rank": 8}
        assert server.openai.models.retrieve("german") == german
        assert french.id == "french"
        assert server.unload("german").status_code == 200
        assert server.model_ids() == ["base-model", "french"]
        with pytest.raises(openai.NotFoundError):
            server.openai.models.retrieve("german")


def test_a12_names_with_colons_are_split_only_where_both_sides_are_known(model: Path, tmp_path: Path):
    lora_paths = {name: str(write_adapter(tmp_path / str(i))) for i, name in enumerate(["french", "120b", "gpt:own"])}
    with running_server(model, served_model_name="gpt:120b", lora_paths=lora_paths) as server:
        assert server.says("gpt:120b") == "base"
        assert server.says("gpt:120b:french") == "french"
        assert server.says("gpt:120b:120b") == "120b"
        assert server.says("gpt:120b:gpt:own") == "gpt:own"
        assert server.says("gpt:own") == "gpt:own"
        for name in ("gpt:french", "gpt", "gpt:120b:", ":french", "gpt:120b:nobody"):
            assert server.chat("who?", model=name).status_code == 404
        assert server.chat("who?", model="gpt:120b:french").json()["model"] == "french"


def test_a13_adapter_names_are_opaque(server: RunningServer, tmp_path: Path):
    for i, name in enumerate(ADAPTER_NAMES):
        assert server.load(name, write_adapter(tmp_path / str(i))).status_code == 200
    assert server.model_ids() == ["base-model", "french", *ADAPTER_NAMES]
    for name in ADAPTER_NAMES:
        assert server.says(name) == name
        assert server.says(f"base-model:{name}") == name
        assert server.openai.models.retrieve(name).id == name
    assert server.unload("org/name@v1").status_code == 200
    assert server.says("org/name@v2") == "org/name@v2"
    assert server.chat("who?", model="org/name@v1").status_code == 404
    for bad in ("", " x", "line\nbreak", "x" * 257):
        assert server.load(bad, tmp_path / "0").status_code == 400


def test_a21_every_name_of_the_base_and_none_is_the_base(server: RunningServer):
    for name in ("base-model", server.config.model, "", None):
        assert server.says(name) == "base"
        assert server.chat("who?", model=name, max_tokens=2).json()["model"] == "base-model"
    assert server.says(f"{server.config.model}:french") == "french"
    assert server.chat("who?", model=Path(server.config.model).name).status_code == 404


def test_w15_no_adapter_named_is_the_base_always(server: RunningServer):
    bodies: list[dict[str, Any]] = [{"model": "french"}, {}, {"model": "french"}, {"model": None}, {"model": ""}]
    for body in bodies * 3:
        expected = "french" if body.get("model") else "base"
        answer = server.http.post("/v1/completions", json={"prompt": "who?", "max_tokens": 9, **body})
        assert answer.json()["choices"][0]["text"].startswith(f"[{expected}]")
