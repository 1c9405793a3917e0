"""The experts: what once went wrong elsewhere, by the ids of our case list, and the ops without the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.test_moe import (  # isort: skip  (it chooses the interpreter before Triton is imported)
    BACKENDS,
    CUDA,
    DEVICE,
    INTERPRETED,
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

from lorry.errors import ConfigError
from lorry.kernels import moe
from lorry.kernels.moe import LoRASites, fused_experts
from lorry.kernels.moe_shrink import merged_experts_fused_moe_lora_add
from lorry.kernels.moe_weights import Activation, ExpertsWeights, PrefillPlan, PrefillTile, Projection, Tile
from lorry.kernels.tables import LoRATables
from lorry.lora.batch import RequestRouting
from lorry.lora.experts.activation import find_activation
from lorry.lora.experts.base import choose_experts_backend, make_experts_backend
from lorry.lora.experts.triton import _describe
from lorry.types import BASE_SLOT

__all__ = ["_poison"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="Triton was imported before TRITON_INTERPRET=1"),
]


def tables_of(world: World, shared: Tensor | None = None) -> LoRATables:
    arena = world.arena
    return LoRATables(arena.data, arena.a_offset, arena.b_offset, arena.rank, arena.scale, shared)


def weights_of(world: World) -> ExpertsWeights:
    """Of the plain layout."""
    module = world.layer.module
    first = Projection(module.gate_up_proj, "concatenated")
    return ExpertsWeights(first, Projection(module.down_proj), Activation("glu"))


@pytest.mark.parametrize("name", BACKENDS)
def test_w02_small_rank_in_the_slot_of_a_large_one(name: str):
    world = make_world(Shape(), [64, 3])
    info = info_of(RequestRouting((1, 1), (0, 1)))
    check(world, name, 2, info)
    world.arena.release(0)
    assert world.arena.allocate(make_adapter(list(world.arena.sites), {0: 5, 1: 5, 2: 5}, 9, torch.float32)) == 0
    check(world, name, 2, info)


@pytest.mark.parametrize("name", BACKENDS)
def test_w12_exactly_as_many_adapters_as_slots_and_base_rows(name: str):
    world = make_world(Shape(), [4, 8, 2, 6])
    check(world, name, 6, info_of(RequestRouting((1,) * 6, (3, -1, 0, 2, 1, -1))))


@pytest.mark.parametrize("name", BACKENDS)
def test_w14_padding_rows_are_of_no_adapter(name: str):
    """Rows behind the batch hold anything: they are -1, and the batch's own rows do not change with them."""
    world = make_world(Shape(), [4, 8])
    rows = world.rows(6)
    rows[0][4:] = float("nan")
    backend = make_experts_backend(True, world.arena, DEVICE, name)
    info = info_of(RequestRouting((3, 1), (1, 0)), num_padding=2, fixed=True)
    y = backend.forward(world.layer, *rows, info)[:4]
    own = (rows[0][:4], rows[1][:4], rows[2][:4])
    assert_close(y, exact(world, own, info_of(RequestRouting((3, 1), (1, 0)))), torch.float32)


@pytest.mark.parametrize("name", BACKENDS)
def test_m13_ranks_differ_by_site_and_halves_are_missing(name: str):
    world = make_world(Shape(), [{0: 3, 1: 20, 2: 7}, {0: 4}, {1: 5}, {2: 6}])
    check(world, name, 5, info_of(RequestRouting((1,) * 5, (0, 1, 2, 3, -1))))


@pytest.mark.parametrize("name", BACKENDS)
def test_one_a_for_gate_and_up_is_the_same_as_two_copies(name: str):
    results = []
    for copied in (False, True):
        world = make_world(Shape(), [6], shared_a=True)
        if copied:
            adapter = make_adapter(list(world.arena.sites), {0: 6, 1: 6, 2: 6}, 0, torch.float32, shared_a=True)
            up = replace(adapter.sites[1], a=adapter.sites[1].a.clone())
            world.arena.release(0)
            world.arena.allocate(replace(adapter, sites={**adapter.sites, 1: up}))
        same = bool(world.arena.a_offset[0, 0] == world.arena.a_offset[1, 0])
        assert same is not copied
        results.append(check(world, name, 3, info_of(RequestRouting((3,), (0,)))))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", BACKENDS)
def test_experts_that_live_elsewhere_add_nothing(name: str):
    world = make_world(Shape(), [4])
    rows = world.rows(4)
    rows[1][0, 0], rows[1][1, 1], rows[1][2, :] = -1, 4, -1
    info = info_of(RequestRouting((4,), (0,)))
    for step in (info, None):
        y = make_experts_backend(True, world.arena, DEVICE, name).forward(world.layer, *rows, step)
        assert_close(y, exact(world, rows, step), torch.float32)


