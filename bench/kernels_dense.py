"""Workloads of linear layers with LoRA, and of a layer's attention projections; run by `bench/kernels.py`.

Every layer has weights of its own, and a graph runs as many as the caches cannot hold: nothing but activations comes
from a cache. The base is the library's product without LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from bench.peers import LINEAR_PEERS, LinearWeights, build_peers
from bench.timing import Case, Results, Task, Work
from bench.workload import FIRST_SET, Choice, Group, Model, batch, row_slots
from lorry.kernels.dense import Segments
from lorry.kernels.dense_fused import GroupLoRA, Heads, Projected, add_and_norm, norm_rotate_write, project
from lorry.lora.arena import Arena
from lorry.lora.backends.base import make_dense_backend
from lorry.lora.batch import RequestRouting
from lorry.lora.weights import AdapterWeights, SiteWeights
from lorry.models.sites import Site
from tests.kernels.workloads import Mix

CACHED_BYTES = 128e6
"""Base weights of a graph's layers are at least so many bytes, more than twice the L2 of an H200."""


class Layers:
    """Layers of one group of linears, and `adapters` of one rank for each."""

    def __init__(self, group: Group, rank: int, adapters: int) -> None:
        self.group, self.rank, self.adapters = group, rank, adapters
        count, device = len(group.widths), torch.device("cuda")
        shape = (sum(group.widths), group.in_features)
        self.num = min(8, max(4, round(CACHED_BYTES / (2 * shape[0] * shape[1]))))
        sites = [
            Site(layer * count + i, f"{layer}.{i}", "linear", "m", group.in_features, width)
            for layer in range(self.num)
            for i, width in enumerate(group.widths)
        ]
        self.sites = [tuple(range(layer * count, (layer + 1) * count)) for layer in range(self.num)]
        elements = sum(site.num_elements(rank) + 128 for site in sites)
        self.arena = Arena(sites, 2 * elements * adapters + 4096, adapters, torch.bfloat16, device)
        for _ in range(adapters):
            weights = {
                site.index: SiteWeights(
                    torch.randn(1, rank, site.in_features, device=device).bfloat16() * site.in_features**-0.5,
                    torch.randn(1, rank, site.out_features, device=device).bfloat16(),
                    1.0,
                )
                for site in sites
            }
            self.arena.allocate(AdapterWeights(weights, ("bench",)))
        self.base = [torch.randn(shape, device=device).bfloat16() * shape[1] ** -0.5 for _ in range(self.num)]
        self.bias = torch.randn(shape[0], device=device).bfloat16() if group.bias else None
        arena = self.arena
        self.tables = arena.tables

    @cached_property
    def peer_weights(self) -> LinearWeights:
        """The same adapters as the peers keep them."""
        a: list[list[Tensor]] = []
        b: list[list[Tensor]] = []
        for sites in self.sites:
            found = [[self.arena.get(site, slot) for slot in range(self.adapters)] for site in sites]
            a.append([torch.cat([one.a for one in slots if one is not None]) for slots in found])
            b.append([torch.cat([one.b.mT for one in slots if one is not None]) for slots in found])
        return LinearWeights(a, b)


def linear_work(group: Group, rows: int, rank: int = 0, present: int = 0) -> Work:
    """Weights, x and y once each, and the A and B of the adapters that are `present`."""
    width, slices = sum(group.widths), len(group.widths)
    lora = rank * (group.in_features * slices + width)
    moved = width * group.in_features + rows * (group.in_features + width) + present * lora
    return Work(2.0 * moved, 2.0 * rows * (width * group.in_features + (lora if present else 0)))


class Step:
    """A batch of rows over `Layers` by one of our backends: how to run a layer's base product and its LoRA."""

    def __init__(self, layers: Layers, backend: str, requests: RequestRouting, x: Tensor) -> None:
        self.layers, self.x = layers, x
        rows = x.shape[0]
        self.backend = make_dense_backend(backend, layers.arena, x.device)
        decode = len(requests.slots) == rows
        if decode:
            self.backend.init_cuda_graph_batch_info(rows, rows)
        self.info = self.backend.prepare_lora_batch(requests, rows if decode else None)
        self.y = x.new_zeros(rows, sum(layers.group.widths))

    def product(self, layer: int, x: Tensor | None = None) -> None:
        weight, x = self.layers.base[layer].T, self.x if x is None else x
        if self.layers.bias is None:
            torch.mm(x, weight, out=self.y)
        else:
            torch.addmm(self.layers.bias, x, weight, out=self.y)

    def lora(self, y: Tensor, x: Tensor, layer: int) -> None:
        self.backend.add_lora(y, x, self.layers.sites[layer], self.info)

    def group_lora(self, layer: int) -> GroupLoRA:
        """What the fused ops need to know."""
        info = self.info
        segments = Segments(info.seg_indptr, info.weight_indices, info.permutation, info.max_seg_len)
        return GroupLoRA(self.layers.tables, self.layers.sites[layer], segments, info.token_slots, info.max_rank)


Add = Callable[[Tensor, Tensor, int], None]
"""y += LoRA of x at a layer."""


