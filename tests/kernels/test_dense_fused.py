"""The projections of attention with LoRA and no launch of its own, against float32 arithmetic."""

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from lorry.kernels.dense import Segments
from lorry.kernels.dense_fused import (
    GroupLoRA,
    Heads,
    Projected,
    add_and_norm,
    norm_rotate_write,
    project,
)
from lorry.kernels.dense_kernels import INTERPRETED
from lorry.lora.batch import RequestRouting
from tests.kernels.dense_world import DEVICE, Group, World, make_world, poison, reference, rows_of
from tests.kernels.sync import no_synchronization
from tests.kernels.workloads import routing

pytestmark = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="Triton was imported before TRITON_INTERPRET=1")

EPS = 1e-6
HIDDEN, NUM_Q, NUM_KV, WIDTH = (2048, 32, 4, 128) if CUDA else (48, 3, 1, 16)
SHAPES = ((HIDDEN, (NUM_Q * WIDTH, NUM_KV * WIDTH, NUM_KV * WIDTH)), (NUM_Q * WIDTH, (HIDDEN,)))
DTYPE = torch.bfloat16 if CUDA else torch.float32
# Values are rounded up to four times on their way in bfloat16; the bounds are those of `dense_world.TOLERANCE`.
LARGEST, NORM = (2.0**-5, 2.0**-7) if CUDA else (2e-5, 4e-6)


@dataclass
class Layer:
    """Weights of one layer and a batch of rows for it."""

    world: World
    steps: RequestRouting
    norms: bool
    lora: bool

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        rows, self.slots = sum(self.steps.seq_lens), rows_of(self.steps)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape) * scale).to(DTYPE).to(DEVICE)

        self.x, self.residual = draw(rows, HIDDEN), draw(rows, HIDDEN)
        self.w_qkv = draw((NUM_Q + 2 * NUM_KV) * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        self.w_o = draw(HIDDEN, NUM_Q * WIDTH, scale=(NUM_Q * WIDTH) ** -0.5)
        self.norm, self.q_norm, self.k_norm = 1 + draw(HIDDEN, scale=0.1), 1 + draw(WIDTH), 1 + draw(WIDTH)
        angles = torch.rand(rows, WIDTH // 2) * 6.28
        cos, sin = (torch.cat([f(angles)] * 2, 1).to(DTYPE).to(DEVICE) for f in (torch.cos, torch.sin))
        norms = (self.q_norm, self.k_norm) if self.norms else (None, None)
        self.heads = Heads(NUM_Q, NUM_KV, *norms, EPS, cos, sin)
        self.write_slots = torch.randperm(rows + 5)[:rows].to(DEVICE)
        self.keys, self.values = (torch.full((rows + 5, NUM_KV, WIDTH), float("nan")).to(self.x) for _ in "kv")

    def group_lora(self, group: Group) -> GroupLoRA | None:
        if not self.lora:
            return None
        info, arena = self.world.backend.prepare_lora_batch(self.steps), self.world.arena
        segments = Segments(info.seg_indptr, info.weight_indices, info.permutation, info.max_seg_len)
        tables = arena.tables
        return GroupLoRA(tables, group.sites, segments, info.token_slots, info.max_rank)

    def run(self) -> tuple[Tensor, ...]:
        qkv, o = (self.group_lora(group) for group in self.world.groups)
        q = norm_rotate_write(
            project(self.x, self.w_qkv, qkv), qkv, self.heads, self.keys, self.values, self.write_slots
        )
        residual = self.residual.clone()
        y = add_and_norm(project(q, self.w_o, o), o, residual, self.norm, EPS)
        return q, self.keys[self.write_slots], self.values[self.write_slots], residual, y

    def expected(self) -> tuple[Tensor, ...]:
        slots = self.slots if self.lora else [-1] * len(self.slots)
        qkv = self.x.float() @ self.w_qkv.float().T
        q, k, v = (
            part.view(len(slots), -1, WIDTH)
            for part in reference(self.world, self.world.groups[0], qkv, self.x, slots).split(SHAPES[0][1], dim=1)
        )
        q, k = self._rotated(q, self.heads.q_norm).flatten(1), self._rotated(k, self.heads.k_norm)
        o = reference(self.world, self.world.groups[1], q @ self.w_o.float().T, q, slots)
        residual = self.residual.float() + o
        return q, k, v, residual, _norm(residual) * self.norm.float()

    def _rotated(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = _norm(x) * weight.float()
        a, b = x.chunk(2, -1)
        return x * self.heads.cos.float()[:, None] + torch.cat([-b, a], -1) * self.heads.sin.float()[:, None]


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def check(layer: Layer) -> None:
    got = layer.run()
    for name, value, expected in zip(["q", "k", "v", "residual", "y"], got, layer.expected(), strict=True):
        error = value.float() - expected
        assert not value.isnan().any(), name
        largest, norm = (error.abs() / (expected.abs() + expected.std())).max(), error.norm() / expected.norm()
        assert largest < LARGEST, f"{name}: largest {largest}, norm {norm}"
        assert norm < NORM, f"{name}: largest {largest}, norm {norm}"
    written = torch.zeros(len(layer.keys), dtype=torch.bool, device=DEVICE)
    written[layer.write_slots] = True
    assert layer.keys[~written].isnan().all()
    assert layer.values[~written].isnan().all()
    again = layer.run()
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no_norms"])
@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_decode(name: str, norms: bool):
    world = make_world(name, (3, 16, 20), DTYPE, SHAPES)
    check(Layer(world, RequestRouting((1,) * 6, (0, 1, -1, 2, 0, 1)), norms, True))


@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_prefill(name: str):
    world = make_world(name, (3, 18), DTYPE, SHAPES)
    lengths = (300, 1, 40, 7) if CUDA else (17, 1, 4, 3)
    check(Layer(world, RequestRouting(lengths, (1, 0, -1, 0)), True, True))


@pytest.mark.parametrize("rows", [3, 300 if CUDA else 18], ids=["decode", "prefill"])
def test_without_lora(rows: int):
    world = make_world("csgmv", (1,), DTYPE, SHAPES)
    check(Layer(world, RequestRouting((rows,), (-1,)), True, False))


@pytest.mark.parametrize("length", [1, 8, 20, 400] if CUDA else [1, 7])
@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_base_rows_keep_their_bits_whoever_is_beside_them(name: str, length: int):
    """With adapters in the batch and in a step without LoRA, at every way of product and reader."""
    world = make_world(name, (3, 18), DTYPE, SHAPES)
    layer = Layer(world, RequestRouting((length,) * 5, (1, -1, 0, -1, 1)), True, True)
    alone = Layer(world, RequestRouting((length,) * 5, (-1,) * 5), True, False)
    base = torch.tensor([slot < 0 for slot in layer.slots], device=DEVICE)
    for part, got, expected in zip(["q", "k", "v", "residual", "y"], layer.run(), alone.run(), strict=True):
        assert torch.equal(got[base], expected[base]), part


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 17, 32, 64, 128, 256, 2048])
def test_every_size(rows: int):
    world = make_world("csgmv", (8, 16, 5, 64, 33, 16, 1, 24), DTYPE, SHAPES)
    for mix in ("uniform", "skewed"):
        check(Layer(world, routing(mix, rows, 8, True, 1 if rows <= 128 else 100), True, True))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [8, 128, 300])