def check_shared(world: World, shared: Tensor, rows: tuple[Tensor, Tensor, Tensor], slots: Tensor) -> None:
    """The fused op with factors of expert 0 for all, against the same factors copied to every expert."""
    lora = LoRASites(tables_of(world, shared), slots, (0, 1), 2, 8)
    tile = Tile(16, 32, 32, 4, 2, shrink_by_pair=True)
    results = [
        fused_experts(*rows, weights_of(world), lora, (t, t)) for t in (tile, replace(tile, shrink_by_pair=False))
    ]
    for site in range(3):
        resident = world.arena.get(site, 0)
        assert resident is not None
        bits = int(shared[site, 0])
        if bits & 1:
            resident.a[1:] = resident.a[0]
        if bits & 2:
            resident.b[1:] = resident.b[0]
    expected = exact(world, rows, info_of(RequestRouting((4, 1), (0, -1))))
    for y in results:
        assert_close(y, expected, torch.float32)


@pytest.mark.parametrize("bits", [(1, 1, 2), (2, 2, 1), (3, 0, 3)])
def test_m18_factors_shared_by_all_experts(bits: tuple[int, ...]):
    world = make_world(Shape(), [8])
    shared = torch.tensor(bits, dtype=torch.int32, device=DEVICE)[:, None]
    slots = torch.tensor([0, 0, 0, 0, -1], dtype=torch.int32, device=DEVICE)
    check_shared(world, shared, world.rows(5), slots)


@pytest.mark.parametrize("name", BACKENDS)
def test_m20_base_rows_have_the_bits_of_a_base_only_step(name: str):
    """Rows of the base, and of adapters that do not touch the layer, next to rows of adapters."""
    world = make_world(Shape(), [4, 16, {}])
    rows = world.rows(6)
    backend = make_experts_backend(True, world.arena, DEVICE, name)
    mixed = backend.forward(world.layer, *rows, info_of(RequestRouting((1,) * 6, (0, -1, 1, 2, -1, 0))))
    base = backend.forward(world.layer, *rows, None)
    assert torch.equal(mixed[[1, 3, 4]], base[[1, 3, 4]])
    assert not torch.equal(mixed[0], base[0])


