"""Workload of the experts block of a layer, router excluded; run by `bench/kernels.py`.

Layers of weights are used in turn, so that nothing is read from a cache. `base` and `fused` are `fused_experts`;
`plain` is the block by plain products with the activation in torch; `merged` and the peers add LoRA to that one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.peers import EXPERTS_PEERS, AddExperts, ExpertsBatch, build_peers
from bench.timing import Case, Results, Task, Work
from bench.workload import FIRST_SET, MAX_DECODE, Choice, Model, batch, row_slots
from lorry.kernels.moe import fused_experts, grouped_product, sum_choices
from lorry.kernels.moe_plan import LoRASites
from lorry.kernels.moe_shrink import merged_experts_fused_moe_lora_add
from lorry.kernels.moe_sort import PairOrder, sort_pairs
from lorry.kernels.moe_weights import Activation, ExpertsWeights, Projection, choose_tile
from lorry.kernels.tables import MAX_RANK, LoRATables
from lorry.lora.experts.activation import apply_activation
from tests.kernels.workloads import Mix

NUM_LAYERS = 4


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


def experts_weights(model: Model) -> ExpertsWeights:
    h, i, e = model.hidden, model.inter, model.experts
    if not model.oss:
        return ExpertsWeights(
            Projection(normal(e, 2 * i, h), "concatenated"), Projection(normal(e, h, i)), Activation("glu")
        )
    first = Projection(normal(e, h, 2 * i), "interleaved", True, normal(e, 2 * i))
    second = Projection(normal(e, i, h), "no", True, normal(e, h))
    return ExpertsWeights(first, second, Activation("glu_clamped", 1.702, 1.0, 7.0))


class Adapters:
    """`num` adapters of one rank at gate, up and down of every layer, as an arena holds them."""

    def __init__(self, model: Model, num: int, rank: int) -> None:
        self.num, self.rank = num, rank
        e, h, i = model.experts, model.hidden, model.inter
        sizes = [e * rank * width for width in (h, i, h, i, i, h)] * (num * NUM_LAYERS)
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].view(NUM_LAYERS, num, 3, 2)
        data = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda").normal_(0, 0.05)
        self.parts = [
            data[start : start + size].view(e, rank, -1)
            for start, size in zip(starts.flatten().tolist(), sizes, strict=True)
        ]
        by_site = starts.transpose(1, 2).reshape(NUM_LAYERS * 3, num, 2).cuda()
        full = torch.full((NUM_LAYERS * 3, num), rank, dtype=torch.int32, device="cuda")
        offsets = (by_site[..., 0].contiguous(), by_site[..., 1].contiguous())
        self.tables = LoRATables(
            data, *offsets, full, torch.ones_like(full, dtype=torch.float32), torch.zeros_like(full)
        )

    def at(self, layer: int, slots: Tensor, max_rank: int) -> LoRASites:
        return LoRASites(self.tables, slots, (3 * layer, 3 * layer + 1), 3 * layer + 2, max_rank)

    def stacked(self, matrix: int) -> list[list[Tensor]]:
        """By layer and projection of all adapters, A [num, E, rank, in] (0) or B [num, E, out, rank] (1)."""
        each = [
            [torch.stack([self.parts[((layer * self.num + n) * 3 + site) * 2 + matrix] for n in range(self.num)])
             for site in range(3)]
            for layer in range(NUM_LAYERS)
        ]  # fmt: skip
        return each if matrix == 0 else [[one.mT.contiguous() for one in layer] for layer in each]


class Rows:
    """Random rows and routing, another for each layer."""

    def __init__(self, model: Model, num: int) -> None:
        self.model = model
        draw = torch.Generator().manual_seed(num)
        self.x = torch.randn(num, model.hidden, device="cuda", dtype=torch.bfloat16)
        scores = [torch.rand((num, model.experts), generator=draw) for _ in range(NUM_LAYERS)]
        self.index = [score.topk(model.choices, 1).indices.cuda() for score in scores]
        self.route = torch.rand(num, model.choices, device="cuda").softmax(-1).bfloat16()


def num_distinct(keys: Tensor) -> int:
    return int(keys.flatten().bincount().count_nonzero())


def experts_work(model: Model, index: Tensor, slots: Tensor | None = None, rank: int = 0) -> Work:
    """Weights of the experts that have rows (LoRA: of the pairs of slot and expert), x and y, once each."""
    h, i = model.hidden, model.inter
    moved = num_distinct(index) * 3 * h * i + 2 * index.shape[0] * h
    flops = index.numel() * 3 * h * i
    if slots is not None:
        lora = rank * 3 * (h + i)
        moved += num_distinct(slots[:, None] * model.experts + index) * lora
        flops += index.numel() * lora
    return Work(2.0 * moved, 2.0 * flops)


class Block:
    """One batch of rows through the experts of each layer, in each of the ways."""

    def __init__(self, rows: Rows, layers: list[ExpertsWeights], adapters: Adapters, slots: Tensor) -> None:
        self.rows, self.layers, self.adapters, self.slots = rows, layers, adapters, slots

    def sites(self, layer: int) -> LoRASites:
        """A graph of decode is captured for any rank."""
        decode = len(self.slots) <= MAX_DECODE
        return self.adapters.at(layer, self.slots, MAX_RANK if decode else self.adapters.rank)

    def fused(self, lora: bool, layer: int) -> Tensor:
        sites = self.sites(layer) if lora else None
        return fused_experts(self.rows.x, self.rows.index[layer], self.rows.route, self.layers[layer], sites)

    def unfused(self, way: str | AddExperts, layer: int) -> Tensor:
        """Plain products and the activation in torch; LoRA by `merged`, by no one (`plain`), or by a peer."""
        weights, rows, none = self.layers[layer], self.rows, Activation("none")
        index, first = rows.index[layer], weights.first
        tiles = choose_tile(rows.x, weights, index.numel())
        slots, num_slots = (self.slots, self.adapters.num) if way == "merged" else (None, 0)
        order = sort_pairs(index, slots, num_slots, weights.num_experts, tiles[0].block_m)
        flat = Projection(first.weight, "no", first.transposed, first.bias)
        inter = grouped_product(rows.x, flat, none, order, tiles[0])
        self._add(way, inter, rows.x, layer, False, order)
        gate, up = (inter[:, ::2], inter[:, 1::2]) if first.gated == "interleaved" else inter.chunk(2, 1)
        act = apply_activation(weights.activation, gate, up)
        out = grouped_product(act, weights.second, none, order, tiles[1], top_k_weights=rows.route)
        self._add(way, out, act, layer, True, order)
        return sum_choices(out, index, weights.num_experts)

    def _add(self, way: str | AddExperts, y: Tensor, x: Tensor, layer: int, down: bool, order: PairOrder) -> None:
        if way == "merged":
            lora, weights = self.adapters.at(layer, self.slots, self.adapters.rank), self.layers[layer]
            merged_experts_fused_moe_lora_add(
                y, x, self.rows.index[layer], self.slots, lora.tables, (lora.down,) if down else lora.first,
                weights.num_experts, lora.max_rank, interleaved=weights.first.gated == "interleaved" and not down,
                top_k_weights=self.rows.route if down else None, order=order,
            )  # fmt: skip
        elif not isinstance(way, str):
            way(y, x, layer, down)

    def delta(self, step: partial[Tensor]) -> Tensor:
        return step(0).float() - self.fused(False, 0).float()


def experts_tasks(
    results: Results,
    rows: Rows,
    layers: list[ExpertsWeights],
    adapters: Adapters,
    mix: Mix,
    packages: tuple[str, ...],
) -> list[Task]:
    model, num_rows = rows.model, len(rows.x)
    slots = row_slots(batch(mix, num_rows, adapters.num), rows.x.device)
    block = Block(rows, layers, adapters, slots)
    ways: dict[str, str | AddExperts] = {"merged": "merged"}
    if (adapters.num, adapters.rank) == FIRST_SET and not model.oss:  # the peers' gate and up do not alternate
        given = ExpertsBatch(adapters.stacked(0), adapters.stacked(1), rows.index, slots, rows.route)
        ways |= build_peers(EXPERTS_PEERS, results.say, packages, given)
    base_work, work = (
        mean([experts_work(model, index, *lora) for index in rows.index]) for lora in ((), (slots, adapters.rank))
    )
    tasks = [
        Task(Case("experts", model.name, name, num_rows), step, NUM_LAYERS, base_work)
        for name, step in (("base", partial(block.fused, False)), ("plain", partial(block.unfused, "plain")))
    ]
    steps = {"fused": partial(block.fused, True), **{name: partial(block.unfused, way) for name, way in ways.items()}}
    for name, step in steps.items():
        case = Case("experts", model.name, name, num_rows, mix, adapters.rank, adapters.num)
        tasks.append(Task(case, step, NUM_LAYERS, work, partial(block.delta, step)))
    return tasks


def mean(works: list[Work]) -> Work:
    return Work(sum(work.num_bytes for work in works) / len(works), sum(work.flops for work in works) / len(works))


def run_experts(results: Results, model: Model, choice: Choice, adapters: int, rank: int) -> None:
    layers = [experts_weights(model) for _ in range(NUM_LAYERS)]
    given = Adapters(model, adapters, rank)
    tasks: list[Task] = []
    for rows in choice.rows:
        tasks += experts_tasks(results, Rows(model, rows), layers, given, choice.mixes[0], choice.packages)
    results.run(tasks)
