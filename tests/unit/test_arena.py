"""The arena: true ranks, exact bytes, shared matrices, reuse of room."""

import pytest
import torch

from lorry.errors import AdapterCapacity
from lorry.lora.arena import Arena
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site

SITES = (
    Site(0, "l.q_proj", "linear", "l.q_proj", 48, 80),
    Site(1, "l.experts.gate_proj", "experts", "l.experts", 48, 40, 4),
    Site(2, "l.experts.up_proj", "experts", "l.experts", 48, 40, 4),
)


def adapter(ranks: dict[int, int], seed: int = 0, shared_a: bool = False) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    sites: dict[int, SiteWeights] = {}
    for index, rank in ranks.items():
        site = SITES[index]
        a = torch.randn(site.num_experts, rank, site.in_features, generator=generator)
        if shared_a and index == 2:
            a = sites[1].a
        b = torch.randn(site.num_experts, rank, site.out_features, generator=generator)
        sites[index] = SiteWeights(a, b, 0.5 * (index + 1))
    return AdapterWeights(sites, ("q_proj",))


def shared_outer(rank: int, seed: int = 0) -> AdapterWeights:
    """One A for gate and up of all experts, B of their own."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(1, rank, 48, generator=generator)
    sites = {i: SiteWeights(a, torch.randn(4, rank, 40, generator=generator), 2.0) for i in (1, 2)}
    return AdapterWeights(sites, ("experts",))


def arena(num_bytes: int = 2**20, num_slots: int = 4) -> Arena:
    return Arena(SITES, num_bytes, num_slots, torch.float32, torch.device("cpu"))


def assert_holds(arena: Arena, slot: int, weights: AdapterWeights) -> None:
    for index in range(len(SITES)):
        resident = arena.get(index, slot)
        if index not in weights.sites:
            assert resident is None
            assert arena.rank[index, slot] == 0
            continue
        site = weights.sites[index]
        assert resident is not None
        assert torch.equal(resident.a, site.a.expand_as(resident.a))
        assert torch.equal(resident.b, site.b.expand_as(resident.b))
        assert arena.rank[index, slot] == site.rank
        assert arena.scale[index, slot] == site.scale
        a_offset, b_offset = int(arena.a_offset[index, slot]), int(arena.b_offset[index, slot])
        assert torch.equal(arena.data[a_offset : a_offset + site.a.numel()], site.a.flatten())
        assert torch.equal(arena.data[b_offset : b_offset + site.b.numel()], site.b.flatten())


def test_adapters_of_any_rank_side_by_side():
    held = arena()
    adapters = [adapter({0: 1, 1: 3, 2: 3}, 1), adapter({0: 64}, 2), adapter({2: 7}, 3)]
    slots = [held.allocate(weights) for weights in adapters]
    assert len(set(slots)) == 3
    for slot, weights in zip(slots, adapters, strict=True):
        assert_holds(held, slot, weights)


def test_w02_a_small_rank_after_a_large_one_in_the_same_slot():
    held = arena(num_slots=1)
    held.release(held.allocate(adapter({0: 64, 1: 64, 2: 64}, 1)))
    small = adapter({0: 8, 2: 8}, 2)
    assert_holds(held, held.allocate(small), small)


def test_one_a_for_gate_and_up_is_stored_once():
    held = arena()
    before = held.num_free_bytes
    slot = held.allocate(adapter({1: 4, 2: 4}, shared_a=True))
    assert held.a_offset[1, slot] == held.a_offset[2, slot]
    elements = 4 * 4 * (48 + 40 + 40)
    assert elements * 4 <= before - held.num_free_bytes <= 1.05 * elements * 4


def test_bytes_come_back_whatever_the_order():
    held = arena()
    whole = held.num_free_bytes
    slots = [held.allocate(adapter({0: rank}, rank)) for rank in (1, 9, 30)]
    for slot in (slots[1], slots[0], slots[2]):
        held.release(slot)
    assert held.num_free_bytes == whole
    assert held._space._free == [(0, held.data.numel())]


@pytest.mark.parametrize("at_once", [16, 1000, 2**23])
def test_compacting_makes_one_range_and_moves_no_table(at_once: int, monkeypatch: pytest.MonkeyPatch):
    """Small shifts and large ones; what is free is filled with NaN, as a reader of stale offsets would see."""
    monkeypatch.setattr("lorry.lora.arena.MOVED_AT_ONCE", at_once)
    held = arena()
    adapters = [adapter({0: rank, 2: 3}, rank) if rank != 5 else shared_outer(5) for rank in (1, 9, 5, 30)]
    slots = [held.allocate(weights) for weights in adapters]
    tables = (held.data, held.a_offset, held.b_offset, held.rank, held.scale, held.shared)
    addresses = [table.data_ptr() for table in tables]
    held.release(slots[0])
    held.release(slots[2])
    held.compact()
    used = held.data.numel() - held._space.num_free
    held.data[used:] = torch.nan
    assert held._space._free == [(used, held.data.numel() - used)]
    for i in (1, 3):
        assert_holds(held, slots[i], adapters[i])
    assert [table.data_ptr() for table in tables] == addresses
    held.compact()
    assert_holds(held, slots[3], adapters[3])


def test_room_in_pieces_is_used():
    """Four adapters fill the arena; two that are no neighbours leave room for one of twice the rank."""
    size = 8 * (48 + 80)
    held = arena(num_bytes=4 * 4 * size)
    slots = [held.allocate(adapter({0: 8}, seed)) for seed in range(4)]
    held.release(slots[0])
    held.release(slots[2])
    large = adapter({0: 16}, 9)
    slot = held.allocate(large)
    assert_holds(held, slot, large)
    assert_holds(held, slots[1], adapter({0: 8}, 1))
    assert_holds(held, slots[3], adapter({0: 8}, 3))
    assert held.num_free_bytes == 0


def test_m18_factors_that_experts_share_are_stored_once():
    held = arena()
    before = held.num_free_bytes
    weights = shared_outer(8)
    slot = held.allocate(weights)
    assert_holds(held, slot, weights)
    assert held.shared[:, slot].tolist() == [0, 1, 1]
    elements = 8 * 48 + 2 * 4 * 8 * 40
    assert elements * 4 <= before - held.num_free_bytes <= 1.05 * elements * 4
    held.release(slot)
    slot = held.allocate(adapter({1: 2, 2: 2}))
    assert held.shared[:, slot].tolist() == [0, 0, 0]


@pytest.mark.parametrize("ranks", [(1,), (512,), (1, 512, 3, 64)])
def test_bytes_on_the_device_are_those_of_the_adapter(ranks: tuple[int, ...]):
    """At real widths, whatever the ranks of the others."""
    sites = tuple(Site(i, f"l{i}.q", "linear", f"l{i}.q", 2048, 512) for i in range(4))
    held = Arena(sites, 2**25, 8, torch.bfloat16, torch.device("cpu"))
    for rank in ranks:
        before = held.num_free_bytes
        weights = {
            i: SiteWeights(torch.ones(1, rank, 2048).bfloat16(), torch.ones(1, rank, 512).bfloat16(), 1.0)
            for i in range(4)
        }
        made = AdapterWeights(weights, ("q",))
        held.allocate(made)
        assert made.num_bytes <= before - held.num_free_bytes <= 1.05 * made.num_bytes


def test_full_says_what_is_needed_and_changes_nothing():
    held = arena(num_bytes=4096)
    free = held.num_free_bytes
    with pytest.raises(AdapterCapacity, match=r"needs [\d,]+ bytes.*--lora-memory"):
        held.allocate(adapter({0: 64}))
    assert held.num_free_bytes == free
    small = arena(num_slots=1)
    small.allocate(adapter({0: 1}))
    with pytest.raises(AdapterCapacity, match="all 1 adapter slots.*--max-loras-per-batch"):
        small.allocate(adapter({0: 1}))


def test_an_adapter_without_weights_takes_a_slot_and_no_bytes():
    held = arena()
    slot = held.allocate(AdapterWeights({}, ()))
    assert held.num_free_bytes == held.num_bytes
    assert (held.rank[:, slot] == 0).all()
    held.release(slot)
    assert held.num_free_slots == 4