@pytest.mark.parametrize("name", BACKENDS)
def test_p14_a_layer_that_no_adapter_touches_launches_no_lora(name: str, monkeypatch: pytest.MonkeyPatch):
    world = make_world(Shape(), [{}, 4])
    backend = make_experts_backend(True, world.arena, DEVICE, name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a LoRA kernel was launched")

    with monkeypatch.context() as patch:
        for op in ("start_experts", "plan_lora", "shrink_groups", "shrink_pairs"):
            patch.setattr(moe, op, refuse)
        patch.setattr("lorry.lora.experts.triton.merged_experts_fused_moe_lora_add", refuse)
        rows = world.rows(3)
        info = info_of(RequestRouting((2, 1), (0, -1)))
        y = backend.forward(world.layer, *rows, info)
        with pytest.raises(AssertionError, match="was launched"):
            backend.forward(world.layer, *rows, info_of(RequestRouting((3,), (1,))))
    assert torch.equal(y, backend.forward(world.layer, *rows, None))


@pytest.mark.parametrize("group_slots", [1, 2, 4])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("layout", ["plain", "gpt_oss"])
def test_tiles(layout: str, swap: bool, group_slots: int):
    """Every way in which a tile may go about it, with more slots in a tile than are expanded at once."""
    world = make_world(Shape(32, 32, experts=2, layout=layout), [3, 18, 5])
    rows = world.rows(5)
    info = info_of(RequestRouting((1,) * 5, (0, -1, 1, 2, 1)))
    lora = LoRASites(tables_of(world), info.token_slots, (0, 1), 2, 18)
    tile = Tile(16, 16, 32, 4, 2, swap=swap, ahead=swap, group_slots=group_slots, shrink_by_pair=group_slots < 4)
    y = fused_experts(*rows, _describe(world.layer).weights, lora, (tile, tile))
    assert_close(y, exact(world, rows, info), torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_the_add_serves_any_implementation(interleaved: bool, routed: bool):
    world = make_world(Shape(), [{0: 3, 1: 17}, {1: 2}])
    hidden, index, weights = world.rows(4)
    index[3, 1] = -1
    slots = torch.tensor([0, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    y = torch.randn(8, 40, device=DEVICE)
    expected = y.clone()
    for pair in range(8):
        row, expert = pair // 2, int(index[pair // 2, pair % 2])
        for half, site in enumerate((0, 1)):
            resident = None if slots[row] == BASE_SLOT else world.arena.get(site, int(slots[row]))
            if resident is None or expert < 0:
                continue
            delta = resident.scale * (hidden[row] @ resident.a[expert].T) @ resident.b[expert]
            part = expected[pair, half::2] if interleaved else expected[pair, half * 20 : half * 20 + 20]
            part += delta * (weights[row, pair % 2] if routed else 1)
    merged_experts_fused_moe_lora_add(
        y, hidden, index, slots, tables_of(world), (0, 1), 4, 17, interleaved=interleaved,
        top_k_weights=weights if routed else None,
    )  # fmt: skip
    assert_close(y, expected, torch.float32)
    assert torch.equal(y[4:6], expected[4:6])


def small_prefill(persistent: int, ahead: bool) -> PrefillPlan:
    """The plan for thousands of rows, with tiles for a few."""
    tile = PrefillTile(16 if not CUDA else 64, 32 if not CUDA else 64, 32, 4, 2, persistent, ahead)
    return PrefillPlan(tile, tile, tile, tile, group_m=16, num_programs=3)


@pytest.mark.parametrize("layout", ["plain", "gpt_oss", "ungated_relu2", "transposed"])
@pytest.mark.parametrize("persistent", [0, 1])
def test_prefill_plan(layout: str, persistent: int):
    """Sorted buffer, TMA descriptors, tiles with and without adapters, more rank blocks in a tile than it takes at
    once and more at one site than at the other; B loaded before the main loop and after it."""
    dtype = torch.float16 if CUDA else torch.float32
    world = make_world(Shape(64, 32, layout=layout, dtype=dtype), [3, {0: 40, 1: 18, 2: 70}])
    rows = world.rows(24)
    rows[1][5, 0] = -1
    plan = small_prefill(persistent, persistent == 0)
    info = info_of(RequestRouting((10, 2, 12), (1, -1, 0)))
    sites = (0,) if layout.startswith("ungated") else (0, 1)
    lora = LoRASites(tables_of(world), info.token_slots, sites, sites[-1] + 1, 70)
    weights = _describe(world.layer).weights
    plain = fused_experts(*rows, weights, None, prefill=plan)
    mixed = fused_experts(*rows, weights, lora, prefill=plan)
    assert_close(plain, exact(world, rows, None), dtype)
    assert_close(mixed, exact(world, rows, info), dtype)
    assert torch.equal(mixed[10:12], plain[10:12])


@pytest.mark.parametrize("how", [*BACKENDS, "prefill"])
def test_float16_holds_where_x_a_leaves_its_range(how: str):
    """|x A| reaches 200,000 and x A B is small: h must not be rounded to float16 on its way."""
    world = make_world(Shape(64, 32, dtype=torch.float16), [4, 17])
    for site in range(3):
        for slot in range(2):
            resident = world.arena.get(site, slot)
            assert resident is not None
            resident.a.mul_(2**16)
            resident.b.mul_(2**-16)
    info = info_of(RequestRouting((3, 1, 2), (0, -1, 1)))
    rows = world.rows(6)
    site = world.arena.get(0, 0)
    assert site is not None
    assert (rows[0][:3].float() @ site.a[0].float().T).abs().max() > torch.finfo(torch.float16).max
    if how != "prefill":
        check(world, how, 6, info)
        return
    lora = LoRASites(tables_of(world), info.token_slots, (0, 1), 2, 17)
    y = fused_experts(*rows, _describe(world.layer).weights, lora, prefill=small_prefill(0, True))
    assert_close(y, exact(world, rows, info), torch.float16)


def test_activations_are_found_by_trying():
    kinds = {}
    for layout in ("plain", "gpt_oss", "transposed", "ungated_silu", "ungated_relu2", "gelu"):
        found = find_activation(make_world(Shape(layout=layout), []).layer)
        kinds[layout] = None if found is None else found.kind
    assert kinds == {
        "plain": "glu", "gpt_oss": "glu_clamped", "transposed": "glu", "ungated_silu": "silu",
        "ungated_relu2": "relu2", "gelu": None,
    }  # fmt: skip


def test_choice_of_the_backend(monkeypatch: pytest.MonkeyPatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_experts_backend(True, cuda) == "fused"
    assert choose_experts_backend(False, cuda) == "merged"
    assert choose_experts_backend(True, cpu) == "virtual"
    assert choose_experts_backend(False, cpu) == "torch"
    with pytest.raises(ConfigError, match="nonsense"):
        make_experts_backend(True, None, cpu, "nonsense")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="cannot run on cpu"):
        make_experts_backend(True, None, cpu, "fused")
