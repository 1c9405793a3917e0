"""Decode steps from fixed buffers, on a CPU: a graph is stood in for by the forward that would have been captured."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.attention.base import ATTENTION_BACKENDS, AttentionBatch, DecodeBatch
from lorry.attention.torch import TorchAttention
from lorry.config import PAGE_SIZE
from lorry.engine import graphs
from lorry.engine.engine import Engine
from lorry.engine.graphs import DecodeGraphs, DecodeInputs
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.lora.backends.torch import TorchBackend
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams
from tests.adapters import make_peft_adapter
from tests.engines import make_engine, request, run_engine
from tests.models import random_tokens, tiny_model

FACTORY = partial(tiny_model, "llama")
MAX_BATCH = 12


class FromBuffers(TorchAttention):
    """Reads a step of decodes out of the buffers, each time that the model runs."""

    def plan_decode(self, batch: DecodeBatch) -> None:
        count = int((batch.context_lens > 0).sum())
        lens = tuple(batch.context_lens[:count].tolist())
        pages = tuple(tuple(row[: -(-n // PAGE_SIZE)].tolist()) for row, n in zip(batch.pages, lens, strict=False))
        assert (batch.write_slots[count:] == -1).all()
        if count:
            self.plan(AttentionBatch((1,) * count, lens, pages, batch.write_slots[:count].long()))


class Replay:
    def __init__(self, owner: DecodeGraphs, attention: FromBuffers, size: int) -> None:
        self._owner, self._attention, self._size = owner, attention, size
        self.logits = torch.zeros(size, 96)
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self._attention.plan_decode(self._owner._batch(self._size))
        self.logits.copy_(self._owner._forward(self._size))


def with_graphs(
    monkeypatch: pytest.MonkeyPatch, adapters: dict[str, Path], **settings
) -> tuple[Engine, list[Replay]]:
    """An engine that replays its decode steps, and the graphs it has."""
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch", FromBuffers)
    monkeypatch.setattr(TorchBackend, "init_cuda_graph_batch_info", lambda self, max_bs, max_tokens: None)
    monkeypatch.setattr(graphs, "ladder", lambda size: [size])  # of one size, so that rows do not differ by rounding
    engine = make_engine(FACTORY(), adapters, max_running_requests=MAX_BATCH, **settings)
    parts = engine._parts
    attention = parts.runner._attention
    made = DecodeGraphs(
        parts.loaded.model, attention, parts.lora, parts.runner.sampler.tokens, parts.info.context_length
    )
    found: list[Replay] = []

    def capture_one(size, variant):
        made._inputs.fill(None)
        found.append(Replay(made, attention, size))
        return graphs._Graph(found[-1], found[-1].logits)

    monkeypatch.setattr(made, "_capture_one", capture_one)
    made.capture(lambda text: None)
    parts.runner.graphs = made
    return engine, found


def test_answers_from_fixed_buffers_are_those_of_eager_steps(monkeypatch, tmp_path):
    """Requests of all lengths come and go, so that rows move and pages are used again."""
    adapters = {"a": make_peft_adapter(tmp_path / "a", FACTORY, ["q_proj", "v_proj"], rank=3, spread=0.5)}

    def requests(engine):
        ways = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"logprobs": 2}]
        return [
            request(
                f"r{i}",
                random_tokens(3 + 5 * i, i)[0].tolist(),
                engine,
                [None, "a"][i % 2],
                **{"max_tokens": 3 + 7 * (i % 6)} | ways[i % 4],
            )
            for i in range(20)
        ]

    plain = make_engine(FACTORY(), adapters, disable_overlap_schedule=True)
    expected = run_engine(plain, requests(plain))
    for settings in ({}, {"disable_overlap_schedule": True}, {"max_total_tokens": 16 * 20}):
        with monkeypatch.context() as patch:
            engine, found = with_graphs(patch, adapters, **settings)
            outputs = run_engine(engine, requests(engine))
        assert {name: [o.token_ids for o in own] for name, own in outputs.items()} == {
            name: [o.token_ids for o in own] for name, own in expected.items()
        }
        assert sum(replay.count for replay in found) > 30
        assert (engine.stats().num_preemptions > 0) == ("max_total_tokens" in settings)


def decode(num_tokens: int, pages: list[int], source: int = -1) -> ScheduledChunk:
    tokens = list(range(num_tokens))
    made = EngineRequest(request_id="r", token_ids=tuple(tokens), params=SamplingParams())
    return ScheduledChunk(Sequence(made, BASE_SLOT, 0, 9, tokens, pages), num_tokens - 1, 1, True, source)


def test_rows_take_their_token_from_the_host_or_from_the_step_before():
    sampled = torch.tensor([50, 51, 52], dtype=torch.int32)
    inputs = DecodeInputs(sampled, 3, 4, torch.device("cpu"))
    inputs.fill(StepPlan((decode(5, [7]), decode(17, [1, 2], source=2))))
    assert inputs.input_ids(3).tolist() == [4, 52, 0]
    assert inputs.positions.tolist() == [4, 16, 0]
    assert inputs.write_slots.tolist() == [7 * PAGE_SIZE + 4, 2 * PAGE_SIZE, -1]
    assert inputs.context_lens.tolist() == [5, 17, 0]


def test_only_pages_that_are_new_in_their_row_are_written(monkeypatch):
    inputs = DecodeInputs(torch.zeros(3, dtype=torch.int32), 3, 4, torch.device("cpu"))
    written: list[int] = []
    upload = graphs.upload

    def spy(arrays, device):
        written.append(sum(len(array) for array in arrays[2:]))
        return upload(arrays, device)

    monkeypatch.setattr(graphs, "upload", spy)
    a, b = decode(40, [3, 4, 5]), decode(20, [8, 9])
    inputs.fill(StepPlan((a, b)))
    inputs.fill(StepPlan((a, b)))
    b.sequence.pages.append(2)
    inputs.fill(StepPlan((a, b)))
    assert inputs.pages[:2].tolist() == [[3, 4, 5, 0], [8, 9, 2, 0]]
    inputs.fill(StepPlan((b,)))
    assert inputs.pages[0, :3].tolist() == [8, 9, 2]
    b.sequence.pages = [6, 7]
    inputs.fill(StepPlan((b,)))
    assert inputs.pages[0, :2].tolist() == [6, 7]
    assert written == [5, 0, 1, 3, 2]
