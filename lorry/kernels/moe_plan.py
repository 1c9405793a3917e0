"""Where each pair finds its LoRA weights: the tables of all adapters, looked up once per layer and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 512


@dataclass(frozen=True)
class LoRATables:
    """Where the adapters' weights are; see `lora.arena.Arena`. Rank rows: A [E, r, in], B [E, r, out], contiguous.

    `data` flat in the dtype of the activations; `a_offset`, `b_offset` int64 (elements, multiples of 16), `rank`
    int32 (0: untouched), `scale` float32, all [num_sites, num_slots]. `shared` int32 of the same shape, or None for
    all zero: bit 0, one A [r, in] serves all experts; bit 1, one B [r, out] does (shared-outer factors).
    """

    data: Tensor
    a_offset: Tensor
    b_offset: Tensor
    rank: Tensor
    scale: Tensor
    shared: Tensor | None = None

    @property
    def num_slots(self) -> int:
        return self.rank.shape[1]


@dataclass(frozen=True)
class LoRASites:
    """The adapters of one step at one layer: `first` are the sites of gate and up (or up alone), `down` its site.

    `token_slots` [T] int32 (-1: base). `max_rank` is at least every rank in `tables` at these sites; it sizes
    workspaces and loops, so a graph is captured with the largest rank that it may ever meet.
    """

    tables: LoRATables
    token_slots: Tensor
    first: tuple[int, ...]
    down: int
    max_rank: int

    @property
    def sites(self) -> tuple[int, ...]:
        return (*self.first, self.down)


@dataclass(frozen=True)
class LoRAPlan:
    """By site and pair [num_sites, P]: `rank` (0: no LoRA), `a`, `b` where the first rank row of its expert's A and B
    is in `data`, in units of `unit` elements, `scale`. Pairs of rank 0 have no valid a, b, scale."""

    data: Tensor
    rank: Tensor
    a: Tensor
    b: Tensor
    scale: Tensor
    unit: int

    def at(self, first: int, last: int) -> LoRAPlan:
        """Of sites first .. last - 1 alone."""
        return LoRAPlan(
            self.data,
            self.rank[first:last],
            self.a[first:last],
            self.b[first:last],
            self.scale[first:last],
            self.unit,
        )


@triton.jit
def _plan_site(
    at, site, expert, slot, on, inside, tables, plan, IN: tl.constexpr, OUT: tl.constexpr, HAS_SHARED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    column = site * tables[5] + slot
    rank = tl.load(tables[2] + column, mask=on, other=0)
    a = tl.load(tables[0] + column, mask=on, other=0)
    b = tl.load(tables[1] + column, mask=on, other=0)
    scale = tl.load(tables[3] + column, mask=on, other=0.0)
    a_row = expert.to(tl.int64) * rank
    b_row = a_row
    if HAS_SHARED:
        shared = tl.load(tables[4] + column, mask=on, other=0)
        a_row = tl.where(shared & 1 != 0, 0, a_row)
        b_row = tl.where(shared & 2 != 0, 0, b_row)
    tl.store(plan[0] + at, rank, mask=inside)
    tl.store(plan[1] + at, (a + a_row * IN) // UNIT, mask=inside)
    tl.store(plan[2] + at, (b + b_row * OUT) // UNIT, mask=inside)
    tl.store(plan[3] + at, scale, mask=inside)


@triton.jit
def plan_pairs(
    pair, expert, slot, live, tables, plan, sites, num_pairs, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    SITES: tl.constexpr, ENDS_WITH_DOWN: tl.constexpr, HAS_SHARED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Fill the plan of these pairs. Sites read HIDDEN and write INTER elements, down the other way round."""
    inside = pair < num_pairs
    on = live & (slot >= 0)
    for i in tl.static_range(SITES):
        if ENDS_WITH_DOWN and i == SITES - 1:
            _plan_site(
                i * num_pairs + pair,
                sites[i],
                expert,
                slot,
                on,
                inside,
                tables,
                plan,
                INTER,
                HIDDEN,
                HAS_SHARED,
                UNIT,
            )
        else:
            _plan_site(
                i * num_pairs + pair,
                sites[i],
                expert,
                slot,
                on,
                inside,
                tables,
                plan,
                HIDDEN,
                INTER,
                HAS_SHARED,
                UNIT,
            )


