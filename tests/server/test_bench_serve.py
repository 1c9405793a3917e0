"""The load generator against a real server with the fake engine."""

import itertools
import json
from pathlib import Path

import pytest

from bench import serve
from tests.server.harness import RunningServer

FAST = ["--requests", "12", "--rate", "200", "--input", "5:20", "--output", "3:8"]


def bench(server: RunningServer, *argv: str) -> dict:
    return serve.main(["--url", server.url, *FAST, *argv])


@pytest.mark.parametrize("kind", [[], ["--chat"], ["--vocab", "250"]])
def test_latencies_by_model_and_in_all(server: RunningServer, kind: list[str], tmp_path: Path, capsys):
    out = tmp_path / "results" / "serve.jsonl"
    line = bench(server, "--models", "base-model", "french", "--mix", "distinct", "--out", str(out), *kind)
    assert json.loads(out.read_text()) == line == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["requests"], line["errors"], line["error_messages"]) == (12, 0, {})
    assert {name: part["requests"] for name, part in line["by_model"].items()} == {"base-model": 6, "french": 6}
    for part in (line, *line["by_model"].values()):
        for times in (part["ttft_ms"], part["inter_token_ms"]):
            assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert line["output_tokens_per_s"] > 0
    assert line["input_tokens_per_s"] > 0
    assert line["tokens_per_piece"] >= 1


def test_errors_are_counted_and_named_and_do_not_stop_the_run(server: RunningServer):
    line = bench(server, "--models", "french", "nobody", "--mix", "distinct")
    assert line["errors"] == line["by_model"]["nobody"]["errors"] == 6
    assert line["by_model"]["french"]["errors"] == 0
    assert line["by_model"]["nobody"]["ttft_ms"] is None
    (message,) = line["error_messages"]
    assert "HTTP 404" in message
    assert "nobody" in message


def test_a_server_that_is_not_there_is_an_error_of_each_request():
    line = serve.main(["--url", "http://127.0.0.1:9", "--models", "a", "--requests", "3"])
    assert line["errors"] == 3
    assert "ConnectError" in next(iter(line["error_messages"]))


def test_plans_are_repeatable_poisson_and_mixed():
    argv = ["--models", *"abcdefgh", "--requests", "4000", "--rate", "50", "--mix", "zipf", "--input", "10:30"]
    requests = serve.plan(serve.parse(argv))
    assert requests == serve.plan(serve.parse(argv))
    assert requests[-1].at == pytest.approx(4000 / 50, rel=0.1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(requests)]
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    counts = [sum(request.model == name for request in requests) for name in "abcdefgh"]
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.25)
    assert {request.num_input for request in requests} == set(range(10, 31))
    assert len({request.seed for request in requests}) > 3990


@pytest.mark.parametrize("argv", [["--input", "0"], ["--input", "9:3"], ["--rate", "0"], ["--chat", "--vocab", "9"]])
def test_nonsense_is_refused(argv: list[str], capsys):
    with pytest.raises(SystemExit):
        serve.parse(["--models", "a", *argv])
    assert "error" in capsys.readouterr().err
