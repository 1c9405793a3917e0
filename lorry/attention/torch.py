"""Reference attention in plain torch: sequence by sequence, so that no result depends on its neighbours."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lorry.attention.base import ATTENTION_BACKENDS, AttentionBatch, AttentionParams
from lorry.config import PAGE_SIZE
from lorry.kv.pool import LayerKV
from lorry.threads import one_thread

_SHARED_WORK = 4096
"""From so many pairs of query and key up, attention is worth several threads on a CPU."""


class TorchAttention:
    """Gathers the context of each sequence and calls torch's attention; softcap and sinks in explicit arithmetic."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        device = batch.write_slots.device
        within = torch.arange(PAGE_SIZE, device=device)
        self._context_slots = torch.cat(
            [
                (torch.tensor(pages, device=device)[:, None] * PAGE_SIZE + within).flatten()[:length]
                for pages, length in zip(batch.pages, batch.context_lens, strict=True)
            ]
        )
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    @property
    def write_slots(self) -> Tensor:
        return self._batch.write_slots

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: LayerKV, params: AttentionParams) -> Tensor:
        num_rows = len(self._batch.write_slots)
        if k is not None and v is not None:
            kv.keys[self._batch.write_slots] = k[:num_rows]
            kv.values[self._batch.write_slots] = v[:num_rows]
        attend = _attend_explicitly if params.sinks is not None or params.softcap else _attend
        queries = q[:num_rows].split_with_sizes(self._batch.query_lens)
        keys = kv.keys[self._context_slots].split_with_sizes(self._batch.context_lens)
        values = kv.values[self._context_slots].split_with_sizes(self._batch.context_lens)
        out = []
        for i, query in enumerate(queries):
            mask = self._mask(i, params.sliding_window)
            with one_thread() if len(query) * len(keys[i]) < _SHARED_WORK else nullcontext():
                out.append(attend(query, keys[i], values[i], mask, params))
        return torch.cat([*out, q.new_zeros(q.shape[0] - num_rows, q.shape[1], kv.values.shape[2])])

    def _mask(self, i: int, window: int | None) -> Tensor | None:
        """Boolean [rows, context] of what each row of sequence i may see; None when it sees all."""
        key = (i, window)
        if key not in self._masks:
            count, length = self._batch.query_lens[i], self._batch.context_lens[i]
            if count == 1 and (window is None or window >= length):
                self._masks[key] = None
            else:
                columns = torch.arange(length, device=self._batch.write_slots.device)
                position = columns[length - count :, None]
                mask = columns <= position
                if window is not None:
                    mask &= columns > position - window
                self._masks[key] = mask
        return self._masks[key]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """q [n, H, D], k [s, Hkv, D], v [s, Hkv, Dv] -> [n, H, Dv]."""
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=params.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_explicitly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """As `_attend`, in float32, with a cap c * tanh(s / c) on the scores and with sinks."""
    n, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q.float(), keys) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float()[:, None, None].expand(num_heads, n, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[0]]
    return torch.einsum("hns,shd->nhd", weights, values).to(q.dtype)


ATTENTION_BACKENDS["torch"] = TorchAttention
