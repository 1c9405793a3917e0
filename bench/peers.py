"""The LoRA kernels of SGLang and vLLM, called as their engines call them; for `bench/kernels.py`.

They come from the installed packages (`pip install sglang`, `pip install vllm`); nothing of them is here. Written
against sglang 0.5.23 and vllm 0.33. The sort of rows by adapter (experts: of pairs of row and choice by adapter and
expert) that their kernels need is made before the clock starts: the peers' times are without it. Of ours the sort of
the pairs is in the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from bench.peer_packages import sglang_file, vllm_file, vllm_root
from lorry.lora.batch import RequestRouting

SGLANG_CHUNKS = (16, 128)
"""Chunks of SGLang's csgmv: its default, and the largest that it may be told to use (for 256 rows and more)."""


Add = Callable[[Tensor, Tensor, int], None]
"""y += LoRA of x at a layer, in place."""


@dataclass(frozen=True)
class LinearWeights:
    """By layer and slice: A [adapters, rank, in], B [adapters, out, rank]; the scale is 1."""

    a: list[list[Tensor]]
    b: list[list[Tensor]]


def _segments(slots: list[int], lengths: list[int], a: Tensor, slices: int, permutation: Tensor | None) -> Any:
    """What SGLang calls a LoRABatchInfo."""
    ints = partial(torch.tensor, dtype=torch.int32, device=a.device)
    return SimpleNamespace(
        use_cuda_graph=False,
        bs=len(slots),
        num_segments=len(slots),
        seg_indptr=ints([0, *lengths]).cumsum(0, dtype=torch.int32),
        seg_lens=ints(lengths),
        weight_indices=ints(slots),
        lora_ranks=torch.full((a.shape[0],), a.shape[1] // slices, dtype=torch.int32, device=a.device),
        scalings=torch.ones(a.shape[0], device=a.device),
        max_len=max(lengths),
        permutation=permutation,
    )


def _sglang_csgmv(weights: LinearWeights, requests: RequestRouting, slots: Tensor, chunk: int = 16) -> Add | None:
    if chunk > 16 and len(slots) < 256:
        return None
    shrink = sglang_file("dense.chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
    expand = sglang_file("dense.chunked_sgmv_expand").chunked_sgmv_lora_expand_forward
    a, b = [torch.cat(one, 1) for one in weights.a], [torch.cat(one, 1) for one in weights.b]
    of_chunks: list[tuple[int, int]] = []
    for slot, count in enumerate(slots.bincount().tolist()):
        of_chunks += [(slot, min(chunk, count - start)) for start in range(0, count, chunk)]
    permutation = slots.argsort(stable=True).to(torch.int32)
    slices, widths = len(weights.b[0]), [one.shape[1] for one in weights.b[0]]
    info = _segments([slot for slot, _ in of_chunks], [n for _, n in of_chunks], a[0], slices, permutation)
    info.max_len = chunk
    offsets = torch.tensor([0, *widths]).cumsum(0, dtype=torch.int32)
    on_device = offsets.to(slots.device)

    def add(y: Tensor, x: Tensor, layer: int) -> None:
        h = shrink(x, a[layer], info, slices)
        expand(h, b[layer], info, on_device, max(widths), y, slice_offsets_cpu=offsets)

    return add


def _sglang_triton(weights: LinearWeights, requests: RequestRouting, slots: Tensor) -> Add:
    """Decode: rows sorted by adapter, a segment for each; prefill: a segment for each request."""
    shrink = sglang_file("dense.sgemm_lora_a").sgemm_lora_a_fwd
    expand_one = sglang_file("dense.sgemm_lora_b").sgemm_lora_b_fwd
    expand_two = sglang_file("dense.gate_up_lora_b").gate_up_lora_b_fwd
    expand_three = sglang_file("dense.qkv_lora_b").qkv_lora_b_fwd
    a, b = [torch.cat(one, 1) for one in weights.a], [torch.cat(one, 1) for one in weights.b]
    slices, widths = len(weights.b[0]), [one.shape[1] for one in weights.b[0]]
    if len(requests.slots) == len(slots):
        permutation = slots.argsort(stable=True).to(torch.int32)
        info = _segments(
            list(range(len(a[0]))), slots.bincount(minlength=len(a[0])).tolist(), a[0], slices, permutation
        )
        info.max_len = len(slots)
    else:
        info = _segments(list(requests.slots), list(requests.seq_lens), a[0], slices, None)
    offsets = torch.tensor([0, *widths], device=slots.device).cumsum(0, dtype=torch.int32)

    def add(y: Tensor, x: Tensor, layer: int) -> None:
        h = shrink(x, a[layer], info, slices)
        if slices == 1:
            expand_one(h, b[layer], info, y)
        elif slices == 2:
            expand_two(h, b[layer], info, widths[0], y)
        else:
            expand_three(h, b[layer], info, offsets, max(widths), y)

    return add


def _vllm_rows(slots: Tensor, adapters: int) -> tuple[Any, ...]:
    meta = vllm_file("lora_kernel_metadata").LoRAKernelMeta.make(adapters, len(slots), slots.device)
    meta.prepare_tensors(slots)
    return tuple(meta.meta_args(len(slots), False))


def _vllm_linear(weights: LinearWeights, requests: RequestRouting, slots: Tensor) -> Add:
    shrink, expand = vllm_file("lora_shrink_op").lora_shrink, vllm_file("lora_expand_op").lora_expand
    adapters, rank, _ = weights.a[0][0].shape
    rows = _vllm_rows(slots, adapters)

    def add(y: Tensor, x: Tensor, layer: int) -> None:
        a, b = weights.a[layer], weights.b[layer]
        h = torch.empty(len(a), len(x), rank, dtype=torch.float32, device=x.device)
        shrink(x, a, h, *rows, 1.0)
        expand(h, b, y, *rows, offset_start=0, add_inputs=True)

    return add


LINEAR_PEERS: dict[str, Callable[[LinearWeights, RequestRouting, Tensor], Add | None]] = {
    "sglang csgmv": _sglang_csgmv,
    f"sglang csgmv{SGLANG_CHUNKS[1]}": partial(_sglang_csgmv, chunk=SGLANG_CHUNKS[1]),
    "sglang triton": _sglang_triton,
    "vllm": _vllm_linear,
}


@dataclass(frozen=True)
class ExpertsBatch:
    """By layer and projection (gate, up, down): A [adapters, E, rank, in], B [adapters, E, out, rank]; by layer the
    experts of each row [T, K]; slots [T] int32, and the router's weights [T, K]."""

    a: list[list[Tensor]]
    b: list[list[Tensor]]
    index: list[Tensor]
    slots: Tensor
    route: Tensor


AddExperts = Callable[[Tensor, Tensor, int, bool], None]
"""y [P, 2I] += LoRA of x [T, H] by gate and up, or (`down`) y [P, H] += router's weight * LoRA of x [P, I]."""


def aligned(keys: Tensor, num_keys: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions by key, each key's padded to blocks (with len(keys)); the key of each block; how many positions."""
    counts = keys.bincount(minlength=num_keys)
    padded = -(-counts // block) * block
    order = keys.argsort(stable=True)
    moved = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(len(keys), device=keys.device) + moved[keys[order]]
    positions = torch.full((int(padded.sum()),), len(keys), dtype=torch.int32, device=keys.device)
    positions[places] = order.to(torch.int32)
    blocks = torch.arange(num_keys, device=keys.device).repeat_interleave(padded // block).to(torch.int32)
    return positions, blocks, padded.sum().to(torch.int32)[None]


def _sglang_experts(given: ExpertsBatch) -> AddExperts:
    add_lora = sglang_file("moe.virtual_experts").merged_experts_fused_moe_lora_add
    index = [one.to(torch.int32) for one in given.index]
    route, slots = given.route.float(), given.slots
    first_a = [torch.cat(one[:2], 2) for one in given.a]
    first_b = [torch.cat(one[:2], 2) for one in given.b]
    mask = slots >= 0

    class Routing(dict[Any, Any]):
        """Their cache of sorted pairs, filled by `aligned` when it is first asked."""

        def __init__(self, layer: int) -> None:
            self.layer = layer

        def get(self, key: Any, default: Any = None) -> Any:
            if key not in self:
                virtual = (slots[:, None] * key[0] + given.index[self.layer]).flatten()
                self[key] = (*aligned(virtual, key[0] * len(first_a[0]), key[2]), mask)
            return self[key]

    routing = [Routing(layer) for layer in range(len(index))]

    def one(y: Tensor, x: Tensor, a: Tensor, b: Tensor, layer: int, down: bool = False, slices: int = 1) -> None:
        given = index[layer], route, slots, down, False, False, routing[layer]
        add_lora(y, x, a, b, *given, a_output_slices=slices)

    def add(y: Tensor, x: Tensor, layer: int, down: bool) -> None:
        a, b = given.a[layer], given.b[layer]
        if down:
            one(y, x, a[2], b[2], layer, down=True)
        elif paired:
            one(y, x, first_a[layer], first_b[layer], layer, slices=2)
        else:
            for a_of, b_of, half in zip(a, b, y.chunk(2, 1), strict=False):
                one(half, x, a_of, b_of, layer)

    paired = True
    try:
        add(
            first_b[0].new_zeros(index[0].numel(), first_b[0].shape[2]),
            first_b[0].new_zeros(len(slots), first_a[0].shape[3]),
            0,
            False,
        )
    except triton.CompilationError:  # gate and up in one call needs a newer Triton than 3.6
        paired = False
    return add


def _vllm_block(experts: int, inter: int, rows: int) -> int:
    """Rows of a block as vLLM chooses them: from its file for the base product, else by its rule."""
    device = torch.cuda.get_device_name().replace(" ", "_")
    name = f"E={experts},N={inter},device_name={device}.json"
    file = vllm_root() / "model_executor/layers/fused_moe/configs" / name
    if not file.exists():
        return 16 if rows <= experts else 64
    configs = {int(key): value for key, value in json.loads(file.read_text()).items() if key.isdigit()}
    return int(configs[min(configs, key=lambda known: abs(known - rows))]["BLOCK_SIZE_M"])


def _vllm_experts(given: ExpertsBatch) -> AddExperts:
    add_lora = vllm_file("fused_moe_lora_op").fused_moe_lora
    adapters, experts, rank, _ = given.a[0][0].shape
    rows, choices = given.route.shape
    mapping, _, _, _, ids, _, num_active = _vllm_rows(given.slots, adapters)
    route, enabled = given.route.float(), torch.ones(adapters + 1, dtype=torch.int32, device=mapping.device)
    block = _vllm_block(experts, given.a[0][2].shape[3], rows)
    tiles = (block, 64, 32, 8, 4, 3, 1)

    def sort(index: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        if rows * choices * 8 <= experts * adapters:
            return None, index.flatten().to(torch.int32), None
        pairs = index.new_tensor(range(index.numel())).view_as(index)
        own = [(given.slots == slot).nonzero()[:, 0] for slot in range(adapters)]
        parts = [(pairs[of].flatten(), *aligned(index[of].flatten(), experts, block)) for of in own]
        size = max(block, *(len(part[1]) for part in parts))
        positions = torch.full((adapters, size), index.numel(), dtype=torch.int32, device=index.device)
        blocks = torch.full((adapters, size // block), -1, dtype=torch.int32, device=index.device)
        for slot, (of, places, keys, _) in enumerate(parts):
            padded = torch.cat([of, of.new_tensor([index.numel()])]).to(torch.int32)
            positions[slot, : len(places)] = padded[places.long()]
            blocks[slot, : len(keys)] = keys
        return positions, blocks, torch.cat([part[3] for part in parts])

    sorts = [sort(index) for index in given.index]

    def add(y: Tensor, x: Tensor, layer: int, down: bool) -> None:
        a, b = ((one[layer][2:] if down else one[layer][:2]) for one in (given.a, given.b))
        y = y.view(rows, choices, -1)
        add_lora(
            y, x, a, b, route, *sorts[layer], mapping, rank, choices, ids, num_active, enabled, *tiles, *tiles, down
        )

    return add


EXPERTS_PEERS: dict[str, Callable[[ExpertsBatch], AddExperts | None]] = {
    "sglang": _sglang_experts,
    "vllm": _vllm_experts,
}

_said: set[str] = set()


def build_peers(
    builders: Mapping[str, Callable[..., Any]], say: Callable[[str], None], packages: tuple[str, ...], *given: Any
) -> dict[str, Any]:
    """What those `builders` return whose package was asked for; says once which cannot be used, and why."""
    built: dict[str, Any] = {}
    for name, builder in builders.items():
        if name.split()[0] not in packages:
            continue
        try:
            peer = builder(*given)
        except Exception as error:  # whatever another package does when it is imported or called
            if name not in _said:
                say(f"-- {name} is left out: {type(error).__name__}: {' '.join(str(error).split())[-200:]}")
            _said.add(name)
            continue
        if peer is not None:
            built[name] = peer
    return built
