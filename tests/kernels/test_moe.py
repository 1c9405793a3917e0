"""One conformance suite for the experts backends in Triton and their ops: small, in the interpreter or on a GPU."""

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import triton.language as tl

from lorry.kernels.moe_sort import sort_pairs
from lorry.lora.arena import Arena
from lorry.lora.batch import LoRABatchInfo, RequestRouting, int_tensor
from lorry.lora.experts.base import ExpertsLayer, make_experts_backend
from lorry.lora.experts.torch import TorchExperts
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site
from tests.kernels.workloads import MIXES, Mix, routing

DEVICE = torch.device("cuda" if CUDA else "cpu")
INTERPRETED = type(tl.sum).__name__ == "InterpretedFunction"
pytestmark = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="Triton was imported before TRITON_INTERPRET=1")
BACKENDS = ("merged", "fused")

# Bounds against float32 arithmetic: on max |error| / std of its row, on |error| / |exact| of a row and of a batch.
# A model in torch of where the backends round once to 8 or 11 bits (h, intermediate, activation, each choice's
# output) gives, over 12,000 rows of each of three layers, at most 0.031, 0.0064 and 0.0033 for fused, 0.055, 0.0129
# and 0.0054 for merged in bfloat16, an eighth in float16. A row may be twice as far off as a batch because what is
# rounded, the base product and each choice, may be larger than their sum. float32: the order of its sums.
TOLERANCE = {
    torch.bfloat16: (0.08, 0.02, 7e-3),
    torch.float16: (0.01, 2.5e-3, 9e-4),
    torch.float32: (5e-5, 2e-5, 5e-6),
}
MIN_BATCH = 32
"""Rows from which on a batch is held to the bound of batches: below, one far row may be all of it."""


@dataclass(frozen=True)
class Shape:
    """An experts layer: 2I < H where experts are narrow; `layout` as transformers stores them."""

    hidden: int = 48
    inter: int = 20
    experts: int = 4
    choices: int = 2
    layout: str = "plain"  # plain, gpt_oss, transposed, ungated_silu, ungated_relu2, gelu
    dtype: torch.dtype = torch.float32


