"""Norm, choice of experts and gate, against torch."""

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from lorry.kernels.leaves import choose_experts, rms_norm, silu_gate

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 48), (1, 5, 3, 16), (2, 1100)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = 3 * random(*shape, dtype=dtype), 1 + random(shape[-1], dtype=dtype)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    expected = exact.to(dtype) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    strided = torch.cat([x, x + 1], -1)[..., : shape[-1]]
    torch.testing.assert_close(rms_norm(strided, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "choices"), [(4, 2), (60, 6), (128, 8), (5, 5)])
def test_choose_experts(experts: int, choices: int, dtype: torch.dtype):
    logits = random(7, experts)
    values, index = logits.topk(choices)
    probabilities = logits.softmax(-1).gather(1, index)
    for first, normalise, expected in (
        (True, False, probabilities),
        (True, True, probabilities / probabilities.sum(-1, keepdim=True)),
        (False, False, values.softmax(-1)),
    ):
        weights, chosen = choose_experts(logits, choices, dtype, first, normalise)
        assert torch.equal(chosen.long(), index)
        torch.testing.assert_close(weights, expected.to(dtype))


def test_equal_logits_and_minus_infinity():
    logits = torch.tensor([[1.0, 2.0, 2.0, float("-inf")], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    weights, chosen = choose_experts(logits, 3, torch.float32, True, False)
    assert chosen.tolist() == [[1, 2, 0], [0, 1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, chosen.long()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1500])
def test_silu_gate(width: int, dtype: torch.dtype):
    x = random(3, 2 * width, dtype=dtype)
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(silu_gate(x), torch.nn.functional.silu(gate) * up)
