"""What /metrics says of requests and of the engine."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lorry.server.metrics import GAUGES
from lorry.types import EngineStats
from tests.server.harness import RunningServer, running_server, wait_until, write_adapter

PAGE = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text()


def scrape(server: RunningServer) -> dict[tuple[str, ...], float]:
    """Value by (name, label values...)."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def change(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """What has come since; of the server's other tests there may be counts already."""
    found = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: value for key, value in found.items() if value and not key[0].endswith(("_created", "_sum"))}


def test_a_request_is_counted_once_with_its_tokens_and_times(server: RunningServer):
    before = scrape(server)
    usage = server.chat("say:hello world", model="french").json()["usage"]
    found = change(before, scrape(server))
    assert found["lorry_requests_total", "french", "stop"] == 1
    assert found["lorry_prompt_tokens_total", "french"] == usage["prompt_tokens"]
    assert found["lorry_generated_tokens_total", "french"] == usage["completion_tokens"]
    assert found["lorry_time_to_first_token_seconds_count", "french"] == 1
    assert found["lorry_inter_token_seconds_count", "french"] == usage["completion_tokens"] - 1
    assert found["lorry_request_seconds_count", "french"] == 1
    assert not any("base-model" in key for key in found)
    before = scrape(server)
    usage = server.chat("who?", n=3, max_tokens=2, stop=["nothing like this"]).json()["usage"]
    found = change(before, scrape(server))
    assert found["lorry_requests_total", "base-model", "length"] == 3
    assert found["lorry_prompt_tokens_total", "base-model"] == usage["prompt_tokens"]


def test_streams_that_stop_fail_or_are_left(server: RunningServer):
    before = scrape(server)
    server.chat("say:one two three", stop=["two"], stream=True)
    assert server.chat("fail").status_code == 500
    with server.http.stream("POST", "/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "slowly"}], "stream": True, "max_tokens": 200
    }) as stream:  # fmt: skip
        next(stream.iter_lines())
    wait_until(server.is_idle)
    found = change(before, scrape(server))
    assert [found["lorry_requests_total", "base-model", reason] for reason in ("stop", "error", "abort")] == [1, 1, 1]
    assert found["lorry_request_seconds_count", "base-model"] == 3


def test_what_the_engine_does(server: RunningServer):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, "slowly", model="french", max_tokens=60)
        wait_until(lambda: server.stats().num_running == 1)
        found = scrape(server)
        answer.result()
    assert found["lorry_engine_up",] == 1
    assert found["lorry_requests_running",] == 1
    assert found["lorry_adapter_references",] == 1
    assert found["lorry_kv_pages",] == 256
    assert found["lorry_adapter_residency", "french", "device"] == 1
    assert found["lorry_adapter_requests_running", "french"] == 1
    assert scrape(server)["lorry_adapter_requests_running", "french"] == 0


def test_a24_labels_are_bounded_and_go_with_their_adapter(model: Path, tmp_path: Path):
    with running_server(model, metrics_max_models=2) as server:
        for name in "abc":
            server.load(name, write_adapter(tmp_path / name))
            server.chat("who?", model=name, max_tokens=2)
        found = scrape(server)
        assert {key[1] for key in found if key[0] == "lorry_requests_total"} == {"a", "b", "other"}
        assert len({key[1] for key in found if key[0] == "lorry_adapter_residency"}) == 2
        server.unload("a")
        assert not any("a" in key[1:] for key in scrape(server))
        server.chat("who?", model="c", max_tokens=2)
        assert scrape(server)["lorry_requests_total", "c", "length"] == 1


def test_without_an_engine_the_last_values_stay(server: RunningServer):
    scrape(server)
    server.client.reason = "it is gone"
    try:
        found = scrape(server)
    finally:
        server.client.reason = None
    assert found["lorry_engine_up",] == 0
    assert found["lorry_kv_pages",] == 256


def test_every_count_of_the_engine_has_a_metric_and_a_row_in_the_docs():
    assert set(GAUGES) == set(EngineStats.__struct_fields__)
    documented = set(re.findall(r"^\| `(lorry_\w+)`", PAGE, re.MULTILINE))
    assert {name for name, _ in GAUGES.values()} <= documented
