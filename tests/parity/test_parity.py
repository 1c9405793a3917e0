"""Every architecture against PEFT: base rows and three adapters in packed steps of prefill, chunks and decode."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.lora.experts.base import make_experts_backend
from tests.adapters import (
    FUSED_EXPERTS,
    make_peft_adapter,
    make_per_expert_adapter,
    make_stacked_adapter,
    merged_logits,
    reference_logits,
    write_adapter,
)
from tests.engines import BASE, load_slot, make_parts, mixed_steps, packed_logits
from tests.models import FAMILIES, MOE_FAMILIES, random_tokens, tiny_model

TOLERANCE = 2e-5
ATTENTION = {"deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
KERNELS = ("merged", "fused")
DENSE_MLP = ["gate_proj", "up_proj", "down_proj"]


def write_adapters(family: str, folder: Path) -> list[Path]:
    """Ranks 3, 8 and 16 on different targets: attention; the feed-forward (experts); everything there is."""
    factory = partial(tiny_model, family)
    attention = ATTENTION.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if family not in MOE_FAMILIES:
        return [
            make_peft_adapter(folder / "attention", factory, attention[:2], rank=3, seed=1),
            make_peft_adapter(folder / "mlp", factory, DENSE_MLP, rank=8, seed=2, use_rslora=True),
            make_peft_adapter(folder / "all", factory, "all-linear", rank=16, seed=3, alpha_pattern={"v_proj": 4}),
        ]
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    everything = [*FUSED_EXPERTS, router]
    return [
        make_peft_adapter(folder / "attention", factory, attention[1:], rank=3, seed=1),
        make_peft_adapter(folder / "experts", factory, target_parameters=FUSED_EXPERTS, rank=8, seed=2, spread=0.1),
        make_peft_adapter(
            folder / "all", factory, attention, target_parameters=everything, rank=16, seed=3, spread=0.1
        ),
    ]


@pytest.mark.parametrize(("family", "virtual"), [(f, True) for f in FAMILIES] + [(f, False) for f in MOE_FAMILIES])
def test_packed_batch_equals_peft(family: str, virtual: bool, tmp_path: Path):
    factory = partial(tiny_model, family)
    paths = write_adapters(family, tmp_path)
    parts = make_parts(factory(), lora_use_virtual_experts=virtual)
    slots = [load_slot(parts, path) for path in paths]
    order = [(BASE, None), *zip(slots, paths, strict=True), (BASE, None), (slots[2], paths[2]), (slots[0], paths[0])]
    prompts = [random_tokens(7 + 6 * i, seed=i)[0].tolist() for i in range(len(order))]
    steps = mixed_steps([len(prompt) for prompt in prompts])
    ours = packed_logits(parts, prompts, [slot for slot, _ in order], steps)
    base = [reference_logits(factory, None, torch.tensor([prompt]))[0] for prompt in prompts]
    for i, (_, path) in enumerate(order):
        expected = reference_logits(factory, path, torch.tensor([prompts[i]]))[0]
        torch.testing.assert_close(ours[i], expected, atol=TOLERANCE, rtol=0, msg=lambda m, i=i: f"prompt {i}: {m}")
        if path is not None:
            assert (expected - base[i]).abs().max() > 100 * TOLERANCE, "the adapter must matter"


@pytest.mark.parametrize("family", [family for family in MOE_FAMILIES if family != "gpt_oss"])
def test_old_per_expert_adapters_equal_merged_weights(family: str, tmp_path: Path):
    """Gate, up and down of their own rank for some experts, missing halves, a router: PEFT cannot be asked."""
    factory = partial(tiny_model, family)
    model = factory()
    paths = [
        make_per_expert_adapter(tmp_path / "full", model, router=True, rank=4, spread=0.2, seed=1),
        make_per_expert_adapter(tmp_path / "up", model, projections=["up_proj"], rank=3, spread=0.2, use_rslora=True),
        make_per_expert_adapter(tmp_path / "some", model, experts=[0, 3], ranks={3: 7}, rank=5, spread=0.2, seed=3),
    ]
    parts = make_parts(model)
    slots = [load_slot(parts, path) for path in paths]
    prompts = [random_tokens(9 + 4 * i, seed=i)[0].tolist() for i in range(4)]
    ours = packed_logits(parts, prompts, [*slots, BASE], mixed_steps([len(p) for p in prompts]))
    for i, path in enumerate(paths):
        expected = merged_logits(factory, path, torch.tensor([prompts[i]]))[0]
        torch.testing.assert_close(ours[i], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        ours[3], reference_logits(factory, None, torch.tensor([prompts[3]]))[0], atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("experts", ["torch", "virtual", *(pytest.param(x, marks=pytest.mark.slow) for x in KERNELS)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_m18_factors_shared_by_all_experts_equal_merged_weights(
    family: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    factory = partial(tiny_model, family)
    model = factory()
    stacked, single = make_stacked_adapter(tmp_path, model, gate_up=family != "gpt_oss", spread=0.2)
    own = make_per_expert_adapter(tmp_path / "own", model, rank=3, spread=0.2, seed=1)
    monkeypatch.setattr("lorry.lora.manager.make_experts_backend", partial(make_experts_backend, name=experts))
    parts = make_parts(model)
    slots = [load_slot(parts, path) for path in (stacked, own)]
    prompts = [random_tokens(9 + 4 * i, seed=i)[0].tolist() for i in range(3)]
    ours = packed_logits(parts, prompts, [*slots, BASE], mixed_steps([len(p) for p in prompts]))
    for i, path in enumerate([single, own]):
        expected = merged_logits(factory, path, torch.tensor([prompts[i]]))[0]
        torch.testing.assert_close(ours[i], expected, atol=TOLERANCE, rtol=0)
    base = reference_logits(factory, None, torch.tensor([prompts[2]]))[0]
    torch.testing.assert_close(ours[2], base, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_rows_are_bit_equal_to_a_model_without_lora(family: str, dtype: torch.dtype, tmp_path: Path):
    """The same packed steps, once with adapters beside the base rows and once on an engine that knows no LoRA."""
    factory = partial(tiny_model, family)
    paths = write_adapters(family, tmp_path)
    prompts = [random_tokens(7 + 6 * i, seed=i)[0].tolist() for i in range(6)]
    steps = mixed_steps([len(prompt) for prompt in prompts])
    with_lora = make_parts(factory().to(dtype))
    slots = [load_slot(with_lora, path) for path in paths]
    ours = packed_logits(with_lora, prompts, [BASE, slots[0], BASE, slots[1], BASE, slots[2]], steps)
    without = packed_logits(make_parts(factory().to(dtype), enable_lora=False), prompts, [BASE] * 6, steps)
    for i in (0, 2, 4):
        assert torch.equal(ours[i], without[i]), f"base prompt {i}"
    for i in (1, 3, 5):
        assert not torch.equal(ours[i], without[i]), f"adapted prompt {i}"


def test_deepseek_dense_layers_and_shared_experts_equal_merged_weights(tmp_path: Path):
    """Written by hand: PEFT 0.21 turns these targets into the routed experts and leaves the modules out."""
    factory = partial(tiny_model, "deepseek_v3")
    model = factory()
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for path in ("layers.0.mlp", "layers.1.mlp.shared_experts", "layers.2.mlp.shared_experts"):
        for leaf in DENSE_MLP:
            linear = model.get_submodule(f"model.{path}.{leaf}")
            for factor, shape in (("A", (5, linear.in_features)), ("B", (linear.out_features, 5))):
                key = f"base_model.model.model.{path}.{leaf}.lora_{factor}.weight"
                tensors[key] = 0.2 * torch.randn(shape, generator=generator)
    adapter = write_adapter(tmp_path, tensors, {"r": 5, "lora_alpha": 10, "target_modules": DENSE_MLP})
    parts = make_parts(model)
    slot = load_slot(parts, adapter)
    prompts = [random_tokens(11 + 3 * i, seed=i)[0].tolist() for i in range(3)]
    ours = packed_logits(parts, prompts, [slot, BASE, slot], mixed_steps([len(p) for p in prompts]))
    for i, path in enumerate([adapter, None, adapter]):
        inputs = torch.tensor([prompts[i]])
        base = reference_logits(factory, None, inputs)[0]
        expected = base if path is None else merged_logits(factory, path, inputs)[0]
        torch.testing.assert_close(ours[i], expected, atol=TOLERANCE, rtol=0)
        assert path is None or (expected - base).abs().max() > 100 * TOLERANCE
