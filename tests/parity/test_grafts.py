"""Grafted models in Triton's interpreter: every family against PEFT, and what must not be grafted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lorry.config import EngineConfig
from lorry.engine.build import Parts, build_around
from lorry.models.grafts import find_router, is_rms_norm
from lorry.models.loader import hook_model
from tests.adapters import FUSED_EXPERTS, make_peft_adapter, reference_logits
from tests.engines import BASE, load_slot, packed_logits
from tests.models import FAMILIES, MOE_FAMILIES, random_tokens, tiny_model

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = 2e-3 if ON_GPU else 3e-5
ATTENTION = {"deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"]}
PLAIN = {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"}


def grafted(model: Any) -> tuple[Parts, list[str]]:
    """An engine on the kernels, and what it said while it was built."""
    said: list[str] = []
    config = EngineConfig.parse(
        model="tiny",
        max_total_tokens=1024,
        lora_memory=2**22,
        attention_backend="triton",
        lora_backend="csgmv",
        disable_cuda_graph=True,
    )
    return build_around(hook_model(model.to(DEVICE)), config, said.append), said


def grafted_layers(said: list[str]) -> int:
    line = next(line for line in said if "decoder layers" in line)
    return int(line.split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_grafted_models_equal_peft(family: str, tmp_path: Path):
    factory = partial(tiny_model, family, num_hidden_layers=2)
    attention = ATTENTION.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if family in MOE_FAMILIES:
        router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
        everything: dict[str, Any] = {"target_parameters": [*FUSED_EXPERTS, router]}
        targets = attention
    else:
        everything, targets = {}, [*attention, "gate_proj", "up_proj", "down_proj"]
    paths = [
        make_peft_adapter(tmp_path / "some", factory, attention[1:3], rank=3, seed=1),
        make_peft_adapter(tmp_path / "all", factory, targets, rank=18, seed=2, spread=0.1, **everything),
    ]
    parts, said = grafted(factory())
    assert (grafted_layers(said) == 2) is (family in PLAIN)
    slots = [load_slot(parts, path) for path in paths]
    prompts = [random_tokens(6 + 5 * i, seed=i)[0].tolist() for i in range(4)]
    order = [(slots[0], paths[0]), (BASE, None), (slots[1], paths[1]), (slots[1], paths[1])]
    steps = [[(0, 5), (0, 11), (0, 4), (0, 20)], [(5, 6), (0, 0), (4, 16), (20, 21)]]
    ours = packed_logits(parts, prompts, [slot for slot, _ in order], steps)
    for i, (_, path) in enumerate(order):
        expected = reference_logits(factory, path, torch.tensor([prompts[i]]))[0]
        torch.testing.assert_close(
            ours[i].cpu(), expected, atol=TOLERANCE, rtol=0, msg=lambda m, i=i: f"prompt {i}: {m}"
        )


@pytest.mark.slow
def test_every_norm_and_router_of_the_families_is_known():
    """Except DeepSeek's router, which scores with a sigmoid and a correction."""
    for family in FAMILIES:
        said = grafted(tiny_model(family))[1]
        assert [line for line in said if "no kernel is known" in line] == (
            ["2 DeepseekV3TopkRouter: no kernel is known for them, so they run as transformers wrote them, slower"]
            if family == "deepseek_v3"
            else []
        )


def test_a_layer_that_looks_plain_but_is_not_is_left_alone():
    """Granite multiplies what it adds to the residual; here every layer does, in Llama's clothes."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, forward=forward, **kwargs: (0.7 * forward(*args, **kwargs)[0], None)
    tokens = random_tokens(9)
    expected = model(input_ids=tokens, use_cache=False).logits[0]
    parts, said = grafted(model)
    assert grafted_layers(said) == 0
    assert any("LlamaDecoderLayer are not of the plain form" in line for line in said)
    ours = packed_logits(parts, [tokens[0].tolist()], [BASE], [[(0, 9)]])[0]
    torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCE, rtol=0)


def test_one_layer_of_another_form_between_plain_ones():
    """Its neighbours leave its norms to it."""
    model = tiny_model("llama", num_hidden_layers=4)
    model.model.layers[1].self_attn.q_proj.bias = nn.Parameter(torch.randn(32), requires_grad=False)
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.randn(16), requires_grad=False)
    tokens = random_tokens(9)
    expected = model(input_ids=tokens, use_cache=False).logits[0]
    parts, said = grafted(model)
    assert grafted_layers(said) == 3
    ours = packed_logits(parts, [tokens[0].tolist()], [BASE], [[(0, 9)]])[0]
    torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCE, rtol=0)


class _Norm(nn.Module):
    def __init__(self, plus: float, eps: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.plus = plus
        if eps is not None:
            self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.plus + self.weight)


@pytest.mark.parametrize(("plus", "eps", "known"), [(0.0, 1e-6, True), (1.0, 1e-6, False), (0.0, None, False)])
def test_norms_are_known_by_what_they_compute(plus: float, eps: float | None, known: bool):
    """Gemma's adds one to its weight."""
    assert is_rms_norm(_Norm(plus, eps).to(DEVICE)) is known


class _Router(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.T
        values, index = logits.softmax(-1).topk(2)
        return logits, self.factor * values, index


@pytest.mark.parametrize(("factor", "known"), [(1.0, True), (2.5, False)])
def test_routers_are_known_by_what_they_compute(factor: float, known: bool):
    assert (find_router(_Router(factor).to(DEVICE)) is not None) is known
