"""Text to tokens and back: the tokenizer with its chat template, and incremental text with stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers
from tokenizers.decoders import DecodeStream

from lorry.errors import ConfigError, InvalidRequest, UnsupportedModel

CONTEXT_TOKENS = 8
"""Prompt tokens that a detokenizer sees: decoders treat the first token of a text unlike the others."""


def _byte_alphabet() -> dict[str, int]:
    """Byte that each character of a byte-level vocabulary stands for (GPT-2's table, inverted)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A fast tokenizer with a chat template. Safe to use from several threads: nothing changes after loading."""

    def __init__(self, pretrained: Any) -> None:
        """`pretrained` is a `PreTrainedTokenizerFast`."""
        self._pretrained = pretrained
        self.backend: tokenizers.Tokenizer = pretrained.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = {i: str(token.content) for i, token in self.backend.get_added_tokens_decoder().items()}
        self._byte_level = "ByteLevel" in _decoder_types(self.backend)

    @classmethod
    def load(cls, path: str, chat_template: str | None = None) -> Self:
        """From a folder or hub name; `chat_template` is a file that takes the place of the tokenizer's own."""
        from transformers import AutoTokenizer

        template = None
        if chat_template is not None:
            try:
                template = Path(chat_template).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat template {chat_template}: {error}") from None
        try:
            pretrained = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # missing files, no network, damaged JSON: each library has its own error
            raise ConfigError(
                f"no tokenizer could be loaded from {path!r}; name one with --tokenizer-path: {error}"
            ) from error
        if not getattr(pretrained, "is_fast", False):
            raise UnsupportedModel(f"the tokenizer of {path!r} has no tokenizer.json, which streaming text needs")
        if template is not None:
            pretrained.chat_template = template
        return cls(pretrained)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the tokens that the tokenizer puts around a text (such as BOS) unless told otherwise."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
            )
        try:
            text = self._pretrained.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; they need not be whole characters. Unknown ids have none."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; where it is not whole characters, `bytes:` and its bytes, as in `bytes:\\xf0\\x9f`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}


class Detokenizer:
    """Text of one answer, token by token, up to the first stop string.

    The first stop string to be complete ends the text, and of several that complete with the same character the
    longest: so the result does not depend on how the text falls into tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_ids` is what the text continues, where it is a continuation: it may begin with a space then."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        self._context = context  # the tokens of the last text that the stream gave
        self._pending: list[int] = []  # tokens since then: an incomplete character
        self._held = ""  # decoded text that may be the start of a stop string
        self.stopped: str | None = None
        self.num_chars = 0
        """Characters decoded so far, emitted or held: where the next token's text begins."""
        self.num_emitted = 0
        """Characters given out so far; once stopped, where the text was cut."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and give the text that is safe to emit; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        for token_id in token_ids:
            self._pending.append(token_id)
            text = self._step(token_id)
            if text:
                self._context, self._pending = self._pending, []
                self._held += text
                self.num_chars += len(text)
        return self._release(final=False)

    def finish(self) -> str:
        """The text that was held back; bytes that never became a character come as replacement characters."""
        if self.stopped is not None:
            return ""
        if self._pending:
            before = self._tokenizer.decode(self._context, self._skip_special_tokens)
            text = self._tokenizer.decode(self._context + self._pending, self._skip_special_tokens)
            rest = text[len(before) :] if text.startswith(before) else ""
            self._held += rest
            self.num_chars += len(rest)
            self._pending = []
        return self._release(final=True)

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library's own: a token changed the text before it; begin anew from here
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip_special_tokens)
            return self._tokenizer.decode(self._pending, self._skip_special_tokens)

    def _release(self, final: bool) -> str:
        if not self._stop:
            text, self._held = self._held, ""
        elif found := _find_stop(self._held, self._stop):
            text, self.stopped = self._held[: found[0]], found[1]
            self._held = ""
        else:
            keep = 0 if final else _stop_prefix_len(self._held, self._stop)
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
        self.num_emitted += len(text)
        return text


def _find_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and string of the stop string that is complete first; of those that end together, the longest."""
    ends = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    return min(ends)[1:] if ends else None


def _stop_prefix_len(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop)) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(string.startswith(tail) for string in stop):
            return length
    return 0
