"""Grafts: leaves of a model that one launch each does better. Each is proven on random input, or left as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lorry.kernels.leaves import choose_experts, rms_norm
from lorry.models.sites import find_routers

NUM_SAMPLES = 12
"""Rows of random input of a proof."""


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results are the same but for rounding: each within two units in the last place, or the like of the
    spread of all, in 16-bit types; 1e-5 in float32."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    unit = 1e-5 if ours.dtype == torch.float32 else 2 * torch.finfo(ours.dtype).eps
    scale = theirs.float().std(correction=0).item()
    return torch.allclose(ours.float(), theirs.float(), rtol=unit, atol=unit * scale)


def norm_eps(module: nn.Module) -> float | None:
    """Epsilon of a module that looks like an RMSNorm: a vector as its only parameter, and `variance_epsilon`."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if not isinstance(eps, float) or set(parameters) != {"weight"} or parameters["weight"].ndim != 1:
        return None
    return eps


@torch.no_grad()
def is_rms_norm(module: nn.Module) -> bool:
    """Whether the module computes what `kernels.leaves.rms_norm` does."""
    eps = norm_eps(module)
    if eps is None or list(module.children()):
        return False
    weight: Tensor = module.get_parameter("weight")
    x = 3 * torch.randn(NUM_SAMPLES, weight.shape[0], device=weight.device, dtype=weight.dtype)
    theirs = module.forward(x)
    return isinstance(theirs, Tensor) and agree(rms_norm(x, weight, eps), theirs)


def _norm_forward(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden_states: rms_norm(hidden_states, weight, eps)


_ROUTERS = ((True, True), (True, False), (False, True))
"""(softmax over all experts first, weights divided by their sum): the routers that are known."""


def _router_forward(
    weight: Tensor, bias: Tensor | None, choose: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_states.reshape(-1, weight.shape[1]), weight, bias)
        return logits, *choose(logits)

    return forward


@torch.no_grad()
def find_router(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None:
    """A forward that gives what the router's own gives, (logits, weights, index), or None."""
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    if set(dict(module.named_parameters())) - {"weight", "bias"} or list(module.buffers()):
        return None
    # Far apart, so that rounding leaves no two logits equal, whose order would be anybody's.
    x = 3 * torch.randn(NUM_SAMPLES, weight.shape[1], device=weight.device, dtype=weight.dtype)
    theirs = module.forward(x)
    if not isinstance(theirs, tuple) or len(theirs) != 3 or theirs[1].shape != theirs[2].shape:
        return None
    for softmax_first, normalise in _ROUTERS:
        choose: Any = partial(
            choose_experts, num_choices=theirs[2].shape[-1], dtype=theirs[1].dtype, softmax_first=softmax_first,
            normalise=normalise,
        )  # fmt: skip
        forward = _router_forward(weight, bias, choose)
        logits, weights, index = forward(x)
        same_experts = torch.equal(logits.gather(1, index.long()), theirs[0].gather(1, theirs[2]))
        if same_experts and agree(weights, theirs[1]) and agree(logits, theirs[0]):
            return forward
    return None


def graft_leaves(model: nn.Module, report: Callable[[str], None]) -> None:
    """Replace the forward of every norm and router for which a kernel gives the same; `report` says what was left.

    LoRA is attached to routers afterwards: it is added to the product within their forward.
    """
    routers, left = find_routers(model), dict[str, int]()
    for path, module in model.named_modules():
        name = type(module).__name__
        if norm_eps(module) is not None:
            if is_rms_norm(module):
                module.forward = _norm_forward(module.get_parameter("weight"), norm_eps(module) or 0.0)
            else:
                left[name] = left.get(name, 0) + 1
        elif path in routers:
            forward = find_router(module)
            if forward is not None:
                module.forward = forward
            else:
                left[name] = left.get(name, 0) + 1
    for name, count in left.items():
        report(f"{count} {name}: no kernel is known for them, so they run as transformers wrote them, slower")
