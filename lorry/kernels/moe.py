"""The experts of a layer in Triton: grouped products with LoRA inside them, and the whole block of five launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorry.kernels.moe_lora import dot_precision, expand_block
from lorry.kernels.moe_plan import LoRAPlan, LoRASites, plan_lora
from lorry.kernels.moe_prefill import fits_prefill, prefill_experts
from lorry.kernels.moe_product import product_kernel
from lorry.kernels.moe_shrink import launch_options, shrink_groups, shrink_pairs, start_experts
from lorry.kernels.moe_sort import MAX_COUNTED_PAIRS, PairOrder, sort_pairs
from lorry.kernels.moe_weights import Activation, ExpertsWeights, PrefillPlan, Projection, Tile, choose_tile

__all__ = [
    "Activation",
    "ExpertsWeights",
    "LoRAPlan",
    "LoRASites",
    "Projection",
    "fused_experts",
    "grouped_product",
    "sum_choices",
]


@triton.jit
def _sum_kernel(
    x_ptr, experts_ptr, positions_ptr, route_ptr, y_ptr, num_experts, N: tl.constexpr, NUM_CHOICES: tl.constexpr,
    CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_ROUTE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.arange(0, CHOICES)
    pair = row * NUM_CHOICES + choice
    expert = tl.load(experts_ptr + pair, mask=choice < NUM_CHOICES, other=-1)
    present = (choice < NUM_CHOICES) & (expert >= 0) & (expert < num_experts)
    at = tl.load(positions_ptr + pair, mask=present, other=0).to(tl.int64) if HAS_POSITIONS else pair
    if PDL:
        tl.extra.cuda.gdc_wait()
    # All choices are read at once, and those that are not there dropped after it: nothing waits for `expert`.
    x = tl.load(
        x_ptr + at[:, None] * N + n[None, :], mask=(choice < NUM_CHOICES)[:, None] & (n < N)[None, :], other=0.0
    )
    x = tl.where(present[:, None], x.to(tl.float32), 0.0)
    if HAS_ROUTE:
        x *= tl.load(route_ptr + pair, mask=present, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + row * N + n, tl.sum(x, 0).to(y_ptr.dtype.element_ty), mask=n < N)


def sum_choices(
    x: Tensor,
    top_k_index: Tensor,
    num_experts: int,
    top_k_weights: Tensor | None = None,
    positions: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """y[t] = sum over choices k of (top_k_weights[t, k] *) x[pair t * K + k], in float32; new tensor [T, N].

    x [P, N] by pair, or in sorted order with `positions` (see `PairOrder`). Choices of an expert outside
    0..num_experts-1 count as zero, whatever is in their rows. Deterministic; safe under graph capture.
    """
    num_rows, num_choices = top_k_index.shape
    width = x.shape[1]
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block_n = min(512 if positions is None else 1024, triton.next_power_of_2(width))
    _sum_kernel[(num_rows, triton.cdiv(width, block_n))](
        x,
        top_k_index,
        top_k_index if positions is None else positions,
        x if top_k_weights is None else top_k_weights,
        y,
        num_experts,
        N=width,
        NUM_CHOICES=num_choices,
        CHOICES=triton.next_power_of_2(num_choices),
        BLOCK_N=block_n,
        HAS_POSITIONS=positions is not None,
        HAS_ROUTE=top_k_weights is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return y


def grouped_product(
    x: Tensor,
    projection: Projection,
    activation: Activation,
    order: PairOrder,
    tile: Tile,
    *,
    top_k_weights: Tensor | None = None,
    h: Tensor | None = None,
    plan: LoRAPlan | None = None,
    max_rank: int = 0,
    wait: int = 0,
) -> Tensor:
    """out[p] = top_k_weights[p] * act(x_p W[e_p]^T + bias[e_p] + h[p] B[slot_p, e_p]), by pair p; new tensor [P, N].

    x [T, in] or [P, in] by pair. `projection` holds W of any strides and says whether gate and up lie in it side by
    side, alternate, or there is no gate; the activation is taken in float32 before the store. With `plan` (this
    product's sites, this order) the shrunk rows h [P, num_sites, rank] are expanded inside the tile, before bias and
    activation: a loop over the slots present in the tile, rows of other slots masked, so that rows of the base and
    of slots of rank 0 get the bits they get without LoRA. Rows of pairs that `order` leaves out are not written.
    `wait`: see `product_kernel`. Deterministic; safe under graph capture.
    """
    num_pairs, width = order.num_pairs, projection.out_features
    assert order.block_m == tile.block_m
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    weight = projection.weight
    block_r = expand_block(max_rank)
    tiles_n = triton.cdiv(width, tile.block_n)
    group_tiles = order.max_tiles if order.positions is None else 16
    programs = triton.cdiv(order.max_tiles, group_tiles) * group_tiles * tiles_n
    product_kernel[(programs,)](
        x, weight, weight if projection.bias is None else projection.bias, out,
        x if top_k_weights is None else top_k_weights, order.tensors, x if h is None else h,
        x if plan is None else plan.data, order.tensors if plan is None else plan.tensors, num_pairs,
        0 if h is None else h.stride(1), 0 if h is None else h.stride(0), group_tiles, activation.alpha,
        activation.beta, activation.limit,
        K=projection.in_features,
        N=width,
        STRIDE_E=weight.stride(0),
        STRIDE_N=projection.stride_out,
        STRIDE_K=projection.stride_in,
        ROWS_PER_X=num_pairs // x.shape[0],
        GATED=projection.gated,
        KIND=activation.kind,
        HAS_BIAS=projection.bias is not None,
        HAS_ROUTE=top_k_weights is not None,
        LORA=plan is not None,
        UNIT=1 if plan is None else plan.unit,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_R=block_r,
        GROUP=tile.group_slots if block_r == 16 else max(1, tile.group_slots // 2),
        AHEAD=tile.ahead,
        SWAP=tile.swap,
        PRECISION=dot_precision(x),
        WAIT=wait,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(wait > 0),
    )  # fmt: skip
    return out


def fused_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertsWeights,
    lora: LoRASites | None = None,
    tiles: tuple[Tile, Tile] | None = None,
    prefill: PrefillPlan | None = None,
) -> Tensor:
    """y[t] = sum over k of w[t, k] * (down + LoRA)(act((gate_up + LoRA)(x[t]))) of expert e[t, k]; new tensor [T, H].

    x [T, H] contiguous; top_k_index [T, K] integer, contiguous, -1 or >= num_experts: an expert that lives
    elsewhere, adds nothing; top_k_weights [T, K] float; `lora` None: base alone. Up to `MAX_COUNTED_PAIRS` pairs:
    sort (beside the first shrink), gate_up, shrink, down, sum: five launches, four without LoRA. Above, on devices
    with TMA, see `prefill_experts`. `tiles` and `prefill` override the tuned choice, for measuring.
    Nothing is read back: safe under graph capture. bfloat16, float16, float32.
    """
    num_rows, num_choices = top_k_index.shape
    if num_rows == 0:
        return torch.empty_like(x)
    num_pairs = num_rows * num_choices
    plan = prefill or (None if tiles else fits_prefill(x, weights, num_pairs))
    if plan is not None:
        return prefill_experts(x, top_k_index, top_k_weights, weights, lora, plan)
    first, second = tiles or choose_tile(x, weights, num_pairs)
    pdl, second_pdl = first.pdl and x.is_cuda, second.pdl and x.is_cuda
    if lora is None:
        order = sort_pairs(top_k_index, None, 0, weights.num_experts, first.block_m, pdl=pdl)
        inter = grouped_product(x, weights.first, weights.activation, order, first, wait=int(pdl))
        out = grouped_product(inter, weights.second, Activation("none"), order, second, top_k_weights=top_k_weights,
                              wait=3 if second_pdl else 0)  # fmt: skip
    else:
        out = _with_lora(x, top_k_index, top_k_weights, weights, lora, (first, second))
    return sum_choices(out, top_k_index, weights.num_experts, pdl=second_pdl)


def _with_lora(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertsWeights,
    lora: LoRASites,
    tiles: tuple[Tile, Tile],
) -> Tensor:
    pdl, second_pdl = (tile.pdl and x.is_cuda for tile in tiles)
    inter, max_rank = weights.first.out_features, lora.max_rank
    experts, block_m, by_pair = weights.num_experts, tiles[0].block_m, tiles[0].shrink_by_pair
    if top_k_index.numel() <= MAX_COUNTED_PAIRS:
        order, plan, h = start_experts(x, top_k_index, lora, experts, inter, block_m, shrink=by_pair, pdl=pdl)
    else:
        order = sort_pairs(top_k_index, lora.token_slots, lora.tables.num_slots, experts, block_m)
        plan = plan_lora(order, lora.tables, lora.sites, x.shape[1], inter, True)
        by_pair = False
    first, down = plan.at(0, len(lora.first)), plan.at(len(lora.first), len(lora.sites))
    if not by_pair:
        h = shrink_groups(x, order, first, max_rank, pdl=pdl)
    # Beside the sort, the shrink is done when the sort is; on its own it may still run while the product does.
    wait = 0 if not pdl else 1 if by_pair else 2
    hidden = grouped_product(x, weights.first, weights.activation, order, tiles[0], h=h, plan=first,
                             max_rank=max_rank, wait=wait)  # fmt: skip
    if tiles[1].shrink_by_pair:
        h = shrink_pairs(hidden, order, down, max_rank, pdl=second_pdl)
    else:
        h = shrink_groups(hidden, order, down, max_rank, pdl=second_pdl)
    return grouped_product(hidden, weights.second, Activation("none"), order, tiles[1], top_k_weights=top_k_weights,
                           h=h, plan=down, max_rank=max_rank, wait=2 if second_pdl else 0)  # fmt: skip
