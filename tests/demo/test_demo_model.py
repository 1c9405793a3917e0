"""The upcycled demo model has the logits of the model it was made from, and a faithful tokenizer."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lorry.demo.model import find_gguf, load_dense, prepare
from lorry.demo.tokenizer import read_vocabulary

pytestmark = pytest.mark.slow

TEXTS = (
    "Hello world",
    " leading space",
    "   three leading, two trailing  ",
    "it's 1234567 or 12  5 or\n 7",
    "a\n\nb\n   c\t\td\r\n",
    "def f(x):\n    return x[0]**2  # comment\n\n\nprint(f([1, 2]))",
    "naïve café — “quotes”, 東京, Привет",
    "emoji 👍🏽 and 🏴‍☠️!!!",
    "x1y22z333 3.14e-10 ½ ²",
    "",
)
PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""GPT-2's pieces; digits are split off one by one before."""


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_folder)


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return read_vocabulary(find_gguf())


def test_second_call_is_instant_and_says_nothing(demo_cache: Path, demo_folder: Path) -> None:
    said: list[str] = []
    start = time.monotonic()
    assert prepare(demo_cache, said.append) == demo_folder
    assert time.monotonic() - start < 2
    assert said == []
    assert [path.name for path in demo_cache.iterdir()] == [demo_folder.name]


def test_logits_equal_the_dense_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    dense = load_dense(find_gguf())
    for parameter in dense.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    inputs = tokenizer("The capital of France is Paris. def f(x): return 12 + x", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, dense(**inputs).logits, rtol=1e-4, atol=1e-3)


def test_every_expert_is_used(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Evenly over the model; in a single layer a short text may leave one expert out."""
    inputs = tokenizer(" ".join(TEXTS), return_tensors="pt")
    with torch.no_grad():
        router_logits = model(**inputs, output_router_logits=True).router_logits
    assert len(router_logits) == model.config.num_hidden_layers
    chosen = torch.stack([logits.topk(2).indices.flatten().bincount(minlength=4) for logits in router_logits])
    assert ((chosen > 0).sum(dim=1) >= 3).all()
    shares = chosen.sum(dim=0) / chosen.sum()
    assert 0.15 < shares.min() < shares.max() < 0.35


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_vocabulary_s_bpe(
    text: str, tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, Any]
) -> None:
    expected = reference_bpe(text, vocabulary)
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected) == text


def test_special_tokens_and_chat(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    assert tokenizer("<|im_start|>user\nHi<|im_end|>")["input_ids"][::4] == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert model.generation_config.eos_token_id == 2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == 2


def reference_bpe(text: str, vocabulary: dict[str, Any]) -> list[int]:
    ids = {token: index for index, token in enumerate(vocabulary["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary["tokenizer.ggml.merges"])}
    encoded: list[int] = []
    for part in regex.split(r"(\p{N})", text):
        for piece in PIECES.findall(part):
            symbols = [BYTE_SYMBOLS[byte] for byte in piece.encode()]
            while len(symbols) > 1:
                pairs = list(itertools.pairwise(symbols))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                at = pairs.index(best)
                symbols[at : at + 2] = ["".join(best)]
            encoded += [ids[symbol] for symbol in symbols]
    return encoded


def _byte_symbols() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


BYTE_SYMBOLS = _byte_symbols()
