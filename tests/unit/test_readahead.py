"""Files of a checkpoint are found, and read once from end to end."""

import json
from pathlib import Path

import pytest

from lorry.models import readahead
from lorry.models.readahead import Readahead, checkpoint_files
from tests.models import tiny_model


def test_shards_come_in_the_order_of_the_index_and_nothing_else(tmp_path: Path):
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in checkpoint_files(str(tmp_path))] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_whole_model_and_none(tmp_path: Path):
    assert checkpoint_files(str(tmp_path)) == []
    tiny_model("llama").save_pretrained(tmp_path)
    assert [file.name for file in checkpoint_files(str(tmp_path))] == ["model.safetensors"]


def test_a_model_of_the_hub_that_is_not_here_has_no_files():
    assert checkpoint_files("nobody/has-this-model") == []


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readahead, "BLOCK", 1000)
    files = [tmp_path / "a", tmp_path / "b"]
    for file, size in zip(files, (12_345, 999), strict=True):
        file.write_bytes(b"x" * size)
    with Readahead(files) as reading:
        reading.wait()
        assert reading.num_read == 12_345 + 999


def test_files_larger_than_memory_are_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    monkeypatch.setattr(readahead, "SHARE_OF_MEMORY", 0.0)
    with Readahead([tmp_path / "a"]) as reading:
        reading.wait()
        assert reading.num_read == 0


def test_it_ends_early_and_survives_files_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readahead, "BLOCK", 1)
    file = tmp_path / "a"
    file.write_bytes(b"x" * 100_000)
    with Readahead([file]) as reading:
        file.unlink()
    assert reading.num_read < 100_000
