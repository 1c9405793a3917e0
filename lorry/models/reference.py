"""The self-check at load: our logits of a short prompt against those of the plain model, before our hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorry.errors import UnsupportedModel
from lorry.models.sites import find_experts

NUM_TOKENS = 12
SPLIT = 7
"""Our own forward comes in two chunks, cut here, so that the second one reads keys and values of the first."""

ROWS_THAT_AGREE = 0.8
"""Share of the rows whose logits must agree: a fault of attention, rotary, scale or experts moves a third or more."""

SHARED_CHOICES = 0.75
"""Share of the experts of each layer that our router must choose too: rounding flips a few that are nearly equal."""


class Routing(NamedTuple):
    """Experts and weights [n, K] that a layer's router gave."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Reference:
    """A short prompt [n], the plain model's logits [n, vocab] (float32), and the routing of each experts module."""

    token_ids: tuple[int, ...]
    logits: Tensor
    routing: Mapping[str, Routing] = field(default_factory=dict)


@torch.inference_mode()
def take_reference(model: PreTrainedModel) -> Reference:
    """Run the plain model on the prompt."""
    vocab = model.get_input_embeddings().weight.shape[0]
    token_ids = tuple((7 + 31 * i) % vocab for i in range(NUM_TOKENS))
    routing: dict[str, Routing] = {}
    hooks = [module.register_forward_pre_hook(_record(routing, path)) for path, module in find_experts(model).items()]
    inputs = torch.tensor([token_ids], device=model.device)
    try:
        logits = model(input_ids=inputs, use_cache=False).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    return Reference(token_ids, logits, routing)


def _record(routing: dict[str, Routing], path: str) -> Callable[[Any, tuple[Any, ...]], None]:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        _, index, weights = args
        routing[path] = Routing(index.clone(), weights.clone())

    return hook


class _ImposedRouting:
    """Makes experts run with the reference's routing, and keeps what our routers gave.

    In 16-bit types rounding makes a router prefer another of two experts that are nearly equal. From there on the
    row is another one, though nothing is wrong; so the choice is imposed, and routers are compared one by one.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.rows = range(0)
        self.ours: dict[str, list[Routing]] = {path: [] for path in reference.routing}

    def hook(self, path: str) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
        def impose(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights = args
            count, (theirs, their_weights) = len(self.rows), self._reference.routing[path]
            self.ours[path].append(Routing(index[:count].clone(), weights[:count].clone()))
            rows = slice(self.rows.start, self.rows.stop)
            index = torch.cat([theirs[rows].to(index.dtype), index[count:]])
            return hidden, index, torch.cat([their_weights[rows].to(weights.dtype), weights[count:]])

        return impose


def self_check(model: PreTrainedModel, reference: Reference, forward: Callable[[int, int], Tensor]) -> None:
    """Compare `forward(start, stop)`, our logits of that part of the prompt, with the reference's.

    Raises `UnsupportedModel` where the model would be served wrongly. The error of a row is the root mean square of
    its difference, in units of the spread of all logits. Rounding gives 0.03 at most in 16-bit types (48 layers). On
    the tiny models of the tests, a wrong scale, rotary or sink gives 0.1 to 1 in all rows but the first, a wrong mask
    or order of experts 0.3 to 1.5 in all, and a forgotten first chunk about 1 in the five rows of the second.
    """
    imposed = _ImposedRouting(reference)
    experts = {path: module for path, module in find_experts(model).items() if path in reference.routing}
    hooks = [module.register_forward_pre_hook(imposed.hook(path)) for path, module in experts.items()]
    parts = []
    try:
        for start, stop in ((0, SPLIT), (SPLIT, len(reference.token_ids))):
            imposed.rows = range(start, stop)
            parts.append(forward(start, stop))
    finally:
        for hook in hooks:
            hook.remove()
    for path, ours in imposed.ours.items():
        assert len(ours) == 2, f"{path} must be called as a module, once in each forward"
        _check_router(model, path, Routing(*map(torch.cat, zip(*ours, strict=True))), reference.routing[path])
    check_logits(model, reference, torch.cat(parts))


def check_logits(model: PreTrainedModel, reference: Reference, logits: Tensor) -> None:
    """The part of the self-check about logits [n, vocab]."""
    spread = max(reference.logits.std().item(), 1e-6)
    errors = (logits.float() - reference.logits).square().mean(dim=-1).sqrt() / spread
    bound = _bound(model, exact=1e-4, tf32=1e-2, rounded=0.1)
    agree = (errors <= bound).float().mean().item()
    if not agree >= ROWS_THAT_AGREE:
        raise UnsupportedModel(
            f"{model.config.model_type}: the self-check failed: of {len(errors)} rows of logits {agree:.0%} agree "
            f"with the plain model's (error up to {bound:g} of their spread), the median error is "
            f"{errors.median().item():.3g}, so it would be served wrongly"
        )


def _check_router(model: PreTrainedModel, path: str, ours: Routing, theirs: Routing) -> None:
    size = int(max(ours.experts.max(), theirs.experts.max())) + 1
    our_weights, their_weights = _by_expert(ours, size), _by_expert(theirs, size)
    both = ~(our_weights.isnan() | their_weights.isnan())
    shared = both.sum().item() / theirs.experts.numel()
    differences = (our_weights - their_weights)[both].abs() / their_weights[both].abs().clamp_min(1e-12)
    difference = differences.median().item() if len(differences) else 0.0
    bound = _bound(model, exact=1e-3, tf32=2e-2, rounded=0.2)
    if not (shared >= SHARED_CHOICES and difference <= bound):
        raise UnsupportedModel(
            f"{model.config.model_type}: the self-check failed: of the experts that the router beside {path} should "
            f"choose, ours chose {shared:.0%} (at least {SHARED_CHOICES:.0%} expected), with weights that differ by "
            f"{difference:.2g} (at most {bound:g} expected), so it would be served wrongly"
        )


def _by_expert(routing: Routing, size: int) -> Tensor:
    """[n, size] weights, NaN for experts that were not chosen."""
    table = torch.full((len(routing.experts), size), float("nan"), device=routing.experts.device)
    return table.scatter_(1, routing.experts.long(), routing.weights.float())


def _bound(model: PreTrainedModel, exact: float, tf32: float, rounded: float) -> float:
    """By type; in float32 on CUDA, tensor cores round to TF32."""
    if model.dtype != torch.float32:
        return rounded
    return tf32 if model.device.type == "cuda" else exact
