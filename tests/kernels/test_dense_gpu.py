"""The dense backends on a GPU: full sizes, captured graphs, no synchronisation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from lorry.lora.batch import RequestRouting
from tests.kernels.dense_world import (
    LARGE,
    World,
    assert_close,
    check,
    check_view,
    inputs,
    make_world,
    poison,
    reference,
    reload,
    rows_of,
)
from tests.kernels.sync import no_synchronization
from tests.kernels.workloads import MIXES, routing

pytestmark = pytest.mark.gpu

KERNEL_BACKENDS = ("triton", "csgmv")
RANKS = (1, 2, 4, 8, 12, 16, 24, 32, 50, 64, 128, 512)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32, 128, 512, 4096])
@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_every_mix(name: str, num_rows: int):
    world = make_world(name, (8, 16, 5, 64, 33, 16, 1, 24), torch.bfloat16, LARGE)
    seq_len = 1 if num_rows <= 128 else num_rows // 12
    for i, mix in enumerate(MIXES):
        for base in (False, True):
            steps = routing(mix, num_rows, 8, base, seq_len)
            info = world.backend.prepare_lora_batch(steps)
            check_view(info, steps, num_rows)
            check(world, world.groups[i % len(world.groups)], steps, info, num_rows)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_every_dtype_and_group(name: str):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        world = make_world(name, (16, 12), dtype, LARGE)
        steps = RequestRouting((1, 30, 1, 200, 1), (0, 1, -1, 0, 1))
        info = world.backend.prepare_lora_batch(steps)
        for group in world.groups:
            check(world, group, steps, info, 233)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_w22_every_rank_at_width_3424(name: str):
    for rank in RANKS:
        world = make_world(name, (rank,), torch.bfloat16, ((3424, (3424,)),))
        for num_rows in (1, 70):
            steps = RequestRouting((num_rows,), (0,))
            check(world, world.groups[0], steps, world.backend.prepare_lora_batch(steps), num_rows)


class Captured:
    """One group's LoRA captured at a padded size, with a batch of one adapter."""

    def __init__(self, world: World, group: int, size: int) -> None:
        self.world, self.group, self.size = world, world.groups[group], size
        world.backend.init_cuda_graph_batch_info(size, size)
        self.x, self.y, _ = inputs(world, self.group, size)
        self.base = self.y.clone()
        steps = RequestRouting((1,), (0,))
        info = world.backend.prepare_lora_batch(steps, size)
        world.backend.add_lora(self.y, self.x, self.group.sites, info)  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            world.backend.add_lora(self.y, self.x, self.group.sites, info)

    def replay(self, steps: RequestRouting) -> None:
        """Equal to the reference, and to the same kernels without a graph bit for bit."""
        info = self.world.backend.prepare_lora_batch(steps, self.size)
        self.y.copy_(self.base)
        self.graph.replay()
        assert_close(
            self.y, reference(self.world, self.group, self.base, self.x, rows_of(steps, self.size)), self.world.dtype
        )
        eager = self.base.clone()
        self.world.backend.add_lora(eager, self.x, self.group.sites, info)
        assert torch.equal(eager, self.y)


