"""The demo model's tokenizer, rebuilt from the vocabulary inside the GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKEN = 3
"""The GGUF token type of special tokens."""


def read_vocabulary(gguf_path: Path) -> dict[str, Any]:
    """The fields `tokenizer.*` and `llama.context_length` of a GGUF file, by name."""
    from gguf import GGUFReader  # only a first run needs it: a cached folder is served without gguf

    reader = GGUFReader(gguf_path)
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.") or name == "llama.context_length"
    }


def build_tokenizer(vocabulary: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits digits one by one, as SmolLM2 was trained.

    transformers' own conversion leaves the digit split out, and then "  5" (two spaces) comes out wrong.
    """
    if vocabulary["tokenizer.ggml.model"] != "gpt2" or vocabulary["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unexpected tokenizer {vocabulary['tokenizer.ggml.pre']!r}, this recipe knows 'smollm'")
    tokens: list[str] = vocabulary["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in vocabulary["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds: list[int] = vocabulary["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[vocabulary["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[vocabulary["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[vocabulary["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[vocabulary["tokenizer.ggml.padding_token_id"]],
        model_max_length=int(vocabulary["llama.context_length"]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = vocabulary["tokenizer.chat_template"]
    return tokenizer
