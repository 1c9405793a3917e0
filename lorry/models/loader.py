"""Loads a transformers model, or makes one of random weights, and puts our hooks into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lorry.errors import ConfigError, UnsupportedModel
from lorry.kv.pool import KVShape
from lorry.models.hooks import HOOK_NAME, ShapeProbe, find_attention, use_hooks
from lorry.models.readahead import Readahead, checkpoint_files
from lorry.models.reference import Reference, take_reference
from lorry.models.sites import find_experts
from lorry.models.support import refuse_config, refuse_modules

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DUMMY_SPREAD = 0.02
"""Standard deviation of random weights."""


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


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; a device that was asked for and is missing is an error."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Skeleton:
    """A model's configuration, and what its modules without weights tell."""

    config: PreTrainedConfig
    has_experts: bool
    num_parameters: int

    def dtype(self, name: str) -> torch.dtype:
        """The type asked for; `auto` is that of the checkpoint."""
        wanted: torch.dtype = _DTYPES.get(name) or getattr(self.config, "dtype", None) or torch.float32
        return wanted


def read_config(path: str) -> Skeleton:
    """The model's configuration; refused with a reason where it cannot be served. No weight is read."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path!r} cannot be read: {error}") from None
    refuse_config(config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    refuse_modules(skeleton, config)
    return Skeleton(config, bool(find_experts(skeleton)), sum(p.numel() for p in skeleton.parameters()))


def load_model(
    path: str, skeleton: Skeleton, wanted: torch.dtype, device: torch.device, progress: Callable[[str], None]
) -> LoadedModel:
    """Load weights (transformers shows its progress bar), keep a reference of the plain model, then hook it.

    On CUDA every weight goes from the files to the device by itself: the host never holds a copy of the model.
    """
    if not Path(path).exists():
        progress(f"{path} is not a folder here: taking it from the hub")
    kind = f"{skeleton.config.model_type}, {str(wanted).removeprefix('torch.')}"
    progress(f"loading the weights of {path} ({kind})")
    start = time.perf_counter()
    options = _implementations(skeleton) | {"config": skeleton.config, "dtype": wanted}
    model: PreTrainedModel
    try:
        if device.type == "cuda":
            with Readahead(checkpoint_files(path)):
                model = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **options)
            torch.cuda.empty_cache()  # of what fusing experts has left
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
    except OSError as error:
        raise ConfigError(
            f"the weights of {path!r} cannot be read: {error}; for random weights from the configuration alone, as "
            "benchmarks take them, add --load-format dummy"
        ) from None
    loaded = hook_model(model.to(device), read_eos_token_ids(path, skeleton.config))
    seconds, size = time.perf_counter() - start, loaded.weight_bytes
    progress(f"loaded {size / 2**30:.1f} GiB of weights in {seconds:.1f} s ({size / 1e9 / seconds:.2f} GB/s)")
    return loaded


def make_dummy_model(
    path: str, skeleton: Skeleton, wanted: torch.dtype, device: torch.device, progress: Callable[[str], None]
) -> LoadedModel:
    """A model of random weights, normal(0, 0.02), norms at 1, made on the device: for benchmarks. Always the same."""
    progress(f"making random weights for {path} ({skeleton.config.model_type}, {str(wanted).removeprefix('torch.')})")
    start = time.perf_counter()
    if hasattr(skeleton.config, "initializer_range"):
        skeleton.config.initializer_range = DUMMY_SPREAD
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            skeleton.config, dtype=wanted, **_implementations(skeleton)
        )
    loaded = hook_model(model, read_eos_token_ids(path, skeleton.config))
    progress(f"made {loaded.weight_bytes / 2**30:.1f} GiB of weights in {time.perf_counter() - start:.1f} s")
    return loaded


def _implementations(skeleton: Skeleton) -> dict[str, Any]:
    """Those of the plain model whose logits are the reference."""
    implementations = {"attn_implementation": "eager"}
    if skeleton.has_experts:
        implementations["experts_implementation"] = "grouped_mm"  # eager ones round too much in 16-bit types
    return implementations


def hook_model(model: PreTrainedModel, eos_token_ids: tuple[int, ...] = ()) -> LoadedModel:
    """Take a model in memory: its plain logits as reference, then our attention and experts in place of its own."""
    model.eval().requires_grad_(False)
    reference = take_reference(model)
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
