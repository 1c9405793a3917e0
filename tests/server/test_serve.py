"""`serve`: a process that starts, says what it serves, and ends without leaving anything behind."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from lorry.config import ServerConfig
from lorry.errors import ConfigError
from lorry.server.serve import bind, print_summary, serve
from lorry.types import AdapterInfo, AdapterUid
from tests.server.fake_engine import FakeEngine
from tests.server.harness import ENVIRONMENT, FACTORY, write_adapter

SERVE = """
import sys
from lorry.config import ServerConfig
from lorry.server.serve import serve

serve(ServerConfig(model=sys.argv[1], port=0, lora_paths={"french": sys.argv[2]}), factory=sys.argv[3])
"""


@contextlib.contextmanager
def serving(model: Path, adapter: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and what it has printed when it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(model), str(adapter), FACTORY],
        env=os.environ | ENVIRONMENT | {"COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(20, process.kill)
        watchdog.start()
        printed = ""
        assert process.stdout is not None
        try:
            while "curl" not in printed:
                line = process.stdout.readline()
                assert line, printed
                printed += line
            yield process, printed
        finally:
            watchdog.cancel()
            process.kill()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_told_to_stop(model: Path, tmp_path: Path, sign: signal.Signals):
    with serving(model, write_adapter(tmp_path / "french", rank=16)) as (process, printed):
        [url] = set(re.findall(r"http://127\.0\.0\.1:\d+", printed))
        assert "loading nothing" in printed
        [engine] = psutil.Process(process.pid).children()
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "french", "messages": [{"role": "user", "content": "who?"}], "max_tokens": 9},
        )
        assert answer.json()["model"] == "french"
        process.send_signal(sign)
        assert process.wait(10) == (0 if sign == signal.SIGINT else -signal.SIGTERM)
        assert not engine.is_running()


def test_small_packets_are_not_held_back():
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # what asyncio looks at before it sets TCP_NODELAY


def test_a_port_in_use_is_said_before_anything_is_loaded(model: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            serve(ServerConfig(model=str(model), port=port), factory="nothing:Nothing")


def test_an_address_that_is_not_ours(model: Path):
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(ServerConfig(model=str(model), host="203.0.113.7"), factory="nothing:Nothing")


def test_an_adapter_may_not_have_the_bases_name(model: Path):
    with pytest.raises(ConfigError, match="lora-paths"):
        serve(
            ServerConfig(model=str(model), served_model_name="x", lora_paths={"x": "/x"}), factory="nothing:Nothing"
        )


def test_the_summary_says_what_a_person_wants_to_know(model: Path):
    config = ServerConfig(model=str(model), served_model_name="base-model", api_key="secret")
    adapter = AdapterInfo(
        name="it's [red]",
        uid=AdapterUid(1),
        path="/adapters/french",
        rank=16,
        num_bytes=3 * 2**20,
        target_modules=("q_proj", "v_proj"),
        warnings=("made for another model",),
    )
    console = Console(file=io.StringIO(), width=120)
    info = FakeEngine(config, lambda text: None).info
    print_summary(console, config, info, [adapter], "http://127.0.0.1:8000")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for fact in ("base-model", "135.0 million", "712 MiB", "KV 256 MiB", "LoRA 1.0 GiB", "3 MiB in use", "float32"):
        assert fact in text
    for fact in ("experts fused", "it's [red]", "q_proj v_proj", "made for another model", "http://127.0.0.1:8000"):
        assert fact in text
    assert "secret" not in text
    [curl] = [line for line in text.splitlines() if line.startswith("curl")]
    assert "it'\"'\"'s [red]" in curl
