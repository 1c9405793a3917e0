"""Any number of different adapters from a few real ones in PEFT's format, and models and prompts to try them on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lorry import demo
from lorry.demo.model import prepare
from lorry.lora.adapter import read_files
from lorry.lora.dummy import dummy_sites
from lorry.models.loader import read_config
from lorry.models.sites import find_sites
from lorry.text import Tokenizer


class Weights(NamedTuple):
    """Which adapter, and which of its two generations, 0 or 1."""

    number: int
    generation: int


class Variants:
    """Adapter n is one of the real ones in turn, each B of it rolled and scaled by another amount.

    In generation 1 every B has the opposite sign. What they say makes no sense, but all of them say other things.
    """

    def __init__(self, originals: Sequence[Path], folder: Path) -> None:
        """Files go into subfolders of `folder`."""
        self._originals = [read_files(str(path)) for path in originals]
        self._folder = folder

    def path(self, number: int) -> Path:
        return self._folder / f"adapter-{number}"

    def write(self, weights: Weights) -> None:
        """Write an adapter's files, in the place of those that are there."""
        config, tensors = self._make(weights)
        path = self.path(weights.number)
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(config))
        safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")

    def remove(self, number: int) -> None:
        shutil.rmtree(self.path(number), ignore_errors=True)

    def content(self, weights: Weights) -> bytes:
        """The adapter as one file with its config inside."""
        config, tensors = self._make(weights)
        return safetensors.torch.save(tensors, {"adapter_config": json.dumps(config)})

    def mean_bytes(self, itemsize: int) -> int:
        """What one takes of the device on average, but for alignment."""
        sizes = [sum(tensor.numel() for tensor in tensors.values()) for _, tensors in self._originals]
        return sum(sizes) * itemsize // len(sizes)

    def _make(self, weights: Weights) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        shift, original = divmod(weights.number, len(self._originals))
        config, tensors = self._originals[original]
        factor = (1 + shift % 101 / 50) * (-1) ** weights.generation
        rolled = {k: t.roll(shift, 0) * factor if "lora_B" in k else t for k, t in tensors.items()}
        return config, rolled


class Workload(NamedTuple):
    """A model's folder, the bytes of one element of its weights, prompts for it, and folders of real adapters."""

    model: str
    itemsize: int
    prompts: list[tuple[int, ...]]
    originals: list[Path]


def make_workload(model: str, folder: Path) -> Workload:
    """`demo`, `tiny` (made in `folder`), or the folder of any model, whose adapters are random."""
    if model == "demo":
        path = str(prepare(progress=print))
        return Workload(path, _itemsize(path), demo_prompts(path), list(demo.adapter_paths().values()))
    if model == "tiny":
        path, originals = str(folder / "model"), make_tiny(folder)
    else:
        path, originals = model, [random_pairs(folder / f"rank-{rank}", model, rank) for rank in (4, 8, 16)]
    vocab = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (60,), generator=generator).tolist()
    return Workload(path, _itemsize(path), [tuple(ids[:n]) for n in (5, 33, 60)], originals)


def _itemsize(path: str) -> int:
    return read_config(path).dtype("auto").itemsize


def demo_prompts(path: str) -> list[tuple[int, ...]]:
    """A question as it is, several of them, and one in the chat template."""
    tokenizer = Tokenizer.load(path)
    questions = list(demo.EXAMPLES.values())
    chat = tokenizer.render_chat([{"role": "user", "content": questions[0]}])
    texts = (questions[0], " ".join(questions[:3]), chat)
    return [tuple(tokenizer.encode(text) if isinstance(text, str) else text) for text in texts]


def make_tiny(folder: Path) -> list[Path]:
    """Save a mixture of experts of random weights; adapters of it by PEFT: on attention, on experts, on both."""
    from tests.adapters import FUSED_EXPERTS, make_peft_adapter
    from tests.models import tiny_model

    factory = partial(tiny_model, "qwen3_moe")
    factory().save_pretrained(folder / "model")
    make = partial(make_peft_adapter, model_factory=factory, spread=0.2)
    return [
        make(folder / "attention", target_modules=["q_proj", "v_proj"], rank=8, seed=1),
        make(folder / "experts", target_parameters=FUSED_EXPERTS, rank=2, seed=2),
        make(folder / "both", target_modules=["k_proj", "o_proj"], target_parameters=FUSED_EXPERTS, rank=4, seed=3),
    ]


def random_pairs(folder: Path, model: str, rank: int) -> Path:
    """An adapter of random weights on all projections of attention."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for site in dummy_sites(skeleton, find_sites(skeleton), None):
        if site.kind == "linear":
            for factor, shape in (("A", (rank, site.in_features)), ("B", (site.out_features, rank))):
                values = 0.05 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{site.module}.lora_{factor}.weight"] = values
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder
