"""Leaves of transformers models as one launch each: RMSNorm, the choice of experts, the gate of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, num_rows, eps, N: tl.constexpr, BLOCK_N: tl.constexpr,
                     ROWS: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < num_rows) & (n < N)
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    weight = tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, ((x * inverse).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)), in float32, rounded before the weight as transformers does; new tensor.

    x [..., N] (copied where it is not contiguous), weight [N]. Safe under graph capture.
    """
    width = weight.shape[0]
    x = x.contiguous()
    y = torch.empty_like(x)
    num_rows = x.numel() // width
    rows = 1 if width >= 1024 else 8
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight, y, num_rows, eps, N=width, BLOCK_N=triton.next_power_of_2(width), ROWS=rows, num_warps=4
    )
    return y


@triton.jit
def _choose_kernel(logits_ptr, weights_ptr, index_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr,
                   BLOCK_K: tl.constexpr, SOFTMAX_FIRST: tl.constexpr, NORMALISE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    score = tl.load(logits_ptr + row * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    largest = tl.max(score, 0)
    total = tl.sum(tl.exp(score - largest), 0)
    values = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        at = tl.argmax(score, 0)
        values = tl.where(k == i, tl.max(score, 0), values)
        chosen = tl.where(k == i, at, chosen)
        score = tl.where(e == at, float("-inf"), score)
    weights = tl.exp(values - largest)
    if SOFTMAX_FIRST:
        weights = weights / total
    if NORMALISE or not SOFTMAX_FIRST:
        weights = weights / tl.sum(weights, 0)
    tl.store(weights_ptr + row * K + k, weights.to(weights_ptr.dtype.element_ty), mask=k < K)
    tl.store(index_ptr + row * K + k, chosen, mask=k < K)


def choose_experts(
    logits: Tensor, num_choices: int, dtype: torch.dtype, softmax_first: bool, normalise: bool
) -> tuple[Tensor, Tensor]:
    """The `num_choices` largest logits of each row and their weights: ([T, K] in `dtype`, index [T, K] int32).

    logits [T, E] contiguous. Weights are the softmax over all experts (`softmax_first`), divided by their sum if
    `normalise`, or else the softmax over the chosen ones. Of equal logits the lower index comes first. New tensors;
    safe under graph capture.
    """
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, num_choices, dtype=dtype, device=logits.device)
    index = torch.empty(num_rows, num_choices, dtype=torch.int32, device=logits.device)
    _choose_kernel[(num_rows,)](
        logits, weights, index, E=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), K=num_choices,
        BLOCK_K=triton.next_power_of_2(num_choices), SOFTMAX_FIRST=softmax_first, NORMALISE=normalise, num_warps=1,
    )  # fmt: skip
    return weights, index


@triton.jit
def _silu_gate_kernel(x_ptr, y_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    gate = tl.load(x_ptr + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * N + n, (gate * up).to(y_ptr.dtype.element_ty), mask=inside)


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) * up of x [T, 2N] contiguous, gate before up: new tensor [T, N]. Safe under graph capture.

    SiLU is rounded before the product, as in transformers.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_gate_kernel[(num_rows, triton.cdiv(width, block))](x, y, N=width, BLOCK_N=block, num_warps=4)
    return y
