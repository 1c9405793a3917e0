"""The tensors of an adapter file on their way to weights: read, checked and cast, with what the config claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorry.errors import AdapterFormatError
from lorry.lora.format import FactorKeys, Target
from lorry.lora.format_config import AdapterConfig

FILE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class PlacedPair:
    """A pair of factors and what it adapts."""

    keys: FactorKeys
    target: Target

    def names(self, leaf: str = "") -> list[str]:
        """The paths under which patterns may mean this pair: the trainer's and the base model's."""
        tail = f".{leaf}" if leaf else ""
        return list(dict.fromkeys((self.keys.path + tail, self.target.module + tail)))


@dataclass
class Source:
    """The tensors of one adapter, what its config claims, and the dtype that is wanted.

    `other_ranks` collects the expert modules whose rank is not the one that the config claims.
    """

    tensors: Mapping[str, Tensor]
    config: AdapterConfig
    dtype: torch.dtype
    other_ranks: list[str] = field(default_factory=list)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].shape)

    def cast(self, key: str, factor: float = 1.0) -> Tensor:
        """A contiguous copy in the wanted dtype on the host, times `factor`; every number of it is finite."""
        tensor = self.tensors[key].detach()
        if tensor.dtype not in FILE_DTYPES or tensor.layout != torch.strided:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FILE_DTYPES)
            found = f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
            raise AdapterFormatError(f"tensor {key!r} is {found}: save it dense, as one of {known}")
        scaled = tensor if factor == 1.0 else tensor.to(torch.float32) * factor
        result = scaled.to("cpu", self.dtype, copy=True, memory_format=torch.contiguous_format)
        if not torch.isfinite(result).all():
            if not torch.isfinite(tensor).all():
                raise AdapterFormatError(f"tensor {key!r} holds NaN or infinite numbers: the adapter is damaged")
            raise AdapterFormatError(
                f"tensor {key!r} holds numbers too large for {self.dtype}: serve in a wider dtype"
            )
        return result

    def scale(self, pair: PlacedPair, names: Sequence[str], rank: int) -> float:
        key = pair.keys.alpha
        own_alpha = None
        if key is not None:
            tensor = self.tensors[key]
            own_alpha = float(tensor) if tensor.numel() == 1 and not tensor.is_complex() else math.nan
            if not math.isfinite(own_alpha):
                raise AdapterFormatError(f"tensor {key!r} of shape {self.shape(key)} must be one finite number")
        return self.config.scale(names, rank, own_alpha)
