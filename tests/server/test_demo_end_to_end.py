"""The demo over HTTP with the real `openai` client: many streams at once, each answer as if it were alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from lorry import demo

pytestmark = pytest.mark.slow

NUM_STREAMS = 32
QUESTIONS = ["How do I make tea?", "Why is the sky blue?", "Tell me about the sea.", "What should I cook tonight?"]


@dataclass(frozen=True)
class Demo:
    """A running `lorry demo`: its address and what it printed."""

    url: str
    log: Path

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    log = tmp_path_factory.mktemp("demo") / "log"
    command = [sys.executable, "-m", "lorry.cli", "demo", "--port", "0", "--max-total-tokens", "8192"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"COLUMNS": "200"})
    try:
        yield Demo(_wait_for_url(log, process), log)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _wait_for_url(log: Path, process: subprocess.Popen[bytes]) -> str:
    for _ in range(2400):
        found = re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())
        if found and httpx.get(f"{found[0]}/health").status_code == 200:
            return found[0]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


async def _ask(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def _requests() -> list[tuple[str, str]]:
    models = ["smollm2-moe", *list(demo.ADAPTERS)[:4]]
    return [(models[i % len(models)], QUESTIONS[i % len(QUESTIONS)]) for i in range(NUM_STREAMS)]


def test_the_demo_has_at_least_four_adapters(served: Demo):
    models = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert len([m for m in models if m["parent"] == "smollm2-moe"]) == len(demo.ADAPTERS) >= 4


def test_the_lines_it_prints_work_when_pasted(served: Demo):
    printed = served.log.read_text()
    curl = next(line for line in printed.splitlines() if line.startswith("curl "))
    lines = printed[printed.index("from openai import OpenAI") :].splitlines()
    python = "\n".join(lines[: lines.index("print(answer.choices[0].message.content)") + 1])
    by_curl = json.loads(subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=120).stdout)
    by_python = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, check=True, timeout=120, text=True
    )
    assert by_curl["choices"][0]["message"]["content"]
    assert by_python.stdout.strip()


def test_32_streams_at_once_equal_the_same_requests_alone(served: Demo):
    async def run() -> tuple[list[str], list[str]]:
        async with served.client as client:
            together = await asyncio.gather(*(_ask(client, *request) for request in _requests()))
            alone = [await _ask(client, *request) for request in _requests()]
        return list(together), alone

    together, alone = asyncio.run(run())
    for request, one, other in zip(_requests(), together, alone, strict=True):
        assert one == other, request
    by_question = {}
    for (model, question), answer in zip(_requests(), together, strict=True):
        by_question.setdefault(question, {})[model] = answer
    assert all(len(set(answers.values())) == len(answers) for answers in by_question.values())


def test_afterwards_nothing_is_held(served: Demo):
    asyncio.run(_one_and_gone(served))
    stats = httpx.get(f"{served.url}/health").json()["engine"]
    held = {name: stats[name] for name in ("num_running", "num_waiting", "pages_in_use", "adapter_references")}
    assert set(held.values()) == {0}, held


async def _one_and_gone(served: Demo) -> None:
    """A client that leaves in the middle of its stream, and one that stays."""
    async with served.client as client:
        stream = await client.chat.completions.create(
            model="smollm2-moe",
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            max_tokens=2000,
            stream=True,
        )
        async for _ in stream:
            break
        await stream.close()
        await _ask(client, "smollm2-moe", QUESTIONS[1])
