"""Paged decode attention against the reference backend: windows, sinks, caps, odd widths, padding."""

import pytest
import torch

from lorry.attention.base import AttentionBatch, AttentionParams
from lorry.attention.torch import TorchAttention
from lorry.config import PAGE_SIZE
from lorry.kernels.paged_attention import paged_decode, write_kv
from lorry.kv.pool import KVShape, allocate_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("lens", [(1,), (17, 40, 1), (5, 33, 64, 2, 90, 16, 31, 48, 7)], ids=["one", "three", "nine"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "window", "softcap", "sinks"),
    [
        (8, 2, 32, 32, None, None, False),
        (4, 4, 24, 20, None, None, False),
        (8, 1, 64, 64, 16, None, True),
        (6, 3, 16, 16, None, 5.0, False),
    ],
)
def test_decode_equals_the_reference(lens, heads, kv_heads, key_dim, value_dim, window, softcap, sinks):
    generator = torch.Generator().manual_seed(len(lens))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    kv = allocate_kv({"l": KVShape(kv_heads, key_dim, value_dim)}, 64, torch.float32, DEVICE)["l"]
    kv.keys.copy_(rand(*kv.keys.shape))
    kv.values.copy_(rand(*kv.values.shape))
    order = torch.randperm(64, generator=generator).tolist()
    counts = [-(-length // PAGE_SIZE) for length in lens]
    pages = [tuple(order.pop() for _ in range(count)) for count in counts]
    slots = [p[(n - 1) // PAGE_SIZE] * PAGE_SIZE + (n - 1) % PAGE_SIZE for p, n in zip(pages, lens, strict=True)]
    write_slots = torch.tensor(slots, device=DEVICE)
    q, k, v = (
        rand(len(lens), heads, key_dim),
        rand(len(lens), kv_heads, key_dim),
        rand(len(lens), kv_heads, value_dim),
    )
    params = AttentionParams(0.3, window, softcap, rand(heads) if sinks else None)

    reference = TorchAttention()
    reference.plan(AttentionBatch((1,) * len(lens), tuple(lens), tuple(pages), write_slots))
    expected = reference.run(q, k, v, kv, params)

    kv.keys[write_slots] = float("nan")
    kv.values[write_slots] = float("nan")
    table = torch.zeros(len(lens) + 1, max(counts), dtype=torch.int32, device=DEVICE)
    for i, own in enumerate(pages):
        table[i, : len(own)] = torch.tensor(own)
    padded = [torch.cat([x, torch.full_like(x[:1], float("nan"))]) for x in (q, k, v)]
    write_kv(padded[1], padded[2], kv.keys, kv.values, torch.cat([write_slots, write_slots.new_tensor([-1])]))
    context = torch.tensor([*lens, 0], dtype=torch.int32, device=DEVICE)
    sink = params.sinks
    ours = paged_decode(padded[0], kv.keys, kv.values, table, context, 0.3, PAGE_SIZE, window, softcap, sink)
    tolerance = 2e-5 if DEVICE.type == "cpu" else 1e-4
    torch.testing.assert_close(ours[:-1], expected, atol=tolerance, rtol=0)
    assert not kv.keys.isnan().any()
    assert not kv.values.isnan().any()
    assert (ours[-1] == 0).all()
