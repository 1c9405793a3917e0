"""Adapters of many ranks around one backend, and the float32 reference that every dense backend is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lorry.lora.arena import Arena
from lorry.lora.backends.base import DenseBackend, make_dense_backend
from lorry.lora.batch import LoRABatchInfo, RequestRouting
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# y is rounded once, to 8 or 11 bits: by at most 2^-8 or 2^-11 of its value. h is too, and where large terms cancel
# that is up to three times as much of the standard deviation. The norm of all errors is less than the bound of one
# rounding. In bfloat16 the interpreter cuts off where a GPU rounds: twice as much.
_BFLOAT16 = 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7
TOLERANCE = {
    torch.bfloat16: (_BFLOAT16 * 4, _BFLOAT16 * 0.8),
    torch.float16: (2.0**-11 * 4, 2.0**-11 * 0.8),
    torch.float32: (1e-5, 2e-6),
}
"""dtype -> (bound on |error| relative to |exact| + std, bound on the norm of the error relative to that of exact)."""


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on new memory is full of NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass(frozen=True)
class Group:
    """Sibling sites that read the same x."""

    sites: tuple[int, ...]
    in_features: int
    widths: tuple[int, ...]


@dataclass
class World:
    """Sites, adapters by slot, the arena that holds them, and float32 copies of what was put in."""

    groups: tuple[Group, ...]
    arena: Arena
    adapters: dict[int, AdapterWeights]
    dtype: torch.dtype
    backend: DenseBackend


SMALL = ((64, (48, 32, 40)), (48, (40, 40)), (75, (67,)))
LARGE = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (3424, (3424,)), (2048, (107,)))


def make_adapter(
    groups: tuple[Group, ...], dtype: torch.dtype, rank: int, seed: int, skip: int = -1
) -> AdapterWeights:
    """Rank `rank`, half of it (but at least 1) at every second site; site `skip` is not touched."""
    generator = torch.Generator().manual_seed(seed)
    sites: dict[int, SiteWeights] = {}
    for group in groups:
        for site, width in zip(group.sites, group.widths, strict=True):
            r = rank if site % 2 == 0 else max(1, rank // 2)
            a = torch.randn(1, r, group.in_features, generator=generator) * group.in_features**-0.5
            b = torch.randn(1, r, width, generator=generator) * r**-0.5
            if site != skip:
                sites[site] = SiteWeights(a.to(dtype), b.to(dtype), 0.5 + 0.25 * (site % 3))
    return AdapterWeights(sites, ("test",))


def make_world(
    name: str, ranks: tuple[int, ...], dtype: torch.dtype, shapes=SMALL, num_slots: int = 0, room: int = 2
) -> World:
    """An adapter of each rank, in its own slot; the arena has `room` times the bytes they take."""
    groups, sites = [], []
    for in_features, widths in shapes:
        first = len(sites)
        sites += [Site(first + i, f"s{first + i}", "linear", "m", in_features, w) for i, w in enumerate(widths)]
        groups.append(Group(tuple(range(first, len(sites))), in_features, tuple(widths)))
    adapters = [make_adapter(tuple(groups), dtype, r, i, skip=1 if i == 1 else -1) for i, r in enumerate(ranks)]
    num_bytes = room * sum(a.num_bytes + 2**14 for a in adapters) + 2**18
    arena = Arena(sites, num_bytes, num_slots or len(ranks), dtype, DEVICE)
    arena.data.fill_(float("nan"))
    held = {arena.allocate(adapter): adapter for adapter in adapters}
    return World(tuple(groups), arena, held, dtype, make_dense_backend(name, arena, DEVICE))


def reference(world: World, group: Group, y: Tensor, x: Tensor, row_slots: list[int]) -> Tensor:
    """y + LoRA in float32, each row by its own adapter, on the host weights."""
    result = y.float().clone()
    for slot in set(row_slots) - {-1}:
        rows = torch.tensor([i for i, s in enumerate(row_slots) if s == slot], device=y.device)
        column = 0
        for site, width in zip(group.sites, group.widths, strict=True):
            if site in world.adapters[slot].sites:
                weights = world.adapters[slot].sites[site]
                a, b = weights.a[0].float().to(y.device), weights.b[0].float().to(y.device)
                result[rows, column : column + width] += weights.scale * (x[rows].float() @ a.T @ b)
            column += width
    return result


def inputs(world: World, group: Group, num_rows: int, seed: int = 0, y_dtype: torch.dtype | None = None):
    """x and y [rows, .], both with room between their rows; what is between y's rows is NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, group.in_features + 16, generator=generator).to(world.dtype).to(DEVICE)
    y = torch.full((num_rows, sum(group.widths) + 16), float("nan"), dtype=y_dtype or world.dtype)
    y[:, : sum(group.widths)] = torch.randn(num_rows, sum(group.widths), generator=generator)
    y = y.to(DEVICE)
    return x[:, : group.in_features], y[:, : sum(group.widths)], y


