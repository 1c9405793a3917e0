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


def test_a08_of_parallel_loads_of_one_name_one_wins(server: RunningServer, tmp_path: Path):
    path = write_adapter(tmp_path / "x", seconds=0.02)
    with ThreadPoolExecutor(16) as pool:
        statuses = sorted(pool.map(lambda _: server.load("same", path).status_code, range(16)))
    assert statuses == [200] + [400] * 15
    assert server.model_ids().count("same") == 1


def test_l02_reading_an_adapter_does_not_stop_the_others(server: RunningServer, tmp_path: Path):
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(server.load, "large", write_adapter(tmp_path / "large", seconds=0.5))
        for _ in range(5):
            assert server.says("french") == "french"
        assert not loading.done()
        assert loading.result().status_code == 200


def test_l03_a_running_request_finishes_after_its_adapter_has_gone(server: RunningServer, tmp_path: Path):
    server.load("brief", write_adapter(tmp_path / "brief"))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "slowly", model="brief", max_tokens=60)
        wait_until(lambda: server.stats().num_running == 1)
        assert server.unload("brief").status_code == 200
        assert server.chat("who?", model="brief").status_code == 404
        assert not answer.done()
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


def adapter_list(server: RunningServer) -> dict[str, dict]:
    return {item["id"]: item for item in server.http.get("/v1/lora_adapters").json()["data"]}


def load(server: RunningServer, name: str, path: Path, **fields: object):
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def test_a06_l15_loading_in_place_makes_a_new_version_which_answers_name(server: RunningServer, tmp_path: Path):
    first = load(server, "x", write_adapter(tmp_path / "x", 4))
    assert server.chat("who?", model="x").json()["system_fingerprint"] == f"x@{first.headers['x-lora-version']}"
    refused = load(server, "x", write_adapter(tmp_path / "y", 8))
    assert "load_inplace" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "slowly", model="x", max_tokens=40)
        wait_until(lambda: server.stats().num_running == 1)
        second = load(server, "x", tmp_path / "y", load_inplace=True)
        assert second.status_code == 200
        assert int(second.headers["x-lora-version"]) > int(first.headers["x-lora-version"])
        assert answer.result().json()["system_fingerprint"] == f"x@{first.headers['x-lora-version']}"
    assert server.chat("who?", model="x").json()["system_fingerprint"] == f"x@{second.headers['x-lora-version']}"
    assert adapter_list(server)["x"]["rank"] == 8
    assert server.model_ids().count("x") == 1
    assert load(server, "new", tmp_path / "x", load_inplace=True).status_code == 200


def test_an_adapter_sent_in_the_request(server: RunningServer):
    path = "/v1/load_lora_adapter_from_tensors"
    response = server.http.post(path, params={"lora_name": "sent", "pinned": True}, content=b"12345")
    assert response.status_code == 200
    found = adapter_list(server)["sent"]
    assert (found["rank"], found["pinned"], found["version"]) == (5, True, int(response.headers["x-lora-version"]))
    assert server.http.post(path, params={"lora_name": "sent"}, content=b"1").status_code == 400
    again = server.http.post(path, params={"lora_name": "sent", "load_inplace": True}, content=b"1")
    assert again.status_code == 200
    assert server.http.post(path, content=b"1").json()["error"]["param"] == "lora_name"


def test_pin_list_unpin(server: RunningServer):
    assert server.http.post("/v1/pin_lora_adapter", json={"lora_name": "french"}).status_code == 200
    found = adapter_list(server)["french"]
    assert found["pinned"]
    assert found["residency"] == "device"
    assert (found["num_running"], found["num_waiting"], found["draining"]) == (0, 0, False)
    assert server.http.post("/v1/unpin_lora_adapter", json={"lora_name": "french"}).status_code == 200
    assert not adapter_list(server)["french"]["pinned"]
    for route in ("pin", "unpin"):
        assert server.http.post(f"/v1/{route}_lora_adapter", json={"lora_name": "nobody"}).status_code == 404


def test_unloading_can_end_what_runs(server: RunningServer, tmp_path: Path):
    load(server, "brief", write_adapter(tmp_path / "brief"))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "slowly", model="brief", max_tokens=200)
        wait_until(lambda: server.stats().num_running == 1)
        body = {"lora_name": "brief", "abort": True}
        assert server.http.post("/v1/unload_lora_adapter", json=body).status_code == 200
        assert answer.result().status_code == 503
    assert server.is_idle()


def test_the_spellings_of_sglang(server: RunningServer, tmp_path: Path):
    body = {"lora_name": "x", "lora_path": str(write_adapter(tmp_path / "x"))}
    assert server.http.post("/load_lora_adapter", json=body).status_code == 200
    assert server.says("x") == "x"
    assert server.http.post("/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200


def test_pins_and_replaced_adapters_come_back_with_the_engine(server: RunningServer, tmp_path: Path):
    load(server, "kept", write_adapter(tmp_path / "kept", 3), pinned=True)
    load(server, "french", write_adapter(tmp_path / "other", 7), load_inplace=True)
    server.http.post("/v1/load_lora_adapter_from_tensors", params={"lora_name": "sent"}, content=b"1")
    assert server.chat("crash").status_code == 503
    wait_until(server.is_healthy)
    found = adapter_list(server)
    assert found["kept"]["pinned"]
    assert found["french"]["rank"] == 7
    assert "sent" not in found
    assert "sent" not in server.model_ids()
