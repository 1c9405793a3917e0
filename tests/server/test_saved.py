"""Which adapters were loaded, over the end of a server."""

from pathlib import Path

import pytest

from lorry.errors import ConfigError
from lorry.server.saved import SavedAdapter, SavedAdapters
from tests.server.harness import running_server, write_adapter
from tests.server.test_adapters import adapter_list, load


def test_l12_a_server_that_is_started_again_has_its_adapters(model: Path, tmp_path: Path):
    state = tmp_path / "state.json"
    settings = {"lora_state": str(state), "lora_paths": {"given": str(write_adapter(tmp_path / "given", 2))}}
    with running_server(model, **settings) as server:
        load(server, "kept", write_adapter(tmp_path / "kept", 3), pinned=True)
        load(server, "gone", write_adapter(tmp_path / "gone"))
        load(server, "broken", write_adapter(tmp_path / "broken"))
        load(server, "given", write_adapter(tmp_path / "other", 9), load_inplace=True)
        server.http.post("/v1/load_lora_adapter_from_tensors", params={"lora_name": "sent"}, content=b"1")
        server.unload("gone")
    (tmp_path / "broken" / "adapter_config.json").unlink()
    for _ in range(2):
        with running_server(model, **settings) as server:
            found = adapter_list(server)
            assert {name: item["rank"] for name, item in found.items()} == {"given": 9, "kept": 3}
            assert found["kept"]["pinned"]
            assert server.says("kept") == "kept"
    assert {adapter.name for adapter in SavedAdapters(state).read()} == {"kept", "broken", "given"}


def test_a_damaged_file_is_not_taken_for_an_empty_one(tmp_path: Path):
    state = tmp_path / "state.json"
    state.write_text('[{"name": "x"')
    with pytest.raises(ConfigError, match="state.json cannot be read.*remove it"):
        SavedAdapters(state).read()


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    SavedAdapters(tmp_path / "nowhere" / "state.json").write([SavedAdapter("x", "/x")])
    assert "cannot be written" in caplog.text
