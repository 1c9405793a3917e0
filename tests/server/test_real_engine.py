"""The whole server with the real engine and a tiny model: adapters that come, go and fail while others generate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lorry.engine.worker import ENGINE_FACTORY
from tests.adapters import make_peft_adapter
from tests.models import tiny_model
from tests.server.harness import RunningServer, build_tokenizer, running_server, wait_until

FACTORY = partial(tiny_model, "mixtral", vocab_size=400)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("real")
    FACTORY().save_pretrained(folder)
    build_tokenizer(folder)
    settings = {"max_lora_rank": 16, "lora_memory": 2**22, "max_total_tokens": 2048}
    with running_server(folder, factory=ENGINE_FACTORY, **settings) as server:
        yield server


def answer(server: RunningServer, **fields) -> str:
    body = server.chat("tell me", temperature=0, max_tokens=12, ignore_eos=True, **fields).json()
    return body["choices"][0]["message"]["content"]


def good_adapter(folder: Path, rank: int = 4, seed: int = 0) -> Path:
    return make_peft_adapter(folder, FACTORY, ["q_proj", "v_proj", "o_proj"], rank=rank, seed=seed, spread=0.5)


def test_a03_a_broken_adapter_is_a_400_and_nothing_else_is_touched(real: RunningServer, tmp_path: Path):
    """Rank above the limit, and a damaged file: refused at load, while a long answer goes on undisturbed."""
    expected = answer(real)
    answers: list[str] = []
    long_answer = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
    other = threading.Thread(target=lambda: answers.append(real.chat("go on", **long_answer).text))
    other.start()
    wait_until(lambda: real.stats().num_running > 0)
    high = real.load("high", good_adapter(tmp_path / "high", rank=64))
    damaged = good_adapter(tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not tensors")
    broken = real.load("damaged", damaged)
    other.join(30)

    assert high.status_code == broken.status_code == 400
    assert "rank 64" in high.json()["error"]["message"]
    assert "--max-lora-rank" in high.json()["error"]["message"]
    assert str(damaged) in broken.json()["error"]["message"]
    assert not {"high", "damaged"} & set(real.model_ids())
    assert real.chat("hi", model="high").status_code == 404
    assert '"finish_reason":"length"' in answers[0]
    assert answer(real) == expected
    assert real.is_healthy()


def test_an_adapter_is_loaded_used_and_unloaded(real: RunningServer, tmp_path: Path):
    base = answer(real)
    assert real.load("x", good_adapter(tmp_path / "x", seed=1)).status_code == 200
    adapted = answer(real, model="x")
    assert adapted != base
    assert answer(real) == base
    assert real.load("x", good_adapter(tmp_path / "y", seed=2)).status_code == 400
    assert answer(real, model="x") == adapted
    assert real.unload("x").status_code == 200
    assert real.chat("hi", model="x").status_code == 404
    wait_until(real.is_idle)
    assert real.http.get("/health").json()["engine"]["pages_in_use"] == 0