@dataclass
class World:
    shape: Shape
    layer: ExpertsLayer
    arena: Arena

    def rows(self, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, top_k_index, top_k_weights."""
        draw = torch.Generator().manual_seed(seed)
        hidden = torch.randn(num_rows, self.shape.hidden, generator=draw).to(self.shape.dtype)
        index = torch.rand(num_rows, self.shape.experts, generator=draw).topk(self.shape.choices).indices
        weights = torch.rand(num_rows, self.shape.choices, generator=draw).to(self.shape.dtype)
        return hidden.to(DEVICE), index.to(DEVICE), weights.to(DEVICE)


def fake_experts(shape: Shape, seed: int = 0) -> Any:
    """What transformers' experts modules have, with random weights."""
    draw = torch.Generator().manual_seed(seed)
    oss, gated = shape.layout == "gpt_oss", not shape.layout.startswith("ungated")
    transposed = oss or shape.layout == "transposed"
    act = {"ungated_relu2": lambda x: x.relu().square(), "gelu": torch.nn.functional.gelu}
    module = SimpleNamespace(has_gate=gated, has_bias=oss, is_transposed=transposed, is_concatenated=not oss)
    module.act_fn = act.get(shape.layout, torch.nn.functional.silu)

    def weight(rows: int, columns: int) -> torch.nn.Parameter:
        value = torch.randn(shape.experts, rows, columns, generator=draw) / columns**0.5
        value = value.transpose(1, 2).contiguous() if transposed else value
        return torch.nn.Parameter(value.to(DEVICE, shape.dtype), requires_grad=False)

    name = "gate_up_proj" if gated else "up_proj"
    width = shape.inter * (2 if gated else 1)
    setattr(module, name, weight(width, shape.hidden))
    module.down_proj = weight(shape.hidden, shape.inter)
    if oss:
        for bias, columns in ((f"{name}_bias", width), ("down_proj_bias", shape.hidden)):
            setattr(module, bias, torch.randn(shape.experts, columns, generator=draw).to(DEVICE, shape.dtype))
        module.alpha, module.limit = 1.702, 1.5

    def apply_gate(x: Tensor) -> Tensor:
        if oss:
            gate = x[..., ::2].clamp(max=module.limit)
            return gate * torch.sigmoid(gate * module.alpha) * (x[..., 1::2].clamp(-module.limit, module.limit) + 1)
        gate, up = x.chunk(2, dim=-1)
        return module.act_fn(gate) * up

    module._apply_gate = apply_gate
    return module


def make_sites(shape: Shape) -> list[Site]:
    names = ("up_proj",) if shape.layout.startswith("ungated") else ("gate_proj", "up_proj")
    first = [Site(i, f"m.{n}", "experts", "m", shape.hidden, shape.inter, shape.experts) for i, n in enumerate(names)]
    return [*first, Site(len(first), "m.down_proj", "experts", "m", shape.inter, shape.hidden, shape.experts)]


def make_adapter(
    sites: list[Site], ranks: dict[int, int], seed: int, dtype: torch.dtype, shared_a: bool = False
) -> AdapterWeights:
    draw = torch.Generator().manual_seed(seed)
    made: dict[int, SiteWeights] = {}
    for index, rank in ranks.items():
        if index >= len(sites):  # ungated: there is one site less
            continue
        site = sites[index]
        a = torch.randn(site.num_experts, rank, site.in_features, generator=draw) / site.in_features**0.5
        b = torch.randn(site.num_experts, rank, site.out_features, generator=draw) / rank**0.5
        a = made[0].a if shared_a and index == 1 else a.to(dtype)
        made[index] = SiteWeights(a, b.to(dtype), 0.5 + 0.25 * index)
    return AdapterWeights(made, ("experts",))


def make_world(shape: Shape, ranks: list[int | dict[int, int]], seed: int = 0, shared_a: bool = False) -> World:
    """Adapter i in slot i, with one rank for all sites or ranks by site."""
    sites = make_sites(shape)
    adapters = [
        make_adapter(
            sites, r if isinstance(r, dict) else dict.fromkeys(range(len(sites)), r), seed + i, shape.dtype, shared_a
        )
        for i, r in enumerate(ranks)
    ]
    size = sum(sum(-(-t.numel() // 64) * 64 for t in a.tensors) for a in adapters) * 2 + 4096
    arena = Arena(sites, size * shape.dtype.itemsize, max(1, len(ranks)), shape.dtype, DEVICE)
    arena.data.fill_(float("nan"))
    for i, adapter in enumerate(adapters):
        assert arena.allocate(adapter) == i
    return World(shape, ExpertsLayer.of(fake_experts(shape, seed), sites), arena)


def info_of(steps: RequestRouting, num_padding: int = 0, fixed: bool = False) -> LoRABatchInfo:
    """The request view, with padding rows behind the last request."""
    indptr, slots = int_tensor(steps.indptr(), DEVICE), int_tensor(steps.slots, DEVICE)
    rows = [slot for slot, length in zip(steps.slots, steps.seq_lens, strict=True) for _ in range(length)]
    token_slots = int_tensor([*rows, *[-1] * num_padding], DEVICE)
    return LoRABatchInfo(
        len(steps.slots), len(steps.slots), indptr, slots, token_slots, steps.adapter_slots, fixed=fixed
    )


def exact(world: World, rows: tuple[Tensor, Tensor, Tensor], info: LoRABatchInfo | None) -> Tensor:
    """The torch backend in float32 on the same (rounded) weights."""
    module = SimpleNamespace(**vars(world.layer.module))
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            setattr(module, name, value.float())
    layer = replace(world.layer, module=module)
    hidden, index, weights = rows
    result: Tensor = TorchExperts(world.arena).forward(layer, hidden.float(), index, weights.float(), info)
    return result


def assert_close(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = y.float() - expected
    assert not y.isnan().any()
    worst, of_row, of_batch = TOLERANCE[dtype]
    error_std = (error.abs() / expected.std(dim=1, correction=0, keepdim=True).clamp(min=1e-3)).max().item()
    assert error_std <= worst, f"max error {error_std:.2e} std of its row"
    assert (error.norm(dim=1) / expected.norm(dim=1).clamp(min=1e-3)).max().item() <= of_row
    if len(error) >= MIN_BATCH:
        assert (error.norm() / expected.norm().clamp(min=1e-3)).item() <= of_batch


def check(world: World, name: str, num_rows: int, info: LoRABatchInfo | None, seed: int = 0) -> Tensor:
    rows = world.rows(num_rows, seed)
    y = make_experts_backend(True, world.arena, DEVICE, name).forward(world.layer, *rows, info)
    assert_close(y, exact(world, rows, info), world.shape.dtype)
    return y


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory, workspaces too, is full of NaN, or of integers that point nowhere."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda t, **kw: poisoned(t.shape, dtype=t.dtype, device=t.device, **kw))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "histogram"])
def test_sort_pairs(counted: bool):
    """Sorted by expert, then slot; tiles and groups cover exactly the pairs of experts that live here."""
    draw = torch.Generator().manual_seed(1)
    index = torch.randint(-1, 6, (23, 3), generator=draw).to(DEVICE)
    slots = torch.randint(-1, 3, (23,), generator=draw).to(DEVICE, torch.int32)
    found = sort_pairs(index, slots, 3, 5, block_m=4, group_m=2, counted=counted)
    order = found.tensors
    experts, pair_slots = index.flatten().tolist(), slots.repeat_interleave(3).tolist()
    expected = sorted((e, pair_slots[p], p) for p, e in enumerate(experts) if 0 <= e < 5)
    live = [(experts[p], pair_slots[p], p) for p in order.pairs[: len(expected)].tolist()]
    assert sorted(live) == expected
    assert [key[:2] for key in live] == [key[:2] for key in expected]
    assert order.slots[: len(expected)].tolist() == [slot for _, slot, _ in live]
    num_tiles, num_groups, num_positions = order.counts.tolist()
    assert num_positions == len(live)
    tiled = [
        (e, p)
        for e, s, stop in zip(
            *(t[:num_tiles].tolist() for t in (order.tile_expert, order.tile_start, order.tile_end)), strict=True
        )
        for p in range(s, min(s + 4, stop))
    ]
    assert tiled == [(e, i) for i, (e, _, _) in enumerate(live)]
    groups = zip(order.group_start[:num_groups].tolist(), order.group_end[:num_groups].tolist(), strict=True)
    spans = [(start, stop) for start, stop in groups if start >= 0]
    assert all(0 < stop - start <= 2 for start, stop in spans)
    assert all(len({live[i][:2] for i in range(*span)}) == 1 for span in spans)
    grouped = [i for span in spans for i in range(*span)]
    assert sorted(grouped) == [i for i, (_, slot, _) in enumerate(live) if slot >= 0]
    if found.positions is not None:
        where = {p: i for i, (_, _, p) in enumerate(live)}
        assert found.positions.tolist() == [where.get(p, -1) for p in range(len(experts))]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decode(name: str, mix: Mix):
    world = make_world(Shape(), [3, 17, 8])
    check(world, name, 5, info_of(routing(mix, 5, 3, mix != "uniform")))


@pytest.mark.parametrize("layout", ["plain", "gpt_oss", "transposed", "ungated_silu", "ungated_relu2", "gelu"])
@pytest.mark.parametrize("name", BACKENDS)
def test_m05_m06_layouts(name: str, layout: str):
    """Narrow experts (2I < H) and wide ones, gated and not, every storage of the weights."""
    info = info_of(RequestRouting((1, 1, 1), (1, -1, 0)))
    check(make_world(Shape(48, 20, layout=layout), [5, 2]), name, 3, info)
    check(make_world(Shape(24, 40, layout=layout), []), name, 3, None)


@pytest.mark.parametrize("rank", [1, 16, 33, 512])
@pytest.mark.parametrize("name", BACKENDS)
def test_ranks(name: str, rank: int):
    check(make_world(Shape(32, 16), [rank, 4]), name, 3, info_of(RequestRouting((1, 1, 1), (0, 1, -1))))


@pytest.mark.parametrize("name", BACKENDS)
def test_half_precision(name: str):
    check(make_world(Shape(dtype=torch.float16), [4, 17]), name, 5, info_of(RequestRouting((2, 1, 2), (0, -1, 1))))
