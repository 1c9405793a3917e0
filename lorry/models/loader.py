"""Loads a transformers model with our hooks in it, and checks that it computes what the plain model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lorry.errors import ConfigError, UnsupportedModel
from lorry.kv.pool import KVShape
from lorry.models.hooks import HOOK_NAME, ShapeProbe, find_attention, use_hooks
from lorry.models.sites import find_experts
from lorry.models.support import refuse_config, refuse_modules

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device; `kv_shapes` by path of each attention layer."""

    model: PreTrainedModel
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    kv_shapes: dict[str, KVShape]
    eos_token_ids: tuple[int, ...]
    reference: Reference

    @property
    def max_context(self) -> int:
        """Longest context for which the model has positions."""
        return int(getattr(self.config, "max_position_embeddings", 2**20))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


@dataclass(frozen=True)
class Reference:
    """A short prompt [n] and the plain model's logits [n, vocab] (float32) for it, from before our hooks."""

    token_ids: tuple[int, ...]
    logits: Tensor


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; a device that was asked for and is missing is an error."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def read_config(path: str) -> tuple[PreTrainedConfig, bool]:
    """The model's configuration and whether it has experts; refused with a reason where it cannot be served."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path!r} cannot be read: {error}") from None
    refuse_config(config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    refuse_modules(skeleton, config)
    return config, bool(find_experts(skeleton))


def load_model(path: str, dtype: str, device: torch.device, progress: Callable[[str], None]) -> LoadedModel:
    """Load weights (transformers shows its progress bar), keep a reference of the plain model, then hook it."""
    config, has_experts = read_config(path)
    wanted = _DTYPES.get(dtype) or getattr(config, "dtype", None) or torch.float32
    if not Path(path).exists():
        progress(f"{path} is not a folder here: taking it from the hub")
    progress(f"loading the weights of {path} ({config.model_type}, {str(wanted).removeprefix('torch.')})")
    implementations = {"attn_implementation": "eager"}
    if has_experts:
        implementations["experts_implementation"] = "grouped_mm"  # eager ones round too much in 16-bit types
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=wanted, **implementations
    )
    return hook_model(model.to(device), read_eos_token_ids(path, config))


def hook_model(model: PreTrainedModel, eos_token_ids: tuple[int, ...] = ()) -> LoadedModel:
    """Take a model in memory: its plain logits as reference, then our attention and experts in place of its own."""
    model.eval().requires_grad_(False)
    reference = _take_reference(model)
    use_hooks(model)
    return LoadedModel(
        model=model,
        config=model.config,
        device=model.device,
        dtype=model.dtype,
        kv_shapes=_probe_shapes(model),
        eos_token_ids=eos_token_ids,
        reference=reference,
    )


def read_eos_token_ids(path: str, config: PreTrainedConfig) -> tuple[int, ...]:
    """End tokens: those of generation_config.json where there is one, else the model's."""
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None
    eos = config.eos_token_id if eos is None else eos
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)


@torch.inference_mode()
def _take_reference(model: PreTrainedModel) -> Reference:
    vocab = model.get_input_embeddings().weight.shape[0]
    token_ids = tuple((7 + 31 * i) % vocab for i in range(12))
    inputs = torch.tensor([token_ids], device=model.device)
    return Reference(token_ids, model(input_ids=inputs, use_cache=False).logits[0].float())


@torch.inference_mode()
def _probe_shapes(model: PreTrainedModel) -> dict[str, KVShape]:
    """Shapes of keys and values by layer; every attention layer must call the hook exactly once."""
    probe = ShapeProbe(model)
    for experts in find_experts(model).values():
        experts.lorry_experts = lambda hidden, index, weights: torch.zeros_like(hidden)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False)
    if not probe.shapes or any(probe.num_calls.get(path) != 1 for path in find_attention(model)):
        raise UnsupportedModel(
            f"{model.config.model_type}: not every attention layer calls transformers' attention interface once "
            f"(calls seen: {probe.num_calls or 'none'}), so its keys and values cannot be paged; hook {HOOK_NAME!r}"
        )
    return probe.shapes


def check_against_reference(loaded: LoadedModel, logits: Tensor) -> float:
    """Compare our logits [n, vocab] of the reference prompt with the plain model's; returns the largest difference.

    The bound is relative to the spread of the logits: 1e-4 in float32, 0.25 in 16-bit types, whose rounding differs
    with the order of sums. A wrong mask, rotary or routing is off by the spread itself.
    """
    difference = (logits.float() - loaded.reference.logits).abs().max().item()
    spread = max(loaded.reference.logits.std().item(), 1e-6)
    bound = 1e-4 if loaded.dtype == torch.float32 else 0.25
    if not difference <= bound * spread:
        raise UnsupportedModel(
            f"{loaded.config.model_type}: the self-check failed: logits differ from the plain model's by "
            f"{difference:.3g} (spread {spread:.3g}, allowed {bound * spread:.3g}), so it would be served wrongly"
        )
    return difference
