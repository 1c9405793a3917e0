"""The engine's process dies, and the server goes on: its requests end, it says so, and it comes back as it was."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import psutil
import pytest

from lorry.config import EngineConfig
from lorry.errors import ConfigError, EngineUnavailable, ModelNotFound
from lorry.server.client import EngineClient, RestartPolicy
from lorry.text import Tokenizer
from lorry.types import EngineRequest, SamplingParams
from tests.server.harness import (
    ENVIRONMENT,
    FACTORY,
    FAST_RESTART,
    RunningServer,
    build_tokenizer,
    running_server,
    wait_until,
    write_adapter,
)


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    return build_tokenizer(tmp_path / "own")


@pytest.fixture
def mortal(own_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server whose engine may be killed; `french` was there at the start, `german` came later."""
    lora_paths = {"french": str(write_adapter(tmp_path / "french")), "gone": str(write_adapter(tmp_path / "gone"))}
    restart = RestartPolicy(delay=0.2, stable_seconds=0.0)  # long enough to look at a server without an engine
    with running_server(own_model, restart, served_model_name="base-model", lora_paths=lora_paths) as server:
        assert server.load("german", write_adapter(tmp_path / "german", rank=4)).status_code == 200
        assert server.unload("gone").status_code == 200
        yield server


def kill(server: RunningServer) -> None:
    pid = server.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not server.client.ready or server.client.pid != pid)


def test_killed_in_mid_stream(mortal: RunningServer):
    messages: list[Any] = [{"role": "user", "content": "slowly"}]
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(mortal.chat, "slowly", model="german")
        stream = mortal.openai.chat.completions.create(model="french", messages=messages, stream=True)
        next(iter(stream))
        wait_until(lambda: mortal.stats().num_running == 2)
        kill(mortal)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            list(stream)
        response = whole.result()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert response.json()["error"]["type"] == "server_error"


def test_it_comes_back_with_the_adapters_it_had(mortal: RunningServer):
    before = mortal.client.pid
    kill(mortal)
    health = mortal.http.get("/health")
    assert health.status_code == 503
    assert "killed by signal 9" in health.json()["reason"]
    assert mortal.chat("hello").status_code == 503
    assert mortal.load("x", "/x").status_code == 503
    assert set(mortal.model_ids()) == {"base-model", "french", "german"}
    wait_until(mortal.is_healthy)
    assert mortal.client.pid != before
    assert set(mortal.model_ids()) == {"base-model", "french", "german"}
    assert [mortal.says(name) for name in ("french", "german", None)] == ["french", "german", "base"]
    assert mortal.chat("who?", model="gone").status_code == 404


def test_it_comes_back_again_and_again(mortal: RunningServer):
    for _ in range(3):
        kill(mortal)
        wait_until(mortal.is_healthy)
        assert mortal.says("german") == "german"


def test_an_adapter_whose_files_have_gone_is_lost_and_no_other(mortal: RunningServer, tmp_path: Path):
    (tmp_path / "german" / "adapter_config.json").unlink()
    kill(mortal)
    wait_until(mortal.is_healthy)
    assert mortal.model_ids() == ["base-model", "french"]


def test_a_step_that_fails_ends_the_process_and_a_new_one_comes(mortal: RunningServer):
    response = mortal.chat("crash")
    assert response.status_code == 503
    assert "exit code 1" in response.json()["error"]["message"]
    wait_until(mortal.is_healthy)
    assert mortal.says("german") == "german"


def test_after_several_failures_it_gives_up_and_says_so(own_model: Path):
    with running_server(own_model) as server:
        (own_model / "trouble").write_text("exit")
        kill(server)
        wait_until(lambda: "given up" in str(server.client.reason))
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "ended with exit code 7; given up after 4 failures" in health.json()["reason"]


@contextlib.asynccontextmanager
async def engine_client(model: Path, restart: RestartPolicy = FAST_RESTART) -> AsyncIterator[EngineClient]:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        client = EngineClient(EngineConfig(model=str(model)), factory=FACTORY, restart=restart)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


def request(model: Path, text: str, **params: Any) -> EngineRequest:
    token_ids = tuple(Tokenizer.load(str(model)).encode(text))
    return EngineRequest(request_id=text, token_ids=token_ids, params=SamplingParams(**params))


def test_outputs_end_with_one_terminal(model: Path):
    async def main() -> None:
        async with engine_client(model) as client:
            outputs = [output async for output in client.generate(request(model, "say:hello"))]
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason == "stop"

    asyncio.run(main())


def test_closing_the_iterator_aborts(model: Path):
    async def main() -> None:
        async with engine_client(model) as client:
            outputs = client.generate(request(model, "slowly"))
            await anext(outputs)
            assert (await client.stats()).num_running == 1
            await outputs.aclose()
            assert (await client.stats()).num_running == 0

    asyncio.run(main())


def test_you_read_what_you_wrote(model: Path, tmp_path: Path):
    async def main() -> None:
        async with engine_client(model) as client:
            info = await client.load_adapter("x", str(write_adapter(tmp_path / "x")))
            assert client.adapters == {"x": info}
            await client.unload_adapter("x")
            assert client.adapters == {}
            with pytest.raises(ModelNotFound):
                await client.unload_adapter("x")

    asyncio.run(main())


def test_a_closed_client_leaves_no_process_and_ends_its_requests(model: Path):
    async def main() -> int | None:
        async with engine_client(model) as client:
            outputs = client.generate(request(model, "slowly"))
            await anext(outputs)
            pid = client.pid
        last = [output async for output in outputs][-1]
        assert (last.finish_reason, last.error_code) == ("error", "engine_unavailable")
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await anext(client.generate(request(model, "again")))
        return pid

    pid = asyncio.run(main())
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_an_engine_that_cannot_start_says_why(own_model: Path):
    async def main() -> None:
        async with engine_client(own_model):
            pass

    (own_model / "trouble").write_text("the model is upside down")
    with pytest.raises(ConfigError, match="upside down"):
        asyncio.run(main())
    (own_model / "trouble").write_text("exit")
    with pytest.raises(EngineUnavailable, match="exit code 7"):
        asyncio.run(main())


ORPHAN = """
import asyncio, sys, time
from lorry.config import EngineConfig
from lorry.server.client import EngineClient

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1]), factory=sys.argv[2])
    await client.start()
    print(client.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent(model: Path, tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(model), FACTORY],
        env=os.environ | ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    engine_ended = lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    wait_until(engine_ended)
    assert not list(tmp_path.iterdir())
