"""A real server for tests: HTTP on a free port, a fake engine in a real process, a tokenizer trained in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from lorry.config import ServerConfig
from lorry.server.app import create_app
from lorry.server.client import EngineClient, RestartPolicy
from lorry.server.saved import SavedAdapters
from lorry.server.serve import bind
from lorry.text import Tokenizer

FACTORY = "tests.server.fake_engine:FakeEngine"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}
FAST_RESTART = RestartPolicy(delay=0.02, max_failures=4, stable_seconds=0.0)

TEXT = [
    "all work and no play makes jack a dull boy",
    "say: the quick brown fox jumps over the lazy dog, slowly",
    "user assistant system seed hello world",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Train a byte-level BPE, and save it as a tokenizer that transformers reads."""
    from transformers import PreTrainedTokenizerFast

    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, rank: int = 8, **extra: Any) -> Path:
    """An adapter as the fake engine reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, **extra}))
    return folder


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that happens by itself soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    url: str
    config: ServerConfig
    client: EngineClient
    loop: asyncio.AbstractEventLoop
    progress: list[str]
    http: httpx.Client = field(init=False)
    openai: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        headers = {} if self.config.api_key is None else {"Authorization": f"Bearer {self.config.api_key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=20)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.config.api_key or "none", max_retries=0, timeout=20
        )

    def token_ids(self, text: str) -> list[int]:
        return Tokenizer.load(self.config.model).encode(text)

    def stats(self) -> Any:
        return asyncio.run_coroutine_threadsafe(self.client.stats(), self.loop).result(10)

    def is_idle(self) -> bool:
        stats = self.stats()
        return stats.num_running == 0 and stats.adapter_references == 0

    def is_healthy(self) -> bool:
        return self.http.get("/health").status_code == 200

    def model_ids(self) -> list[str]:
        return [model["id"] for model in self.http.get("/v1/models").json()["data"]]

    def load(self, name: str, path: Path | str) -> httpx.Response:
        return self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def says(self, model: str | None) -> str:
        """Name of the weights that answer a request for `model`, by the answer's own text."""
        fields = {} if model is None else {"model": model}
        answer = self.chat("who?", max_tokens=40, **fields).json()
        return str(answer["choices"][0]["message"]["content"]).partition("]")[0][1:]


@contextlib.contextmanager
def running_server(
    model: Path, restart: RestartPolicy = FAST_RESTART, factory: str = FACTORY, **settings: Any
) -> Iterator[RunningServer]:
    """Start a server, give it, stop it; the engine's process has ended afterwards."""
    config = ServerConfig(model=str(model), **settings)
    progress: list[str] = []
    started: Future[RunningServer] = Future()
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        saved = None if config.lora_state is None else SavedAdapters(Path(config.lora_state))
        client = EngineClient(config, progress.append, factory, restart, saved=saved)
        await client.start()
        await client.load_saved()
        app = create_app(config, client, Tokenizer.load(config.model, config.chat_template))
        with bind(config.host, 0) as listener:
            servers.append(uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            started.set_result(RunningServer(url, config, client, asyncio.get_running_loop(), progress))
            await servers[0].serve(sockets=[listener])

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with mock.patch.dict(os.environ, ENVIRONMENT):
        thread = threading.Thread(target=run)
        thread.start()
        try:
            server = started.result(30)
            wait_until(lambda: servers[0].started)
            yield server
            server.http.close()
            server.openai.close()
        finally:
            for running in servers:
                running.should_exit = True
            thread.join(15)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that has a tokenizer and nothing else."""
    return build_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(str(model))


@pytest.fixture(scope="session")
def shared_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    lora_paths = {"french": str(write_adapter(folder / "french"))}
    with running_server(model, served_model_name="base-model", lora_paths=lora_paths) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """A server named `base-model` with the adapter `french`, idle before and after the test."""
    yield shared_server
    wait_until(shared_server.is_idle)
    for name in shared_server.model_ids()[1:]:
        if name != "french":
            shared_server.unload(name)
