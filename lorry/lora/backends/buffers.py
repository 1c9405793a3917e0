"""The integers of a step on the device: one packed copy from pinned memory, to fixed addresses for graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

_ALIGNMENT = 16
"""Integers to which every array is aligned: a kernel is compiled anew for a pointer that is not aligned so."""


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and the end of all."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


class StepBuffers:
    """Copies the int32 arrays of a step to the device with one copy and no synchronisation.

    Every step packs into pinned memory of its own. PyTorch's allocator of pinned memory gives a block out again only
    after the copies that read it are done, so a step that is prepared while the last one's copy still waits in the
    stream cannot overwrite it, and nobody waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fixed: Tensor | None = None
        self._starts: list[int] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate the fixed buffer for arrays of at most these sizes."""
        self._starts = _starts(sizes)
        self._fixed = torch.full((self._starts[-1],), -1, dtype=torch.int32, device=self._device)

    def fill(self, arrays: Sequence[Ints], fixed: bool) -> list[Tensor]:
        """The arrays on the device; with `fixed` at the addresses reserved, else in new memory."""
        starts = self._starts if fixed else _starts([len(array) for array in arrays])
        packed = np.full(starts[-1], -1, dtype=np.int32)
        for start, limit, array in zip(starts, starts[1:], arrays, strict=False):
            assert len(array) <= limit - start
            packed[start : start + len(array)] = array
        host = torch.from_numpy(packed)
        if self._device.type == "cuda":
            host = host.pin_memory()
        if fixed:
            assert self._fixed is not None
            self._fixed.copy_(host, non_blocking=True)
            target = self._fixed
        else:
            target = host.to(self._device, non_blocking=True)
        return [target[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
