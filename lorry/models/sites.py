"""Where LoRA can attach: the linear layers, expert projections and routers of a transformers model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

SiteKind = Literal["linear", "router", "experts"]

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Site:
    """One matrix (or one per expert) that an adapter may change: y += scale * B (A x).

    `module` is the path of the module that owns the base weight, `name` is unique: the same path, and for experts
    the projection behind it, `model.layers.3.mlp.experts.gate_proj`. Gate and up of an expert are two sites of
    `out_features` I each, however the base stores them. `interleaved` says that the base's fused gate_up rows
    alternate (gpt-oss) instead of following each other. `transposed` says that the base stores [E, in, out].
    """

    index: int
    name: str
    kind: SiteKind
    module: str
    in_features: int
    out_features: int
    num_experts: int = 1
    interleaved: bool = False
    transposed: bool = False

    @property
    def leaf(self) -> str:
        """Last part of the name: `q_proj`, `gate_proj`, or for a router the module's own name."""
        return self.name.rpartition(".")[2]

    def num_elements(self, rank: int) -> int:
        """Elements of A and B together at `rank`."""
        return self.num_experts * rank * (self.in_features + self.out_features)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' experts interface decorates this module (it then has these class attributes)."""
    return hasattr(module, "has_gate") and isinstance(getattr(module, "down_proj", None), nn.Parameter)


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Path -> module of every fused experts module."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def find_routers(model: nn.Module) -> dict[str, Any]:
    """Path -> module of every router: the sibling of an experts module that owns a weight [num_experts, hidden].

    Linear routers are left out: they are ordinary linear sites.
    """
    modules = dict(model.named_modules())
    routers: dict[str, Any] = {}
    for path, experts in find_experts(model).items():
        parent = path.rpartition(".")[0]
        for child_name, child in modules[parent].named_children():
            weight = child._parameters.get("weight")
            if (
                weight is not None
                and not isinstance(child, nn.Linear)
                and weight.ndim == 2
                and weight.shape[0] == experts.num_experts
            ):
                routers[f"{parent}.{child_name}"] = child
    return routers


def _expert_sites(path: str, module: Any, first_index: int) -> list[Site]:
    num_experts, rows, columns = module.down_proj.shape
    transposed = bool(module.is_transposed)
    hidden, inter = (columns, rows) if transposed else (rows, columns)
    sites: list[Site] = []
    for projection in EXPERT_PROJECTIONS:
        if projection == "gate_proj" and not module.has_gate:
            continue
        down = projection == "down_proj"
        sites.append(
            Site(
                index=first_index + len(sites),
                name=f"{path}.{projection}",
                kind="experts",
                module=path,
                in_features=inter if down else hidden,
                out_features=hidden if down else inter,
                num_experts=num_experts,
                interleaved=bool(module.has_gate) and not module.is_concatenated and not down,
                transposed=transposed,
            )
        )
    return sites


def find_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """All sites in the order of the model's modules; the output head and embeddings are not among them.

    `index` of a site is its row in the device tables and its place in the returned tuple.
    """
    head = model.get_output_embeddings()
    routers = find_routers(model)
    sites: list[Site] = []
    for path, module in model.named_modules():
        if is_experts(module):
            sites += _expert_sites(path, module, len(sites))
        elif path in routers:
            num_experts, hidden = routers[path].weight.shape
            sites.append(Site(len(sites), path, "router", path, hidden, num_experts))
        elif isinstance(module, nn.Linear) and module is not head:
            sites.append(Site(len(sites), path, "linear", path, module.in_features, module.out_features))
    return tuple(sites)
