"""Many small arrays to the device in one copy that the host does not wait for, and results back likewise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGN = 256
"""Bytes at whose multiples the arrays start: kernels always find the same alignment, as in memory of their own."""


def on_host(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor from which a copy to the device does not make the host wait: for a GPU in pinned memory.

    PyTorch gives a pinned block out again only after the copies that read it are done, so the next step can be packed
    while the copy of the last one still waits in the stream.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in their own types and shapes, in the order of the current stream.

    Each call packs into memory of its own, see `on_host`.
    """
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
    packed = np.zeros(max(starts[-1], _ALIGN), dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = on_host(packed, device).to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


class FixedArrays:
    """Room for the int32 arrays of a step at addresses that never change, as captured graphs read them."""

    _ALIGNMENT = 16  # integers: a kernel is compiled anew for a pointer that is not aligned so

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """For arrays of at most these numbers of elements."""
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // self._ALIGNMENT) * self._ALIGNMENT)
        self._data = torch.full((self._starts[-1],), -1, dtype=torch.int32, device=device)

    def fill(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        """The arrays in their places on the device, in their shapes; what they leave of their room is -1."""
        packed = np.full(self._starts[-1], -1, dtype=np.int32)
        for start, limit, array in zip(self._starts, self._starts[1:], arrays, strict=False):
            assert array.size <= limit - start
            packed[start : start + array.size] = array.reshape(-1)
        self._data.copy_(on_host(packed, self._data.device), non_blocking=True)
        return [
            self._data[start : start + array.size].view(array.shape)
            for start, array in zip(self._starts, arrays, strict=False)
        ]


def download(tensor: Tensor) -> Tensor:
    """A copy on the host, in pinned memory; it is there once what the current stream holds so far is done."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


_DTYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
