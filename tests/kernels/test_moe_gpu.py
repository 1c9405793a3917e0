"""The experts backends on a GPU: 1 to 4,096 rows, half precisions, graphs, no host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.sync import no_synchronization

from tests.kernels.test_moe import (  # isort: skip  (it chooses the interpreter before Triton is imported)
    BACKENDS,
    DEVICE,
    Shape,
    World,
    _poison,
    assert_close,
    check,
    exact,
    info_of,
    make_adapter,
    make_world,
)

from lorry.kernels.moe_prefill import fits_prefill
from lorry.lora.batch import RequestRouting
from lorry.lora.experts.base import make_experts_backend
from lorry.lora.experts.triton import _describe
from tests.kernels.workloads import MIXES, Mix, routing

__all__ = ["_poison"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE = Shape(256, 192, 16, 4, dtype=torch.bfloat16)
OSS = Shape(320, 128, 8, 4, "gpt_oss", torch.bfloat16)
RANKS: list[int | dict[int, int]] = [16, 8, 33, {0: 64, 2: 5}, 1, {1: 12}, 128, {}]


@pytest.fixture(scope="module")
def worlds() -> Callable[[Shape], World]:
    made: dict[Shape, World] = {}

    def get(shape: Shape) -> World:
        if shape not in made:
            num_sites = 2 if shape.layout.startswith("ungated") else 3
            ranks = [{s: r[s] for s in r if s < num_sites} if isinstance(r, dict) else r for r in RANKS]
            made[shape] = make_world(shape, ranks)
        return made[shape]

    return get


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32, 100, 128, 300, 1024, 4096])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows(worlds: Callable[[Shape], World], name: str, num_rows: int):
    for mix in MIXES:
        seq_len = 1 if num_rows <= 128 else 50
        check(worlds(LARGE), name, num_rows, info_of(routing(mix, num_rows, len(RANKS), mix != "uniform", seq_len)))
    check(worlds(LARGE), name, num_rows, None)


SHAPES = {
    "gpt_oss": OSS,
    "float16": Shape(256, 192, 16, 4, dtype=torch.float16),
    "ungated": Shape(96, 80, 6, 3, "ungated_relu2", torch.bfloat16),
    "float32": Shape(64, 40, 4, 2, dtype=torch.float32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", BACKENDS)
def test_shapes_and_types(worlds: Callable[[Shape], World], name: str, shape: Shape):
    for num_rows in (3, 40, 700):
        check(worlds(shape), name, num_rows, info_of(routing("zipf", num_rows, len(RANKS), True, 1 + num_rows // 20)))
        check(worlds(shape), name, num_rows, None)


@pytest.mark.parametrize("shape", [LARGE, OSS], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("num_rows", [1, 8, 32, 128, 2048])
def test_m20_base_rows_have_the_bits_of_a_base_only_step(
    worlds: Callable[[Shape], World], shape: Shape, num_rows: int
):
    world = worlds(shape)
    backend = make_experts_backend(True, world.arena, DEVICE, "fused")
    rows = world.rows(num_rows)
    info = info_of(routing("distinct", num_rows, len(RANKS), True, 1 + num_rows // 100))
    base = info.token_slots == -1
    if num_rows == 1:
        info, base = info_of(RequestRouting((1,), (7,))), torch.ones(1, dtype=torch.bool, device=DEVICE)
    mixed, plain = backend.forward(world.layer, *rows, info), backend.forward(world.layer, *rows, None)
    assert torch.equal(mixed[base], plain[base])


def test_many_rows_take_the_prefill_plan(worlds: Callable[[Shape], World]):
    for shape in (LARGE, OSS):
        hidden, index, _ = worlds(shape).rows(1024)
        assert fits_prefill(hidden, _describe(worlds(shape).layer).weights, index.numel()) is not None


class Captured:
    """One step of a size in a graph; replays take new rows and routing in place."""

    def __init__(self, world: World, name: str, num_rows: int) -> None:
        self.world, self.num_rows = world, num_rows
        self.rows = world.rows(num_rows)
        self.info = info_of(RequestRouting((1,), (0,)), num_padding=num_rows - 1, fixed=True)

        def step() -> Tensor:
            """By a backend that meets the layer for the first time."""
            backend = make_experts_backend(True, world.arena, DEVICE, name)
            return backend.forward(world.layer, *self.rows, self.info)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        with no_synchronization():
            step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = step()

    def replay(self, steps: RequestRouting, seed: int) -> None:
        for own, new in zip(self.rows, self.world.rows(self.num_rows, seed), strict=True):
            own.copy_(new)
        live = sum(steps.seq_lens)
        info = info_of(steps, self.num_rows - live)
        self.info.token_slots.copy_(info.token_slots)
        self.y.fill_(float("nan"))
        self.graph.replay()
        rows = tuple(t[:live] for t in self.rows)
        assert_close(self.y[:live], exact(self.world, rows, info), self.world.shape.dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 8, 64, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_graph_captured_with_one_adapter_serves_any(name: str, num_rows: int):
    world = make_world(LARGE, RANKS)
    captured = Captured(world, name, num_rows)
    for i, num_adapters in enumerate((1, 2, 4, 8, 1)):
        mix: Mix = MIXES[i]
        captured.replay(routing(mix, max(1, num_rows - i), num_adapters, i % 2 == 0, seed=i), seed=i)
    captured.replay(RequestRouting((1,), (-1,)), seed=7)
    world.arena.release(1)
    everywhere = {site.index: 200 for site in world.arena.sites}
    world.arena.release(6)
    assert world.arena.allocate(make_adapter(list(world.arena.sites), everywhere, 77, LARGE.dtype)) in (1, 6)
    captured.replay(routing("identical", num_rows, 1, False), seed=8)
    captured.replay(RequestRouting((num_rows,), (6,)), seed=9)
