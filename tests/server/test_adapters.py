"""Adapters that come and go while the server runs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.harness import RunningServer, running_server, wait_until, write_adapter


def test_load_use_unload(server: RunningServer, tmp_path: Path):
    response = server.load("german", write_adapter(tmp_path / "german"))
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'german' added successfully.")
    assert response.headers["content-type"].startswith("text/plain")
    assert server.says("german") == "german"
    response = server.unload("german")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'german' removed successfully.")
    assert server.chat("who?", model="german").status_code == 404


def test_errors_of_loading(server: RunningServer, tmp_path: Path):
    path = write_adapter(tmp_path / "x")
    assert server.load("french", path).json()["error"]["code"] == "adapter_exists"
    assert server.load("base-model", path).json()["error"]["param"] == "lora_name"
    assert server.load("", path).status_code == 400
    missing = server.http.post("/v1/load_lora_adapter", json={"lora_name": "x"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
    assert server.unload("nobody").status_code == 404
    assert server.unload("base-model").status_code == 404
    assert server.model_ids() == ["base-model", "french"]


def test_of_parallel_loads_of_one_name_one_wins(server: RunningServer, tmp_path: Path):
    path = write_adapter(tmp_path / "x", seconds=0.02)
    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(lambda _: server.load("same", path).status_code, range(8)))
    assert statuses == [200] + [400] * 7
    assert server.model_ids().count("same") == 1


def test_reading_an_adapter_does_not_stop_the_others(server: RunningServer, tmp_path: Path):
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(server.load, "large", write_adapter(tmp_path / "large", seconds=0.5))
        for _ in range(5):
            assert server.says("french") == "french"
        assert not loading.done()
        assert loading.result().status_code == 200


def test_a_running_request_finishes_after_its_adapter_has_gone(server: RunningServer, tmp_path: Path):
    server.load("brief", write_adapter(tmp_path / "brief"))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "slowly", model="brief", max_tokens=60)
        wait_until(lambda: server.stats().num_running == 1)
        assert server.unload("brief").status_code == 200
        assert answer.result().json()["choices"][0]["message"]["content"].startswith("[brief]")


def test_switched_off(model: Path, tmp_path: Path):
    with running_server(model, enable_lora=False) as server:
        response = server.load("x", write_adapter(tmp_path / "x"))
        assert response.status_code == 400
        assert "enable-lora" in response.json()["error"]["message"]


def test_capacity(model: Path, tmp_path: Path):
    with running_server(model, max_loras_per_batch=1) as server:
        assert server.load("one", write_adapter(tmp_path / "one")).status_code == 200
        response = server.load("two", write_adapter(tmp_path / "two"))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "adapter_capacity")
        assert server.model_ids()[1:] == ["one"]