def linear_tasks(
    results: Results, layers: Layers, model: Model, rows: int, mix: Mix, packages: tuple[str, ...]
) -> list[Task]:
    """The base product, and with LoRA by our backends and, for the first set of adapters, the peers'."""
    requests = batch(mix, rows, layers.adapters)
    x = torch.randn(rows, layers.group.in_features, device="cuda").bfloat16()
    ours = {name: Step(layers, name, requests, x) for name in ("csgmv", "triton")}
    step, present = ours["csgmv"], len(requests.adapter_slots)
    adds: dict[str, Add] = {name: own.lora for name, own in ours.items()}
    if (layers.adapters, layers.rank) == FIRST_SET:
        slots = row_slots(requests, x.device)
        adds |= build_peers(LINEAR_PEERS, results.say, packages, layers.peer_weights, requests, slots)

    def both(add: Add, layer: int) -> None:
        step.product(layer)
        add(step.y, x, layer)

    def alone(add: Add) -> Tensor:
        y = torch.zeros_like(step.y)
        add(y, x, 0)
        return y

    op, num = layers.group.name, layers.num
    tasks = [Task(Case(op, model.name, "base", rows), step.product, num, linear_work(layers.group, rows))]
    work = linear_work(layers.group, rows, layers.rank, present)
    for name, add in adds.items():
        case = Case(op, model.name, name, rows, mix, layers.rank, layers.adapters)
        tasks.append(Task(case, partial(both, add), num, work, partial(alone, add)))
    return tasks


def run_linear(results: Results, model: Model, group: Group, choice: Choice, adapters: int, rank: int) -> None:
    layers = Layers(group, rank, adapters)
    tasks: list[Task] = []
    for mix in choice.mixes if adapters > 1 else choice.mixes[:1]:
        for rows in choice.rows:
            packages = choice.packages if mix == choice.mixes[0] else ()
            tasks += linear_tasks(results, layers, model, rows, mix, packages)
    results.run(tasks)


Way = Callable[[Step, Tensor, int], tuple[Projected, GroupLoRA | None]]
"""Computes a projection and says which LoRA its reader adds."""


def _base(step: Step, x: Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    step.product(layer, x)
    return Projected(step.y[None], None), None


def _separate(step: Step, x: Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    step.product(layer, x)
    step.lora(step.y, x, layer)
    return Projected(step.y[None], None), None


def _best(step: Step, x: Tensor, layer: int) -> tuple[Projected, GroupLoRA | None]:
    lora = step.group_lora(layer)
    return project(x, step.layers.base[layer], lora), lora


class Attention:
    """q, k, v, o of a layer with what follows them (norm, rotary, KV write; add, norm), without attention itself."""

    def __init__(self, model: Model, qkv: Layers, o: Layers, rows: int, mix: Mix) -> None:
        requests = batch(mix, rows, qkv.adapters)
        self.present = len(requests.adapter_slots)
        self.x = torch.randn(rows, model.hidden, device="cuda").bfloat16()
        width = (rows, model.heads * model.head_dim)
        self.qkv = Step(qkv, "csgmv", requests, self.x)
        self.o = Step(o, "csgmv", requests, self.x.new_zeros(width))
        norms = [self.x.new_ones(model.head_dim) if model.qk_norm else None for _ in "qk"]
        angles = [torch.rand(rows, model.head_dim, device="cuda").bfloat16() for _ in "cs"]
        self.heads = Heads(model.heads, model.kv_heads, norms[0], norms[1], 1e-6, angles[0], angles[1])
        self.keys, self.values = (self.x.new_zeros(rows, model.kv_heads, model.head_dim) for _ in "kv")
        self.write_slots = torch.randperm(rows, device="cuda")
        self.residual = torch.zeros_like(self.x)
        self.norm = self.x.new_ones(model.hidden)

    def run(self, way: Way, layer: int) -> Tensor:
        projected, lora = way(self.qkv, self.x, layer)
        q = norm_rotate_write(projected, lora, self.heads, self.keys, self.values, self.write_slots)
        projected, lora = way(self.o, q, layer)
        return add_and_norm(projected, lora, self.residual, self.norm, 1e-6)

    def result(self, way: Way) -> Tensor:
        self.residual.zero_()
        return self.run(way, 0)

    def work(self, lora: bool) -> Work:
        """Of both products; instead of their results, q in and out, k and v out, the residual in and out, y out."""
        rows, rank, present = self.x.shape[0], self.qkv.layers.rank, self.present if lora else 0
        both = [linear_work(step.layers.group, rows, rank, present) for step in (self.qkv, self.o)]
        return both[0] + both[1] + Work(2.0 * rows * 2 * self.x.shape[1], 0.0)


def run_attention(results: Results, model: Model, choice: Choice, adapters: int, rank: int) -> None:
    """As the multiple of the library's products: LoRA as `project` chooses, and by launches of its own."""
    qkv, o = (Layers(group, rank, adapters) for group in model.groups[:2])
    tasks: list[Task] = []
    mix = choice.mixes[0]
    for rows in choice.rows:
        attention = Attention(model, qkv, o, rows, mix)
        ways: dict[str, Way] = {"base": _base, "best": _best, "separate": _separate}
        for name, way in ways.items():
            lora = name != "base"
            own = (mix, rank, adapters) if lora else ("none", 0, 0)
            case, step = Case("attention", model.name, name, rows, *own), partial(attention.run, way)
            result = partial(attention.result, way) if lora else None
            tasks.append(Task(case, step, min(qkv.num, o.num), attention.work(lora), result))
    results.run(tasks)
