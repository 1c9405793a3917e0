"""Decoder layers in few launches: sibling products as one; LoRA, norms and rotary inside what stands beside them.

A layer is replaced only where it has the plain form (norm, attention of q, k, v, o, add, norm, MLP, add) and proves
to give what the original gives; every other layer runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lorry.attention.base import AttentionBackend, AttentionParams
from lorry.kernels.dense_fused import Heads, Projected, add_and_norm, norm_rotate_write, project, shrink_after
from lorry.kernels.leaves import rms_norm, silu_gate
from lorry.kv.pool import LayerKV
from lorry.lora.manager import LoRAManager
from lorry.models.grafts import norm_eps
from lorry.models.sites import Site


class Siblings:
    """Linears that read one input, as one product; their own weights become views of the one matrix."""

    def __init__(self, linears: Mapping[str, nn.Linear], sites: Mapping[str, Site], manager: LoRAManager) -> None:
        """`linears` and `sites` by path; without LoRA there are no sites."""
        self._manager = manager
        self._sites = tuple(sites[path].index for path in linears if path in sites)
        modules = list(linears.values())
        self.weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        first = 0
        for module in modules:
            module.weight.data = self.weight[first : first + module.out_features]
            first += module.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, sum of out], LoRA included."""
        y = linear(x, self.weight, self.bias)
        if self._manager.applies_to(*self._sites):
            self._manager.add_lora(y, x, *self._sites)
        return y

    def project(self, x: Tensor) -> tuple[Projected, Any]:
        """The product for a kernel that adds the LoRA while it reads it; and that LoRA, None where it is added."""
        lora = self._manager.group_lora(*self._sites)
        if lora is None and self._manager.applies_to(*self._sites):
            return Projected(self(x)[None], None), None
        if self.bias is not None:
            return shrink_after(x, linear(x, self.weight, self.bias), lora), lora
        return project(x, self.weight, lora), lora


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        eps = norm_eps(module)
        assert eps is not None
        return cls(module.get_parameter("weight"), eps)


class NormInput:
    """Where a norm finds its result if the layer before has computed it already."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm
        self._ready: tuple[Tensor, Tensor] | None = None

    def add(self, residual: Tensor, update: Tensor) -> Tensor:
        """residual [T, H] += update, in place, and this norm of it; returns the sum as [1, T, H]."""
        x = add_and_norm(Projected(update[None], None), None, residual, self.norm.weight, self.norm.eps)
        hidden = residual[None]
        self._ready = hidden, x
        return hidden

    def take(self, hidden: Tensor) -> Tensor:
        """The norm of hidden [1, T, H] as [T, H], computed only if `hidden` is not what `add` has returned."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is hidden:
            return ready[1]
        return rms_norm(hidden[0], self.norm.weight, self.norm.eps)


class Angles:
    """Cosines and sines of a step as the kernels take them; made once for all layers of a step."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None
        self._full: tuple[Tensor, Tensor] | None = None

    def __call__(self, given: tuple[Tensor, Tensor], width: int) -> tuple[Tensor, Tensor]:
        """[1, T, width], or [1, T, width / 2] where both halves are alike (gpt-oss) -> [T, width]."""
        if given[0].shape[-1] == width:
            return given[0][0], given[1][0]
        if self._full is None or self._given is None or self._given[0] is not given[0]:
            cos, sin = (torch.cat([angle[0], angle[0]], dim=-1) for angle in given)
            self._given, self._full = given, (cos, sin)
        return self._full


class GatedMLP:
    """down(silu(gate(x)) * up(x)) in two products."""

    def __init__(self, path: str, module: Any, sites: Mapping[str, Site], manager: LoRAManager) -> None:
        first = {f"{path}.{name}": getattr(module, name) for name in ("gate_proj", "up_proj")}
        self._gate_up = Siblings(first, sites, manager)
        self._down = Siblings({f"{path}.down_proj": module.down_proj}, sites, manager)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        y = self._down(silu_gate(self._gate_up(x.reshape(-1, x.shape[-1]))))
        return y.view(*x.shape[:-1], -1)


class Block:
    """A decoder layer of the plain form; `forward` stands in for the layer's own."""

    def __init__(
        self,
        path: str,
        layer: Any,
        sites: Mapping[str, Site],
        manager: LoRAManager,
        attention: AttentionBackend,
        kv: LayerKV,
        params: AttentionParams,
        angles: Angles,
    ) -> None:
        """`following` is the input of the norm that comes after the layer, None where that is another's business."""
        own = layer.self_attn
        names = [f"{path}.self_attn.{name}_proj" for name in "qkv"]
        self._qkv = Siblings(
            {name: getattr(own, f"{letter}_proj") for name, letter in zip(names, "qkv", strict=True)}, sites, manager
        )
        self._o = Siblings({f"{path}.self_attn.o_proj": own.o_proj}, sites, manager)
        norms = [Norm.of(own.q_norm), Norm.of(own.k_norm)] if hasattr(own, "q_norm") else []
        self._q_norm = norms[0].weight if norms else None
        self._k_norm = norms[1].weight if norms else None
        self._head_eps = norms[0].eps if norms else 0.0
        self._post_norm = Norm.of(layer.post_attention_layernorm)
        self._mlp = layer.mlp
        self._width = kv.keys.shape[2]
        self._num_kv = kv.keys.shape[1]
        self._num_q = own.q_proj.out_features // self._width
        self._attention, self._kv, self._params, self._angles = attention, kv, params, angles
        self.input = NormInput(Norm.of(layer.input_layernorm))
        self.following: NormInput | None = None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, H], overwritten, and `position_embeddings` (cos, sin) [1, T, D] -> [1, T, H]."""
        residual = hidden_states[0]
        cos, sin = self._angles(kwargs["position_embeddings"], self._width)
        projected, lora = self._qkv.project(self.input.take(hidden_states))
        heads = Heads(self._num_q, self._num_kv, self._q_norm, self._k_norm, self._head_eps, cos, sin)
        num_rows = residual.shape[0]
        slots = self._attention.write_slots
        if len(slots) < num_rows:
            slots = pad(slots, (0, num_rows - len(slots)), value=-1)
        q = norm_rotate_write(projected, lora, heads, self._kv.keys, self._kv.values, slots)
        q = q.view(num_rows, self._num_q, self._width)
        attended = self._attention.run(q, None, None, self._kv, self._params).reshape(num_rows, -1)
        projected, lora = self._o.project(attended)
        x = add_and_norm(projected, lora, residual, self._post_norm.weight, self._post_norm.eps)
        update = self._mlp(x[None])
        update = update[0] if isinstance(update, tuple) else update
        if self.following is None:
            return residual.add_(update.view(num_rows, -1))[None]
        return self.following.add(residual, update.view(num_rows, -1))
