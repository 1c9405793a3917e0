"""The Triton attention backend on a GPU: bfloat16 at real sizes, captured graphs, no synchronisation."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from lorry.attention.base import DecodeBatch, PaddedBatch
from lorry.attention.triton import TritonAttention
from lorry.config import PAGE_SIZE
from lorry.kernels.paged_attention import paged_decode
from tests.kernels.attention_world import Feature, World
from tests.kernels.sync import no_synchronization

pytestmark = pytest.mark.gpu

MODELS = {
    "qwen3-30b-a3b": Feature(32, 4, 128, 128),
    "llama-3.1-8b": Feature(32, 8, 128, 128),
    "gpt-oss": Feature(64, 8, 64, 64, window=128, sinks=True),
    "gpt-oss, full": Feature(64, 8, 64, 64, sinks=True),
    "gemma-2": Feature(16, 8, 256, 256, softcap=50.0),
    "deepseek-v3": Feature(32, 32, 192, 128),
    "phi-2": Feature(32, 32, 80, 80),
    "one head": Feature(1, 1, 96, 96, window=700),
}

STEPS = {
    "decodes": [(1, 1 + 331 * i) for i in range(12)],
    "prefill": [(1024, 1024), (33, 33)],
    "mixed": [(1, 1200), (512, 512), (300, 1500), (1, 64), (2, 901), (1, 1), (129, 2049)],
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        return new_empty(self, *args, **settings).fill_(float("nan"))  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest over rows and heads: of each, the norm of the difference over that of the result."""
    return float(((ours.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("model", "dtype"), [*((model, torch.bfloat16) for model in MODELS), ("qwen3-30b-a3b", torch.float16)], ids=str
)
def test_a_step_equals_explicit_attention(model: str, dtype: torch.dtype, step: str):
    world = World(MODELS[model], STEPS[step], dtype, padding=3)
    expected, pool = world.reference()
    ours = world.run(TritonAttention())
    assert relative_error(ours[:-3], expected) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    assert ours[-3:].isfinite().all()
    assert torch.equal(world.kv.keys.nan_to_num(99), pool.keys.nan_to_num(99))
    assert torch.equal(world.kv.values.nan_to_num(99), pool.values.nan_to_num(99))


@pytest.mark.parametrize("model", MODELS)
def test_rows_do_not_depend_on_neighbours(model: str):
    feature, dtype = MODELS[model], torch.bfloat16
    alone = World(feature, [(700, 700)], dtype, names=[5]).run(TritonAttention())
    mixed = World(feature, [(1, 40), (900, 2000), (700, 700), (3, 9)], dtype, names=[1, 2, 5, 3])
    assert torch.equal(mixed.run(TritonAttention())[901:1601], alone)
    chunk = World(feature, [(290, 700)], dtype, names=[5]).run(TritonAttention())
    assert relative_error(chunk, alone[-290:]) < 2e-3  # masked and unmasked blocks may contract sums differently
    pair = World(feature, [(1, 1500), (1, 30)], dtype, names=[6, 7]).run(TritonAttention())
    other = World(feature, [(64, 64), (1, 5000), (1, 1500)], dtype, names=[1, 2, 6]).run(TritonAttention())
    assert torch.equal(other[-1], pair[0])


def capture(backend: TritonAttention, world: World) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the layer as it is planned, and where it leaves its result."""
    arguments = (world.q, world.k, world.v, world.kv, world.params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.run(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = backend.run(*arguments)
    return graph, out


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss", "gemma-2", "deepseek-v3"])
def test_a_captured_step_serves_any_chunks(model: str, step: str):
    """Captured with padding alone, replayed with chunks and decodes; its padding holds NaN and comes out as zero."""
    world = World(MODELS[model], STEPS[step], torch.bfloat16, padding=130)
    expected, pool = world.reference()
    backend = TritonAttention()
    World(MODELS[model], [(3, 3)], torch.bfloat16).run(backend)
    backend.reserve(16, 4096, world.q.device)
    batch = world.padded(16, 256)
    slots = batch.write_slots.clone()
    batch.write_slots.fill_(-1)
    backend.plan_padded(PaddedBatch((), (), batch.pages, batch.write_slots))
    graph, out = capture(backend, world)
    batch.write_slots.copy_(slots)
    backend.plan_padded(batch)
    graph.replay()
    assert relative_error(out[:-130], expected) < 2e-2
    assert (out[-130:] == 0).all()
    assert torch.equal(world.kv.keys.nan_to_num(99), pool.keys.nan_to_num(99))
    assert torch.equal(world.kv.values.nan_to_num(99), pool.values.nan_to_num(99))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss", "deepseek-v3"])
def test_a_captured_decode_reads_lengths_and_pages_of_its_replay(model: str):
    """Captured with no context at all, replayed with contexts of any length, padding included."""
    feature, dtype, batch = MODELS[model], torch.bfloat16, 6
    world = World(feature, [(1, 1), (1, 700), (1, 4001), (1, 64), (1, 65)], dtype, padding=batch - 5)
    expected, pool = world.reference()
    table = torch.zeros(batch, 256, dtype=torch.int32, device="cuda")
    lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
    slots = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
    backend = TritonAttention()
    backend.plan_decode(DecodeBatch(table, lens, slots))
    graph, out = capture(backend, world)
    for i, own in enumerate(world.batch.pages):
        table[i, : len(own)] = torch.tensor(own)
    lens[:5] = torch.tensor(world.batch.context_lens)
    slots[:5] = world.batch.write_slots
    graph.replay()
    assert relative_error(out[:5], expected) < 2e-2
    assert (out[5] == 0).all()
    assert torch.equal(world.kv.keys.nan_to_num(99), pool.keys.nan_to_num(99))
    eager = paged_decode(
        world.q, world.kv.keys, world.kv.values, table, lens, world.params.scale, PAGE_SIZE,
        world.params.sliding_window, world.params.softcap, world.params.sinks,
    )  # fmt: skip
    assert torch.equal(eager, out)


def test_a_mixed_step_never_waits_for_the_device():
    world = World(MODELS["qwen3-30b-a3b"], STEPS["mixed"], torch.bfloat16)
    backend = TritonAttention()
    world.run(backend)  # compiles
    with no_synchronization():
        world.run(backend)
