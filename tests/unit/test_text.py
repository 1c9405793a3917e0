"""Text to tokens and back: incremental text is the whole text, cut exactly where the first stop string begins."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lorry.errors import ConfigError, InvalidRequest
from lorry.text import Detokenizer, Tokenizer
from tests.server.harness import build_tokenizer

TRICKY = "a 🙂 naïve 漢字 — fish 👩‍👩‍👧 and\tchips\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(build_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Spaces are `▁` and unknown characters bytes, as in Llama 2: the decoder drops the first space of a text."""
    words = ["▁", "▁hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    backend = BackendTokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """What comes out for each token, and at the end."""
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


def test_characters_split_over_tokens_come_out_whole(tokenizer: Tokenizer):
    token_ids = tokenizer.encode(TRICKY)
    assert len(token_ids) > len(TRICKY)  # the emoji and the ideographs are several tokens each
    parts = pieces(Detokenizer(tokenizer), token_ids)
    assert "".join(parts) == TRICKY
    assert not any("\ufffd" in part for part in parts)


def test_several_tokens_at_once_give_the_same_text(tokenizer: Tokenizer):
    assert Detokenizer(tokenizer).push(tokenizer.encode(TRICKY)) == TRICKY


def test_an_incomplete_character_at_the_end_is_not_lost(tokenizer: Tokenizer):
    emoji = tokenizer.encode("🙂")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("so ") + emoji[:2]) == "so "
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_do_not_stop_what_follows(tokenizer: Tokenizer):
    broken = tokenizer.encode("🙂")[:2]
    token_ids = broken * 3 + tokenizer.encode(" hello 🙂")
    text = "".join(pieces(Detokenizer(tokenizer), token_ids))
    assert text == tokenizer.decode(token_ids)
    assert text.endswith(" hello 🙂")


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("a<|im_start|>b")
    assert "".join(pieces(Detokenizer(tokenizer), token_ids)) == "ab"
    assert "".join(pieces(Detokenizer(tokenizer, skip_special_tokens=False), token_ids)) == "a<|im_start|>b"


def test_stop_string_over_several_tokens(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, ("lazy dog",))
    parts = pieces(detokenizer, tokenizer.encode("over the lazy dog, slowly"))
    assert "".join(parts) == "over the "
    assert detokenizer.stopped == "lazy dog"
    assert detokenizer.num_emitted == len("over the ")


def test_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, ("</end>",))
    assert detokenizer.push(tokenizer.encode("x</en")) == "x"
    assert detokenizer.push(tokenizer.encode("joy</e")) == "</enjoy"
    assert detokenizer.finish() == "</e"
    assert detokenizer.stopped is None


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, ("o",))
    assert detokenizer.push(tokenizer.encode("hello world")) == "hell"
    assert detokenizer.push(tokenizer.encode("hello")) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("stop", "text", "expected", "stopped"),
    [
        (("bc", "abcd"), "xabcd", "xa", "bc"),  # the first to be complete
        (("bc", "abc"), "xabcd", "x", "abc"),  # complete together: the longest
        (("aab",), "aaaab", "aa", "aab"),  # begins within a failed start
        (("abab", "ba"), "ababab", "a", "ba"),
        (("🙂",), "a 🙂 b", "a ", "🙂"),
        (("\n\n", "\n"), "a\n\nb", "a", "\n"),
    ],
)
def test_overlapping_stop_strings(
    tokenizer: Tokenizer, stop: tuple[str, ...], text: str, expected: str, stopped: str
):
    token_ids = tokenizer.encode(text)
    for at_once in (True, False):
        detokenizer = Detokenizer(tokenizer, stop)
        parts = [detokenizer.push(token_ids)] if at_once else pieces(detokenizer, token_ids)
        assert "".join(parts) == expected
        assert detokenizer.stopped == stopped


def test_stops_do_not_depend_on_how_text_falls_into_tokens(tokenizer: Tokenizer):
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices("ab🙂", k=12))
        stop = tuple("".join(rng.choices("ab🙂", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        expected = text[: min(ends)[1]] if ends else text
        detokenizer = Detokenizer(tokenizer, stop)
        token_ids = tokenizer.encode(text)
        parts = []
        while token_ids:
            size = rng.randint(1, 5)
            parts.append(detokenizer.push(token_ids[:size]))
            token_ids = token_ids[size:]
        parts.append(detokenizer.finish())
        assert "".join(parts) == expected, (text, stop)


def test_text_that_continues_a_prompt_keeps_its_first_space(byte_fallback: Tokenizer):
    hello, world = byte_fallback.backend.token_to_id("▁hello"), byte_fallback.backend.token_to_id("▁world")
    assert "".join(pieces(Detokenizer(byte_fallback), [world, hello])) == "world hello"
    continued = Detokenizer(byte_fallback, prompt_ids=[hello])
    assert "".join(pieces(continued, [world, hello])) == " world hello"


def test_byte_tokens_become_characters(byte_fallback: Tokenizer):
    token_ids = [1 + 2 + byte for byte in "é🙂".encode()]
    assert "".join(pieces(Detokenizer(byte_fallback), token_ids)) == "é🙂"
    assert byte_fallback.token_bytes(token_ids[0]) == "é".encode()[:1]


def test_bytes_and_text_of_one_token(tokenizer: Tokenizer, byte_fallback: Tokenizer):
    token_ids = tokenizer.encode(" hello 🙂")
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == " hello 🙂".encode()
    assert tokenizer.token_text(token_ids[0]) == " hello"
    assert tokenizer.token_text(token_ids[-1]).startswith("bytes:\\x")
    assert tokenizer.token_text(tokenizer.encode("<|im_end|>")[0]) == "<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert byte_fallback.token_text(1) == " hello"


def test_chat_is_rendered_by_the_template(tokenizer: Tokenizer):
    token_ids = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    rendered = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_refuses_says_why(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequest, match="no pirates"):
        tokenizer.render_chat([{"role": "pirate", "content": "arr"}])


def test_without_a_template_there_is_no_chat(tmp_path: Path):
    plain = Tokenizer.load(str(build_tokenizer(tmp_path, chat_template=None)))
    assert not plain.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        plain.render_chat([{"role": "user", "content": "hello"}])


def test_a_template_from_a_file_takes_the_place_of_the_models(tmp_path: Path):
    build_tokenizer(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = Tokenizer.load(str(tmp_path), str(tmp_path / "own.jinja"))
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hello"}])) == "hello!"
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        Tokenizer.load(str(tmp_path), str(tmp_path / "missing.jinja"))


def test_a_tokenizer_that_is_not_there_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        Tokenizer.load(str(tmp_path / "nothing"))
