"""Adapters that are found by name below allowed folders."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorry.server.roots import find_below
from tests.server.harness import running_server, write_adapter
from tests.server.test_adapters import adapter_list


def test_names_that_are_not_known_are_found_and_loaded_once(model: Path, tmp_path: Path):
    root = tmp_path / "root"
    write_adapter(root / "team" / "sql", 3, seconds=0.2)
    write_adapter(root / "chat")
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    other = write_adapter(tmp_path / "outside")
    settings = {"lora_root": (str(tmp_path / "nowhere"), str(root)), "served_model_name": "base-model"}
    with running_server(model, **settings) as server:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(server.says, ["team/sql"] * 6)) == ["team/sql"] * 6
        assert server.says("base-model:chat") == "chat"
        assert set(adapter_list(server)) == {"team/sql", "chat"}
        versions = {name: item["version"] for name, item in adapter_list(server).items()}
        assert sorted(versions.values()) == [1, 2]
        for name in ("nobody", "../outside", str(other), "team", ".."):
            response = server.chat("who?", model=name)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found"), name
        assert server.chat("who?", model="broken").json()["error"]["code"] == "adapter_format_error"
        assert server.says("chat") == "chat"


def test_without_roots_nothing_is_looked_for(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "x")
    with running_server(model) as server:
        assert server.chat("who?", model="x").status_code == 404


BAD = [
    "",
    ".",
    "..",
    "../outside",
    "a/../../outside",
    "/etc",
    "a/./b",
    "a//b",
    "a/b/",
    ".hidden",
    "a/.hidden",
    "a\\b",
]
BAD += ["a\0", "link", "a/up", "circle", "file", "a//../..", "top"]


@pytest.mark.parametrize("name", BAD)
def test_no_name_leads_out_of_a_root(name: str, tmp_path: Path):
    root = tmp_path / "root"
    for folder in (tmp_path / "outside", root / "a" / "b", root / ".hidden", root / "a" / ".h", root):
        write_adapter(folder)
    (root / "file").write_text("")
    os.symlink(tmp_path / "outside", root / "link")
    os.symlink("../..", root / "a" / "up")
    os.symlink("circle", root / "circle")
    os.symlink(".", root / "top")
    assert find_below(name, [str(root)]) is None


def test_links_within_a_root_are_followed(tmp_path: Path):
    root = tmp_path / "root"
    target = write_adapter(root / "v2")
    os.symlink("v2", root / "latest")
    assert find_below("latest", [str(root)]) == target
    os.symlink(root, tmp_path / "alias")
    assert find_below("v2", [str(tmp_path / "alias")]) == target
