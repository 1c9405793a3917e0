"""On a CPU a row's LoRA, and its whole answer, has the same bits whatever else is in the batch."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.lora.reference import lora_delta, pad_rows
from tests.adapters import make_peft_adapter
from tests.engines import BASE, load_slot, make_parts, packed_logits
from tests.models import random_tokens, tiny_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 8, 50])
def test_a_row_of_lora_does_not_depend_on_the_others(rank: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rank)
    a, b, x = (torch.randn(n, m, generator=generator).to(dtype) for n, m in ((rank, 576), (rank, 320), (60, 576)))
    whole = lora_delta(x, a, b, 0.5)
    torch.testing.assert_close(whole, 0.5 * (x.float() @ a.float().T) @ b.float(), atol=1e-3, rtol=1e-5)
    for count in (1, 2, 5, 11, 12, 13, 31):
        assert torch.equal(lora_delta(x[7 : 7 + count], a, b, 0.5), whole[7 : 7 + count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_padded_product_does_not_depend_on_the_others(dtype: torch.dtype):
    weight, x = torch.randn(576, 1536).to(dtype), torch.randn(200, 60, 1536).to(dtype)
    for rows in x:
        whole = rows @ weight.T
        for count in (1, 2, 5, 12, 31):
            assert torch.equal((pad_rows(rows[7 : 7 + count]) @ weight.T)[:count], whole[7 : 7 + count]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_decode_alone_has_the_same_bits_as_in_a_batch(family: str, dtype: torch.dtype, tmp_path: Path):
    """The prompt is prefilled in the same cuts in both; then one row alone, and one among seven."""
    factory = partial(tiny_model, family)
    path = make_peft_adapter(tmp_path, factory, ["q_proj", "v_proj", "o_proj"], rank=3)
    parts = make_parts(factory().to(dtype))
    slot = load_slot(parts, path)
    prompts = [random_tokens(9 + i, seed=i)[0].tolist() for i in range(7)]
    cuts = [(0, len(p) - 1) for p in prompts], [(len(p) - 1, len(p)) for p in prompts]
    together = packed_logits(parts, prompts, [slot, BASE] * 3 + [slot], cuts)
    for i, prompt in enumerate(prompts):
        alone = packed_logits(parts, [prompt], [[slot, BASE][i % 2]], [[c[i]] for c in cuts])[0]
        assert torch.equal(alone[-1], together[i][-1])