def test_no_step_synchronises(rows: int):
    world = make_world("csgmv", (3, 16, 20), DTYPE, SHAPES)
    layer = Layer(world, RequestRouting((1,) * rows, tuple(i % 4 - 1 for i in range(rows))), True, True)
    expected = layer.run()
    with no_synchronization():
        got = layer.run()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [20, 300], ids=["by_row", "by_tile"])
def test_h_may_be_more_than_float16_holds(rows: int):
    world = make_world("csgmv", (20,), torch.float16, SHAPES)
    group, steps = world.groups[0], RequestRouting((rows,), (0,))
    for site in group.sites:
        world.arena.data[world.arena.b_offset[site, 0] :][: 20 * max(group.widths)].mul_(2.0**-10)
    info, arena = world.backend.prepare_lora_batch(steps), world.arena
    lora = GroupLoRA(
        arena.tables,
        group.sites,
        Segments(info.seg_indptr, info.weight_indices, info.permutation, info.max_seg_len),
        info.token_slots,
        info.max_rank,
    )
    h = torch.randn(1, rows, 3 * 32, device=DEVICE) * 2.0**16
    parts = torch.zeros(1, rows, sum(group.widths), dtype=torch.float16, device=DEVICE)
    ones, zeros = torch.ones(rows, WIDTH, device=DEVICE).half(), torch.zeros(rows, WIDTH, device=DEVICE).half()
    keys, values = (torch.zeros(rows, NUM_KV, WIDTH, device=DEVICE).half() for _ in "kv")
    heads = Heads(NUM_Q, NUM_KV, None, None, EPS, ones, zeros)
    q = norm_rotate_write(Projected(parts, h), lora, heads, keys, values, torch.arange(rows, device=DEVICE))
    for i, (site, got) in enumerate(zip(group.sites, (q, keys.flatten(1), values.flatten(1)), strict=True)):
        rank, width, start = int(arena.rank[site, 0]), group.widths[i], int(arena.b_offset[site, 0])
        b = arena.data[start : start + rank * width].view(rank, width).float()
        expected = float(arena.scale[site, 0]) * h[0, :, i * 32 : i * 32 + rank] @ b
        assert (got.float() - expected).norm() < 2.0**-9 * expected.norm()
