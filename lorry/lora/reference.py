"""LoRA's arithmetic in plain torch, for the reference backends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lorry.threads import one_thread

_INVARIANT_RANK = 2
"""As `invariant_rows`, of columns: a single one is multiplied by another routine, whose sums run in another order."""


def invariant_rows(dtype: torch.dtype, device: torch.device) -> int:
    """From so many rows up a product gives each row the same bits whatever the number of rows (measured on x86-64).

    Padding to it makes an answer independent of what else is in the batch. Only CPUs are padded.
    """
    if device.type != "cpu":
        return 1
    return 12 if dtype == torch.float32 else 2


def pad_rows(x: Tensor) -> Tensor:
    """x [n, ...] with zero rows behind it, up to `invariant_rows`."""
    missing = invariant_rows(x.dtype, x.device) - x.shape[0]
    return pad(x, (0, 0, 0, missing)) if missing > 0 else x


def lora_delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * (x a^T) b in float32: x [n, in], a [rank, in], b [rank, out] -> [n, out].

    On a CPU a row's result does not depend on the other rows or their number, so that an answer does not depend on
    what else is in the batch.
    """
    missing = _INVARIANT_RANK - a.shape[0]
    a, b = a.float(), b.float()
    if missing > 0:
        a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, 0, 0, missing))
    with one_thread():
        shrunk = pad_rows(x.float()) @ a.T * scale
        return (shrunk @ b)[: x.shape[0]]
