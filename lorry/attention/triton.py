"""Attention on CUDA: steps of decodes alone by the paged Triton kernel, steps with prefill by the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from lorry.attention.base import ATTENTION_BACKENDS, AttentionBatch, AttentionParams, DecodeBatch
from lorry.attention.torch import TorchAttention
from lorry.config import PAGE_SIZE
from lorry.kernels.paged_attention import paged_decode, write_kv
from lorry.kv.pool import LayerKV


class TritonAttention:
    """A decode step needs nothing but its page table and lengths on the device, so it can be captured in a graph."""

    name = "triton"

    def __init__(self) -> None:
        self._reference = TorchAttention()
        self._decode: DecodeBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        if set(batch.query_lens) != {1}:
            self._decode = None
            self._reference.plan(batch)
            return
        device = batch.write_slots.device
        table = torch.zeros(len(batch.pages), max(map(len, batch.pages)), dtype=torch.int32)
        for i, pages in enumerate(batch.pages):
            table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        lens = torch.tensor(batch.context_lens, dtype=torch.int32)
        self._decode = DecodeBatch(table.to(device), lens.to(device), batch.write_slots)

    def plan_decode(self, batch: DecodeBatch) -> None:
        """As `plan`, for a step of decodes whose description is on the device already."""
        self._decode = batch

    @property
    def write_slots(self) -> Tensor:
        return self._reference.write_slots if self._decode is None else self._decode.write_slots

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, kv: LayerKV, params: AttentionParams) -> Tensor:
        if self._decode is None:
            return self._reference.run(q, k, v, kv, params)
        step = self._decode
        num_rows = len(step.write_slots)
        if k is not None and v is not None:
            write_kv(k[:num_rows], v[:num_rows], kv.keys, kv.values, step.write_slots)
        out = paged_decode(
            q[:num_rows],
            kv.keys,
            kv.values,
            step.pages,
            step.context_lens,
            params.scale,
            PAGE_SIZE,
            params.sliding_window,
            params.softcap,
            params.sinks,
        )
        padding = q.shape[0] - num_rows
        return torch.cat([out, out.new_zeros(padding, *out.shape[1:])]) if padding else out


ATTENTION_BACKENDS["triton"] = TritonAttention
