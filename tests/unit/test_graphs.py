"""Steps from fixed buffers, on a CPU: a graph is stood in for by the forward that would have been captured."""

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lorry.attention.base import ATTENTION_BACKENDS, AttentionBatch, DecodeBatch, PaddedBatch
from lorry.attention.torch import TorchAttention
from lorry.config import PAGE_SIZE
from lorry.engine import graphs, inputs
from lorry.engine.engine import Engine
from lorry.engine.graphs import Shape, StepGraphs, decode_ladder, mixed_ladder
from lorry.engine.inputs import FixedInputs
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.lora.backends.torch import TorchBackend
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams
from tests.adapters import make_peft_adapter
from tests.engines import make_engine, request, run_engine
from tests.models import random_tokens, tiny_model

FACTORY = partial(tiny_model, "llama")
MAX_BATCH, MAX_ROWS = 12, 48


class FromBuffers(TorchAttention):
    """Takes from the host only what a captured step is given anew; pages and places come out of the buffers."""

    def reserve(self, max_requests: int, max_rows: int, device: torch.device) -> None:
        pass

    def plan_decode(self, batch: DecodeBatch) -> None:
        count = int((batch.context_lens > 0).sum())
        lens = tuple(batch.context_lens[:count].tolist())
        self.plan_padded(PaddedBatch((1,) * count, lens, batch.pages, batch.write_slots))

    def plan_padded(self, batch: PaddedBatch) -> None:
        pages = tuple(
            tuple(row[: -(-n // PAGE_SIZE)].tolist()) for row, n in zip(batch.pages, batch.context_lens, strict=False)
        )
        count = sum(batch.query_lens)
        assert (batch.write_slots[count:] == -1).all()
        self.plan(AttentionBatch(batch.query_lens, batch.context_lens, pages, batch.write_slots[:count].long()))


class Replay:
    def __init__(self, owner: StepGraphs, shape: Shape) -> None:
        self.shape, self.count = shape, 0
        self._owner = owner

    def replay(self) -> None:
        self.count += 1
        self._owner._forward(self.shape)


def with_graphs(
    monkeypatch: pytest.MonkeyPatch, adapters: dict[str, Path], **settings
) -> tuple[Engine, list[Replay]]:
    """An engine that replays its steps, and the graphs it has."""
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch", FromBuffers)
    monkeypatch.setattr(TorchBackend, "init_cuda_graph_batch_info", lambda self, max_bs, max_tokens: None)
    # Of one size, and as large as it takes for rows not to differ by rounding.
    monkeypatch.setattr(graphs, "decode_ladder", lambda size: [size])
    monkeypatch.setattr(graphs, "mixed_ladder", lambda size: [size // 2, size])
    settings = {"max_running_requests": MAX_BATCH, "chunked_prefill_size": MAX_ROWS} | settings
    engine = make_engine(FACTORY(), adapters, **settings)
    parts = engine._parts
    found: list[Replay] = []

    def capture_one(self, shape, variant):
        found.append(Replay(self, shape))
        return found[-1]

    monkeypatch.setattr(StepGraphs, "_capture_one", capture_one)
    tokens, context = parts.runner.sampler.tokens, parts.info.context_length
    made = StepGraphs(parts.loaded.model, parts.runner._attention, parts.lora, tokens, MAX_ROWS, context)
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
        replayed = Counter()
        for replay in found:
            replayed[replay.shape.kind, replay.shape.num_rows] += replay.count
        assert replayed["decode", MAX_BATCH] > 20
        assert replayed["mixed", MAX_ROWS] > 2
        assert replayed["mixed", MAX_ROWS // 2] > 0
        assert (engine.stats().num_preemptions > 0) == ("max_total_tokens" in settings)


def decode(num_tokens: int, pages: list[int], source: int = -1) -> ScheduledChunk:
    tokens = list(range(num_tokens))
    made = EngineRequest(request_id="r", token_ids=tuple(tokens), params=SamplingParams())
    return ScheduledChunk(Sequence(made, BASE_SLOT, 0, 9, tokens, pages), num_tokens - 1, 1, True, source)


def fixed_inputs(sampled: list[int] = [0, 0, 0]) -> FixedInputs:  # noqa: B006
    return FixedInputs(torch.tensor(sampled, dtype=torch.int32), 8, 4)


def test_rows_take_their_token_from_the_host_or_from_the_step_before():
    made = fixed_inputs([50, 51, 52])
    made.fill(StepPlan((decode(5, [7]), decode(17, [1, 2], source=2))), 3)
    assert made.input_ids(3).tolist() == [4, 52, 0]
    assert made.positions[:3].tolist() == [4, 16, 0]
    assert made.write_slots[:3].tolist() == [7 * PAGE_SIZE + 4, 2 * PAGE_SIZE, -1]
    assert made.context_lens.tolist() == [5, 17, 0]
    assert made.logit_rows.tolist() == [0, 1, 0]


def test_a_step_of_chunks_and_decodes():
    prompt = decode(21, [3, 5]).sequence
    chunks = (
        ScheduledChunk(prompt, 14, 4),
        decode(17, [1, 2], source=1),
        ScheduledChunk(decode(3, [9]).sequence, 0, 2, True),
    )
    made = fixed_inputs([50, 51, 52])
    made.fill(StepPlan(chunks), 8)
    assert made.input_ids(8).tolist() == [14, 15, 16, 17, 51, 0, 1, 0]
    assert made.positions.tolist() == [14, 15, 16, 17, 16, 0, 1, 0]
    places = [3 * PAGE_SIZE + 14, 3 * PAGE_SIZE + 15, 5 * PAGE_SIZE, 5 * PAGE_SIZE + 1, 2 * PAGE_SIZE, 9 * PAGE_SIZE]
    assert made.write_slots.tolist() == [*places, 9 * PAGE_SIZE + 1, -1]
    assert made.context_lens.tolist() == [18, 17, 2]
    assert made.logit_rows.tolist() == [4, 6, 0]


def test_only_pages_that_are_new_in_their_row_are_written(monkeypatch):
    made = fixed_inputs()
    written: list[int] = []
    upload = inputs.upload

    def spy(arrays, device):
        written.append(sum(len(array) for array in arrays[3:]))
        return upload(arrays, device)

    monkeypatch.setattr(inputs, "upload", spy)
    a, b = decode(40, [3, 4, 5]), decode(20, [8, 9])
    made.fill(StepPlan((a, b)), 3)
    made.fill(StepPlan((a, b)), 3)
    b.sequence.pages.append(2)
    made.fill(StepPlan((a, b)), 3)
    assert made.pages[:2].tolist() == [[3, 4, 5, 0], [8, 9, 2, 0]]
    made.fill(StepPlan((b,)), 3)
    assert made.pages[0, :3].tolist() == [8, 9, 2]
    b.sequence.pages = [6, 7]
    made.fill(StepPlan((b,)), 3)
    assert made.pages[0, :2].tolist() == [6, 7]
    assert written == [5, 0, 1, 3, 2]


@pytest.mark.parametrize("size", [1, 3, 8, 31, 32, 33, 1000, 1024, 8192, 10000])
def test_p20_ladders_rise_to_the_largest_step_however_small(size):
    for ladder in (decode_ladder(size), mixed_ladder(size)):
        assert ladder == sorted(set(ladder))
        assert ladder[-1] == size
    large = [rows for rows in mixed_ladder(size) if rows >= 512]
    assert all(b <= 1.5 * a for a, b in pairwise(large))
