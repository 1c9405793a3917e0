"""Arithmetic of sampling: uniform numbers by seed and position, penalties, filters, and the draw itself.

Everything is by rows: a row's result does not depend on the others. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 128
"""Tokens whose probabilities are summed together first: a draw looks for the block, then for the token in it."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[n] in [0, 1) with 53 bits, a function of seed and position alone.

    SplitMix64 (Steele, Lea, Flood 2014), its state at the start scrambled from the seed.
    """
    seed = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64) + np.uint64(1)
    bits: npt.NDArray[np.uint64] = _mix(_mix(seed) + position * _GOLDEN) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def penalise(x: Tensor, prompts: Tensor, outputs: Tensor, starts: Tensor, pending: Tensor, factors: Tensor) -> Tensor:
    """Repetition penalty over prompt and output (CTRL, Keskar et al. 2019); frequency and presence over output only.

    x [m, vocab] float32. `prompts` and `outputs` are places `row * vocab + token`, int64, in any order and number.
    `pending` are tokens of the output that only the device knows, in rows that begin at `starts`.
    `factors` [3, m, 1]: repetition, frequency, presence. Not in place.
    """
    repetition, frequency, presence = factors.unbind()
    places = torch.cat([outputs, starts + pending])
    counts = x.new_zeros(x.numel()).scatter_add_(0, places, x.new_ones(1).expand(len(places))).view(x.shape)
    seen = torch.zeros(x.numel(), dtype=torch.bool, device=x.device).index_fill_(0, prompts, True).view(x.shape)
    seen |= counts > 0
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


def filter_sorted(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero what top-k and then top-p leave out; the most likely token always stays.

    p [m, vocab] float32, each row descending, of any sum. `top_k` [m, 1] int64 from 1 to vocab. `top_p` [m, 1]
    float64, a share of what top-k kept: tokens stay while those before them have less; inf: all stay.
    """
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    rank = torch.arange(p.shape[1], device=p.device)
    kept = cumulative.gather(1, top_k - 1)
    keep = (rank < top_k) & (cumulative - p < top_p * kept) | (rank == 0)
    return p.where(keep, 0.0)


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """The column of each row where the running sum of p passes `uniform` of its total: [m] int64, never one with p 0.

    p [m, vocab] float32, not negative, with a positive sum that need not be 1; `uniform` [m] float64 in [0, 1).
    """
    missing = -p.shape[1] % _BLOCK
    p = (pad(p, (0, missing)) if missing else p).view(len(p), -1, _BLOCK)
    sums = p.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    target = ends[:, -1:] * uniform[:, None]
    block = _first_above(ends, target, sums)
    before = ends.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    inside = p.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    place = _first_above(inside.cumsum(dim=-1), target - before, inside)
    return (block * _BLOCK + place)[:, 0]


def _first_above(ends: Tensor, target: Tensor, parts: Tensor) -> Tensor:
    """Where `ends` [m, n], the running sums of `parts`, first exceed `target` [m, 1].

    Where rounding hides that place it is the last part above 0.
    """
    last = (torch.arange(parts.shape[1], device=parts.device) * (parts > 0)).amax(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)
