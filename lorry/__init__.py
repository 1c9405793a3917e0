"""Lorry: many LoRA adapters on one language model, at nearly the speed of the model alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lorry.errors import LorryError
from lorry.types import SamplingParams

if TYPE_CHECKING:
    from lorry.engine.llm import LLM, Completion, RequestOutput

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "LorryError", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` needs torch, which takes seconds to import: only those who use it pay."""
    if name in ("LLM", "Completion", "RequestOutput"):
        return getattr(import_module("lorry.engine.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
