"""Engine steps with the Triton attention backend against transformers' own attention."""

import pytest
import torch

from tests.engines import BASE, make_parts, mixed_steps, packed_logits
from tests.models import random_tokens, tiny_model

DEVICE, TOLERANCE = ("cuda", 2e-4) if torch.cuda.is_available() else ("cpu", 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_triton_attention_in_packed_steps_equals_transformers(family: str):
    """Decodes, whole prefills and chunks side by side; gpt-oss brings windows and sinks, DeepSeek narrow values."""
    settings = {"attention_backend": "triton", "enable_lora": False, "disable_cuda_graph": True}
    parts = make_parts(tiny_model(family).to(DEVICE), **settings)
    prompts = [random_tokens(7 + 9 * i, seed=i)[0].tolist() for i in range(6)]
    ours = packed_logits(parts, prompts, [BASE] * 6, mixed_steps([len(prompt) for prompt in prompts]))
    model = tiny_model(family)
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            expected = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(
                ours[i].cpu(), expected, atol=TOLERANCE, rtol=0, msg=lambda m, i=i: f"prompt {i}: {m}"
            )