@triton.jit(do_not_specialize=["num_slots", "site_0", "site_1", "site_2", "num_pairs", "num_experts"])
def _plan_kernel(
    experts_ptr, token_slots_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, scale_ptr, shared_ptr, num_slots,
    plan_rank_ptr, plan_a_ptr, plan_b_ptr, plan_scale_ptr, site_0, site_1, site_2, num_pairs, num_experts,
    NUM_CHOICES: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SITES: tl.constexpr,
    ENDS_WITH_DOWN: tl.constexpr, HAS_SHARED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    expert = tl.load(experts_ptr + pair, mask=inside, other=-1).to(tl.int32)
    slot = tl.load(token_slots_ptr + pair // NUM_CHOICES, mask=inside, other=-1)
    tables = (a_offset_ptr, b_offset_ptr, rank_ptr, scale_ptr, shared_ptr, num_slots)
    plan = (plan_rank_ptr, plan_a_ptr, plan_b_ptr, plan_scale_ptr)
    live = (expert >= 0) & (expert < num_experts)
    plan_pairs(pair, expert, slot, live, tables, plan, (site_0, site_1, site_2), num_pairs, HIDDEN, INTER, SITES,
               ENDS_WITH_DOWN, HAS_SHARED, UNIT)  # fmt: skip


def table_arguments(tables: LoRATables) -> tuple[Tensor | int, ...]:
    """The tables as kernels take them."""
    shared = tables.rank if tables.shared is None else tables.shared
    return tables.a_offset, tables.b_offset, tables.rank, tables.scale, shared, tables.num_slots


def plan_arguments(plan: LoRAPlan) -> tuple[Tensor, ...]:
    return plan.rank, plan.a, plan.b, plan.scale


def site_arguments(sites: tuple[int, ...]) -> tuple[int, int, int]:
    """Three site numbers, the last repeated where there are fewer."""
    return sites[0], sites[min(1, len(sites) - 1)], sites[-1]


def empty_plan(tables: LoRATables, num_sites: int, num_pairs: int, hidden: int, inter: int) -> LoRAPlan:
    """An unfilled plan; `unit` is 16 where every row starts at a multiple of 16 elements, for wide loads."""
    device = tables.data.device
    rank = torch.empty(num_sites, num_pairs, dtype=torch.int32, device=device)
    a = torch.empty(num_sites, num_pairs, dtype=torch.int64, device=device)
    b = torch.empty(num_sites, num_pairs, dtype=torch.int64, device=device)
    scale = torch.empty(num_sites, num_pairs, dtype=torch.float32, device=device)
    unit = 16 if hidden % 16 == 0 and inter % 16 == 0 else 1
    return LoRAPlan(tables.data, rank, a, b, scale, unit)


def plan_lora(
    top_k_index: Tensor,
    token_slots: Tensor,
    tables: LoRATables,
    sites: tuple[int, ...],
    num_experts: int,
    hidden: int,
    inter: int,
    ends_with_down: bool,
) -> LoRAPlan:
    """plan[s, p] = tables[sites[s], token_slots[p // K]], with the offset of expert top_k_index[p]; see `LoRAPlan`.

    top_k_index [T, K] (outside 0..num_experts-1: rank 0), token_slots [T] int32 (-1: rank 0). Sites read `hidden`
    and write `inter` elements, with `ends_with_down` the last one the other way round.
    New tensors, every element written; safe under graph capture.
    """
    num_pairs = top_k_index.numel()
    plan = empty_plan(tables, len(sites), num_pairs, hidden, inter)
    _plan_kernel[(triton.cdiv(num_pairs, 256),)](
        top_k_index,
        token_slots,
        *table_arguments(tables),
        *plan_arguments(plan),
        *site_arguments(sites),
        num_pairs,
        num_experts,
        NUM_CHOICES=top_k_index.shape[1],
        HIDDEN=hidden,
        INTER=inter,
        SITES=len(sites),
        ENDS_WITH_DOWN=ends_with_down,
        HAS_SHARED=tables.shared is not None,
        UNIT=plan.unit,
        BLOCK=256,
        num_warps=4,
    )
    return plan