def rows_of(steps: RequestRouting, num_rows: int | None = None) -> list[int]:
    slots = [slot for n, slot in zip(steps.seq_lens, steps.slots, strict=True) for _ in range(n)]
    return slots + [-1] * ((num_rows or len(slots)) - len(slots))


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    error = got.float() - expected
    largest = float((error.abs() / (expected.abs() + expected.std())).max())
    norm = float(error.norm() / expected.norm())
    assert largest < TOLERANCE[dtype][0], f"largest {largest:.6f}, norm {norm:.7f}"
    assert norm < TOLERANCE[dtype][1], f"largest {largest:.6f}, norm {norm:.7f}"


def check(
    world: World, group: Group, steps: RequestRouting, info: LoRABatchInfo, num_rows: int, seed: int = 0
) -> None:
    """Rows with adapters equal the float32 reference; rows without, padding and surroundings keep their bits."""
    slots = rows_of(steps, num_rows)
    x, y, whole = inputs(world, group, num_rows, seed)
    base = torch.tensor([slot < 0 for slot in slots], device=DEVICE)
    if world.backend.name != "torch":
        x[base] = float("nan")
        y[base] = float("nan")
    before, whole_before = y.clone(), whole.clone()
    world.backend.add_lora(y, x, group.sites, info)
    assert torch.equal(whole[:, y.shape[1] :].isnan(), whole_before[:, y.shape[1] :].isnan())
    assert torch.equal(y[base].nan_to_num(7.0), before[base].nan_to_num(7.0))
    if not all(slot < 0 for slot in slots):
        expected = reference(world, group, before, x, slots)
        assert_close(y[~base], expected[~base], world.dtype)


def check_view(info: LoRABatchInfo, steps: RequestRouting, num_rows: int) -> None:
    """The request view is that of the batch, whatever the backend's segments are."""
    assert info.token_slots.tolist() == rows_of(steps, num_rows)
    indptr, slots = info.requests
    assert indptr.tolist()[: len(steps.slots) + 1] == steps.indptr()
    assert slots.tolist()[: len(steps.slots)] == list(steps.slots)
    assert set(slots.tolist()[len(steps.slots) :]) <= {-1}
    assert indptr.diff().ge(0).all()
    for tensor in (info.seg_indptr, info.weight_indices, info.token_slots, indptr, slots):
        assert tensor.dtype == torch.int32
    assert len(info.seg_indptr) == info.num_segments + 1 == len(info.weight_indices) + 1
    assert len(indptr) == info.bs + 1 == len(slots) + 1


def reload(world: World, slot: int, rank: int, seed: int) -> None:
    """Other weights, of another rank, in the same slot."""
    world.arena.release(slot)
    adapter = make_adapter(world.groups, world.dtype, rank, seed)
    assert world.arena.allocate(adapter) == slot
    world.adapters[slot] = adapter
