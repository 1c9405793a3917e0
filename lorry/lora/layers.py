"""Puts LoRA into a transformers model: linear layers, routers and experts get a forward that knows the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from lorry.errors import UnsupportedModel
from lorry.lora.manager import LoRAManager
from lorry.models.sites import Site


def attach_lora(model: nn.Module, sites: Sequence[Site], manager: LoRAManager) -> None:
    """Give every linear and router site of the model LoRA by `manager`; experts are bound by the manager itself."""
    modules = dict(model.named_modules())
    by_kind: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        by_kind[site.kind].append(site)
    for site in by_kind["linear"]:
        module = modules[site.module]
        module.forward = _linear_forward(module.forward, site.index, manager)
    for site in by_kind["router"]:
        module = modules[site.module]
        _check_router(module, site)
        module.forward = _router_forward(module.forward, site.index, manager)


def _linear_forward(base: Callable[..., Tensor], site: int, manager: LoRAManager) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y = base(x)
        if manager.applies_to(site):
            manager.add_lora(y, x, site)
        return y

    return forward


class _LinearHook(TorchFunctionMode):
    """Within a router's forward, calls `then(y, x)` after its linear product, on the logits."""

    def __init__(self, then: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._then = then

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is linear:
            self._then(result, args[0])
        return result


def _router_forward(base: Callable[..., Any], site: int, manager: LoRAManager) -> Callable[[Tensor], Any]:
    """Routers own their product, so LoRA is added to its result, before scores and top-k are taken of it."""

    def forward(hidden: Tensor) -> Any:
        if not manager.applies_to(site):
            return base(hidden)
        with _LinearHook(lambda y, x: manager.add_lora(y, x, site)):
            return base(hidden)

    return forward


def _check_router(router: nn.Module, site: Site) -> None:
    """A router must take exactly one linear product, of its logits; anything else would be served wrongly."""
    outputs: list[Tensor] = []
    weight = next(router.parameters())
    with torch.no_grad(), _LinearHook(lambda y, x: outputs.append(y)):
        router.forward(weight.new_zeros(2, site.in_features))
    if [tuple(y.shape) for y in outputs] != [(2, site.out_features)]:
        raise UnsupportedModel(
            f"router {site.module} ({type(router).__name__}) does not take one linear product of its logits, "
            "so adapters on it cannot be served; start with --no-enable-lora to serve the base alone"
        )