@pytest.mark.parametrize("size", [4, 32, 256])
@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_a_graph_captured_with_one_adapter_replays_with_any(name: str, size: int):
    world = make_world(name, (8, 16, 5, 64, 33, 16, 1, 128), torch.bfloat16, LARGE)
    captured = Captured(world, 0, size)
    for num_adapters in (1, 2, 4, 8, 1):
        for i, mix in enumerate(MIXES):
            captured.replay(routing(mix, max(1, size - i), num_adapters, i % 2 == 0, seed=num_adapters))
    captured.replay(RequestRouting((size // 2, 1), (7, 3)))
    captured.replay(RequestRouting((1,), (-1,)))


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_l16_a_hundred_reloads_in_place(name: str):
    world = make_world(name, (16, 8), torch.bfloat16, LARGE, room=20)
    captured = Captured(world, 0, 8)
    for i in range(100):
        captured.replay(RequestRouting((1,) * 5, (0, 1, -1, 1, 0)))
        if i % 10 == 0:
            reload(world, slot=1, rank=(3, 40, 16, 128, 1)[i // 10 % 5], seed=i)
        else:
            adapter = world.adapters[1]
            world.arena.release(1)
            world.arena.allocate(adapter)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_no_step_synchronises_and_no_copy_in_flight_is_overwritten(name: str):
    world = make_world(name, (16, 8, 4), torch.bfloat16, LARGE)
    backend, group = world.backend, world.groups[0]
    backend.init_cuda_graph_batch_info(64, 64)
    x, y, _ = inputs(world, group, 64)
    steps = [routing("uniform", 64, 3, True, seed=i) for i in range(40)]
    backend.add_lora(y, x, group.sites, backend.prepare_lora_batch(steps[0], 64))
    backend.add_lora(y, x, group.sites, backend.prepare_lora_batch(steps[0]))
    seen = []
    with no_synchronization():
        torch.cuda._sleep(2_000_000_000)  # about a second: all steps are prepared while the first copy still waits
        start = torch.cuda.Event()
        start.record()
        for step in steps:
            fixed = backend.prepare_lora_batch(step, 64)
            seen.append(fixed.token_slots.clone())
            backend.add_lora(y, x, group.sites, fixed)
            free = backend.prepare_lora_batch(step)
            seen.append(free.token_slots)
            backend.add_lora(y, x, group.sites, free)
        in_flight = not start.query()
    assert in_flight
    for i, token_slots in enumerate(seen):
        assert token_slots.tolist() == rows_of(steps[i // 2])


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
@pytest.mark.parametrize("num_rows", [6, 300])
def test_a_request_does_not_depend_on_its_neighbours(name: str, num_rows: int):
    """Bit for bit, whatever the others' adapters and ranks are."""
    world = make_world(name, (16, 8, 128), torch.bfloat16, LARGE)
    group = world.groups[0]
    x, y, _ = inputs(world, group, num_rows)
    lengths = (num_rows // 3,) * 3
    results = []
    for slots in ((0, 1, 2), (0, 0, 0), (0, -1, -1), (0, 2, 1)):
        out = y.clone()
        info = world.backend.prepare_lora_batch(RequestRouting(lengths, slots))
        world.backend.add_lora(out, x, group.sites, info)
        results.append(out[: lengths[0]])
    assert all(torch.equal(results[0], other) for other in results[1:])
    alone = y[: lengths[0]].clone()
    info = world.backend.prepare_lora_batch(RequestRouting(lengths[:1], (0,)))
    world.backend.add_lora(alone, x[: lengths[0]], group.sites, replace(info, max_rank=128))
    assert torch.equal(alone, results[0])


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
@pytest.mark.parametrize("num_rows", [6, 300])
def test_h_may_be_more_than_float16_holds(name: str, num_rows: int):
    world = make_world(name, (40,), torch.float16, LARGE)
    group, adapter = world.groups[0], world.adapters[0]
    for site, weights in adapter.sites.items():
        adapter.sites[site] = replace(weights, b=weights.b * 2.0**-10)
    world.arena.release(0)
    assert world.arena.allocate(adapter) == 0
    x, y, _ = inputs(world, group, num_rows)
    x.mul_(2.0**14).clamp_(-32000, 32000)[0].mul_(2.0)
    largest = (x.float() @ adapter.sites[0].a[0].float().cuda().T).abs().max()
    assert largest > 65504
    expected = reference(world, group, y, x, [0] * num_rows)
    info = world.backend.prepare_lora_batch(RequestRouting((num_rows,), (0,)))
    world.backend.add_lora(y, x, group.sites, info)
    assert_close(y, expected, torch.float16)
