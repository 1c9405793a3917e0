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
