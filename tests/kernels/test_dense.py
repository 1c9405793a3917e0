"""One conformance suite for all dense backends: small in Triton's interpreter, full on a GPU."""

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from lorry.errors import ConfigError
from lorry.kernels.dense import INTERPRETED, choose_config
from lorry.lora.backends.base import make_dense_backend
from lorry.lora.backends.csgmv import chunk_len
from lorry.lora.batch import PackedRouting, RequestRouting
from tests.kernels.dense_world import (
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
from tests.kernels.workloads import MIXES, Mix, routing

pytestmark = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="Triton was imported before TRITON_INTERPRET=1")
BACKENDS = ("torch", "triton", "csgmv")
KERNEL_BACKENDS = ("triton", "csgmv")
RANKS = (1, 2, 4, 8, 12, 16, 24, 32, 50, 64, 128)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize("base", [False, True], ids=["adapters", "with_base"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decode(name: str, mix: Mix, base: bool):
    world = make_world(name, (3, 16, 20), torch.float32)
    steps = routing(mix, 7, 3, base)
    info = world.backend.prepare_lora_batch(steps)
    check_view(info, steps, 7)
    check(world, world.groups[0 if base else 1], steps, info, 7)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("group", [0, 1, 2], ids=["qkv", "gate_up", "odd_widths"])
def test_prefill_of_unequal_lengths_with_decodes(name: str, group: int):
    world = make_world(name, (3, 20, 1), torch.float32)
    steps = RequestRouting((19, 1, 1, 24, 1), (2, -1, 0, 1, 2))
    info = world.backend.prepare_lora_batch(steps)
    check_view(info, steps, 46)
    check(world, world.groups[group], steps, info, 46)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_half_precision(name: str, dtype: torch.dtype):
    world = make_world(name, (4, 17), dtype)
    steps = RequestRouting((3, 1, 2), (0, -1, 1))
    check(world, world.groups[1], steps, world.backend.prepare_lora_batch(steps), 6)


@pytest.mark.parametrize("name", BACKENDS)
def test_w12_exactly_as_many_adapters_as_slots_and_base_rows(name: str):
    world = make_world(name, (4, 8, 2, 6), torch.float32)
    steps = RequestRouting((1,) * 7, (3, -1, 0, 2, -1, 1, 3))
    if name != "torch":
        world.backend.init_cuda_graph_batch_info(8, 8)
        check(world, world.groups[1], steps, world.backend.prepare_lora_batch(steps, 7), 7)
    check(world, world.groups[1], steps, world.backend.prepare_lora_batch(steps), 7)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_w14_padding_rows_are_base_rows_whatever_ran_before(name: str):
    world = make_world(name, (4, 8), torch.float32)
    world.backend.init_cuda_graph_batch_info(8, 8)
    before = RequestRouting((1,) * 8, (0, 1, 0, 1, 0, 1, 0, 1))
    first = world.backend.prepare_lora_batch(before, 8)
    pointers = [t.data_ptr() for t in (first.seg_indptr, first.weight_indices, first.token_slots)]
    check(world, world.groups[1], before, first, 8)
    for slots in ((1,), (0, -1, 1), (-1, -1)):
        steps = RequestRouting((1,) * len(slots), slots)
        info = world.backend.prepare_lora_batch(steps, 8)
        check_view(info, steps, 8)
        assert info.requests[0].tolist() == list(range(9))
        assert [t.data_ptr() for t in (info.seg_indptr, info.weight_indices, info.token_slots)] == pointers
        assert info.num_segments == first.num_segments
        check(world, world.groups[1], steps, info, 8)
    check(
        world,
        world.groups[1],
        RequestRouting((2, 3), (1, 0)),
        world.backend.prepare_lora_batch(RequestRouting((2, 3), (1, 0)), 8),
        8,
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_may_be_padded_without_fixed_buffers(name: str):
    world = make_world(name, (4, 8), torch.float32)
    steps = RequestRouting((2, 1), (1, -1))
    info = world.backend.prepare_lora_batch(steps, 5)
    assert not info.fixed
    check_view(info, steps, 5)
    check(world, world.groups[1], steps, info, 5)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_w22_every_rank_at_odd_widths_and_one_row(name: str, rank: int):
    world = make_world(name, (rank,), torch.float32)
    steps = RequestRouting((1,), (0,))
    check(world, world.groups[2], steps, world.backend.prepare_lora_batch(steps), 1)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_p15_a_rank_below_the_kernels_smallest_tile_costs_no_more_programs(name: str):
    world = make_world(name, (1, 2), torch.float32)
    steps = RequestRouting((2, 2), (0, 1))
    info = world.backend.prepare_lora_batch(steps)
    assert choose_config(info.max_seg_len, 96, info.max_rank) == choose_config(info.max_seg_len, 96, 16)
    check(world, world.groups[0], steps, info, 4)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_l16_reload_in_place_between_steps_of_one_size(name: str):
    world = make_world(name, (4, 8), torch.float32)
    world.backend.init_cuda_graph_batch_info(4, 4)
    steps = RequestRouting((1, 1, 1), (0, 1, 0))
    for i in range(3):
        info = world.backend.prepare_lora_batch(steps, 4)
        check(world, world.groups[1], steps, info, 4)
        reload(world, slot=1, rank=(24, 1, 5)[i], seed=50 + i)


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_a_request_does_not_depend_on_its_neighbours(name: str):
    world = make_world(name, (5, 16, 33), torch.float32)
    group = world.groups[0]
    x, y, _ = inputs(world, group, 6)
    results = []
    for slots in ((1, 0, 2, -1, 0, 1), (1, 1, 1, 1, 1, 1), (1, -1, -1, -1, -1, -1)):
        out = y.clone()
        info = world.backend.prepare_lora_batch(RequestRouting((1,) * 6, slots))
        world.backend.add_lora(out, x, group.sites, info)
        results.append(out[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_may_be_wider_than_the_weights(name: str):
    """Some routers compute their logits in float32."""
    world = make_world(name, (4,), torch.bfloat16)
    x, y, _ = inputs(world, world.groups[2], 3, y_dtype=torch.float32)
    before = y.clone()
    world.backend.add_lora(
        y, x.float(), world.groups[2].sites, world.backend.prepare_lora_batch(RequestRouting((3,), (0,)))
    )
    assert_close(y, reference(world, world.groups[2], before, x, [0, 0, 0]), torch.float32)


def test_ranks_of_a_slot_are_seen_when_it_is_reused():
    world = make_world("csgmv", (4, 8), torch.float32)
    steps = RequestRouting((1,), (1,))
    assert world.backend.prepare_lora_batch(steps).max_rank == 8
    reload(world, slot=1, rank=70, seed=9)
    assert world.backend.prepare_lora_batch(steps).max_rank == 70
    check(world, world.groups[0], steps, world.backend.prepare_lora_batch(steps), 1)


def test_chunks_hold_each_row_with_an_adapter_once():
    for num_tokens, seq_len in ((1, 1), (7, 1), (300, 9), (1500, 200), (5000, 700)):
        for mix in MIXES:
            steps = routing(mix, num_tokens, 6, True, seq_len)
            world = make_world("csgmv", (1,), torch.float32, ((16, (16,)),), num_slots=6)
            cut = world.backend._cut(PackedRouting.of(steps))
            assert cut.max_seg_len == min(chunk_len(num_tokens), num_tokens)
            bounds = cut.seg_indptr.tolist()
            assert all(0 < b - a <= cut.max_seg_len for a, b in itertools.pairwise(bounds))
            expected = rows_of(steps)
            permutation = np.zeros(1, dtype=np.int32) if cut.permutation is None else cut.permutation
            assert len(permutation) == num_tokens
            seen = []
            for slot, a, b in zip(cut.weight_indices, bounds, bounds[1:], strict=False):
                assert {expected[row] for row in permutation[a:b]} == {slot}
                seen += permutation[a:b].tolist()
            assert sorted(seen) == [row for row, slot in enumerate(expected) if slot >= 0]
            assert len(cut.weight_indices) <= world.backend._capacity(len(steps.slots), num_tokens)


def test_the_kernels_load_nothing_of_the_engine():
    code = """if True:
        import sys
        import lorry.kernels.dense, lorry.kernels.dense_fused
        parts = {name.split(".")[1] for name in sys.modules if name.startswith("lorry.")}
        assert parts.isdisjoint({"engine", "lora", "server", "models", "kv", "attention"}), parts
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_that_cannot_run_are_errors(monkeypatch: pytest.MonkeyPatch):
    world = make_world("torch", (1,), torch.float32)
    cpu = torch.device("cpu")
    assert make_dense_backend("auto", world.arena, cpu).name == "torch"
    with pytest.raises(ConfigError, match="cannot be captured.*csgmv or triton"):
        world.backend.init_cuda_graph_batch_info(4, 4)
    with pytest.raises(ConfigError, match="'cutlass' is unknown; there are: auto, torch, triton, csgmv"):
        make_dense_backend("cutlass", world.arena, cpu)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in KERNEL_BACKENDS:
        with pytest.raises(ConfigError, match=f"'{name}' cannot run: its kernels need a CUDA device, not cpu"):
            make_dense_backend(name, world.arena, cpu)
