"""Which of the kernels' activations a layer has, found by trying: names and attributes alone are not proof."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lorry.kernels.moe_weights import Activation
from lorry.lora.experts.base import ExpertsLayer

_ALPHA_NAMES = ("alpha", "swiglu_alpha")
_LIMIT_NAMES = ("limit", "swiglu_limit")


def apply_activation(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """The formulas of `kernels.moe_tile.activation` in torch."""
    if activation.kind == "silu":
        return up * torch.sigmoid(up)
    if activation.kind == "relu2":
        return up.clamp(min=0).square()
    if activation.kind == "none":
        return up
    assert gate is not None
    if activation.kind == "glu_clamped":
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def _candidates(layer: ExpertsLayer) -> Iterator[Activation]:
    if not layer.module.has_gate:
        yield Activation("silu")
        yield Activation("relu2")
        return
    yield Activation("glu")
    for name in _LIMIT_NAMES:
        limit = getattr(layer.module, name, None)
        if isinstance(limit, (int, float)):
            yield Activation("glu_clamped", limit=float(limit))
            for alpha_name in _ALPHA_NAMES:
                alpha = getattr(layer.module, alpha_name, None)
                if isinstance(alpha, (int, float)):
                    yield Activation("glu_clamped", float(alpha), 1.0, float(limit))


def find_activation(layer: ExpertsLayer) -> Activation | None:
    """The candidate that equals the module's own activation on random values; None where none does.

    Tried on the CPU in float32, so that nothing waits for the device; the values reach past usual clamps.
    """
    down = layer.module.down_proj
    inter = down.shape[1] if layer.module.is_transposed else down.shape[2]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(4, inter * (2 if layer.module.has_gate else 1), generator=generator) * 6
    try:
        expected = layer.activate(sample)
    except RuntimeError:  # an activation with parameters of its own lives on the device
        return None
    gate, up = layer.gate_and_up(sample)
    for candidate in _candidates(layer):
        if torch.allclose(apply_activation(candidate, gate, up), expected, rtol=1e-5, atol=1e-5):
            return candidate
    return None
