"""The integers of a step on the device: one packed copy from pinned memory, to fixed addresses for graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorry.upload import on_host, upload

Ints = npt.NDArray[np.int32]

_ALIGNMENT = 16
"""Integers to which every array is aligned: a kernel is compiled anew for a pointer that is not aligned so."""


class StepBuffers:
    """Copies the int32 arrays of a step to the device with one copy and no synchronisation (see `upload`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fixed: Tensor | None = None
        self._starts: list[int] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate the fixed buffer for arrays of at most these sizes."""
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._fixed = torch.full((self._starts[-1],), -1, dtype=torch.int32, device=self._device)

    def fill(self, arrays: Sequence[Ints], fixed: bool) -> list[Tensor]:
        """The arrays on the device; with `fixed` at the addresses reserved, else in new memory."""
        if not fixed:
            return upload(arrays, self._device)
        assert self._fixed is not None
        packed = np.full(self._starts[-1], -1, dtype=np.int32)
        for start, limit, array in zip(self._starts, self._starts[1:], arrays, strict=False):
            assert len(array) <= limit - start
            packed[start : start + len(array)] = array
        self._fixed.copy_(on_host(packed, self._device), non_blocking=True)
        return [self._fixed[start : start + len(array)] for start, array in zip(self._starts, arrays, strict=False)]
