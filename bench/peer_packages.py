"""Imports the kernel files of SGLang and vLLM without the engines around them; for `bench/peers.py`.

The packages' `__init__` are not executed, they would bring in everything: directories become bare packages, and
modules from which the kernels import small things (is this CUDA? a logger) are replaced, for this process only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class _StandIn(ModuleType):
    """A module with the names it is given; any other is a function that must not be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> None:
            raise RuntimeError(f"a kernel calls {self.__name__}.{name}, which is replaced: this version is not known")

        return absent


class _BarePackages:
    """Finds the directories of one installed package as packages without `__init__`."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{name} is not installed")
        self.name, self.root = name, Path(spec.submodule_search_locations[0])

    def directory(self, module: str) -> Path:
        return self.root.joinpath(*module.split(".")[1:])

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.name or not self.directory(name).is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.directory(name))]
        return spec


def _install(name: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> Path:
    """Makes the package's kernel files importable; returns its directory."""
    finder = _BarePackages(name)
    sys.meta_path.insert(0, finder)
    for module_name, names in stand_ins.items():
        module = _StandIn(module_name)
        module.__dict__.update(names)
        if finder.directory(module_name).is_dir():
            module.__path__ = [str(finder.directory(module_name))]
        sys.modules[module_name] = module
    return finder.root


def _no(*_: object) -> bool:
    return False


def _at_least(major: int) -> bool:
    return torch.cuda.get_device_capability() >= (major, 0)


@cache
def sglang_root() -> Path:
    def same(function: Any) -> Any:
        return function

    logging.getLogger("sglang").setLevel(logging.ERROR)  # it has no tuned tiles for experts of several adapters
    deterministic = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    utils = {
        "cached_triton_kernel": lambda _: same,
        "get_device_name": torch.cuda.get_device_name,
        "is_cuda": lambda: True,
        "is_sm90_supported": lambda: _at_least(9),
        **dict.fromkeys(("is_hip", "is_cpu", "is_xpu", "is_musa", "cpu_has_amx_support"), _no),
    }
    return _install("sglang", {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.common": {"direct_register_custom_op": lambda **_: None},
        "sglang.srt.lora.utils": {"LoRABatchInfo": object},
        "sglang.srt.runtime_context": {"get_exec": lambda: deterministic},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": _no},
        "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda _: 0},
        "sglang.srt.layers.moe.moe_runner.triton_utils": {"get_config": lambda: None},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: _at_least(9), "cache_once": same},
        "sglang.kernels.ops.quantization.fp8_kernel": {},
        "sglang.kernels.ops.quantization.int8_kernel": {},
    })  # fmt: skip


@cache
def vllm_root() -> Path:
    def not_registered(**_: object) -> None:
        raise AttributeError("kernels are called as functions, not as registered operators")

    def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    log = logging.getLogger("vllm")
    logger = SimpleNamespace(warning_once=log.debug, info_once=log.debug)
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_xpu=_no,
        num_compute_units=lambda *_: torch.cuda.get_device_properties(0).multi_processor_count,
        has_device_capability=lambda least: capability >= least,
        is_device_capability=lambda exactly: capability == exactly,
    )
    off = (
        "VLLM_BATCH_INVARIANT",
        "VLLM_TUNED_CONFIG_FOLDER",
        "VLLM_LORA_DISABLE_PDL",
        "VLLM_LORA_ENABLE_DUAL_STREAM",
    )
    shared_bytes = getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 0)
    return _install("vllm", {
        "vllm.envs": dict.fromkeys(off),
        "vllm.logger": {"init_logger": lambda _: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.distributed": {},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.torch_utils": {"async_tensor_h2d": to_device, "direct_register_custom_op": not_registered},
        "vllm.utils.mem_utils": {"get_max_shared_memory_bytes": lambda *_: shared_bytes},
    })  # fmt: skip


def sglang_file(name: str) -> Any:
    sglang_root()
    return importlib.import_module(f"sglang.kernels.ops.lora.{name}")


def vllm_file(name: str) -> Any:
    vllm_root()
    return importlib.import_module(f"vllm.lora.ops.triton_ops.{name}")
