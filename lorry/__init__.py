"""Lorry: many LoRA adapters on one language model, at nearly the speed of the model alone."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lorry.errors import LorryError
from lorry.types import SamplingParams

if TYPE_CHECKING:
    from lorry.engine.llm import LLM, Completion, RequestOutput

# Threads of torch that wait for each other would spin; on a machine where anything else runs, they then keep from the
# processor the very thread that they wait for, and a model on the CPU becomes many times slower. torch reads this
# when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "LorryError", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` needs torch, which takes seconds to import: only those who use it pay."""
    if name in ("LLM", "Completion", "RequestOutput"):
        return getattr(import_module("lorry.engine.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
