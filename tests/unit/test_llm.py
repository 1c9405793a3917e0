"""Offline use: `LLM` and `lorry generate` on a tiny model with a tokenizer of its own."""

from functools import partial
from pathlib import Path

import pytest

from lorry import LLM, SamplingParams
from lorry.cli import main
from lorry.errors import AdapterFormatError, InvalidRequest, ModelNotFound
from tests.adapters import make_peft_adapter
from tests.models import tiny_model
from tests.server.harness import build_tokenizer

FACTORY = partial(tiny_model, "llama", vocab_size=400)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    FACTORY().save_pretrained(path)
    return build_tokenizer(path)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peft_adapter(tmp_path_factory.mktemp("a"), FACTORY, ["q_proj", "v_proj"], rank=4, spread=0.6)


@pytest.fixture(scope="module")
def llm(folder: Path, adapter: Path) -> LLM:
    return LLM(str(folder), adapters={"a": str(adapter)}, max_total_tokens=2048, lora_memory="4MiB")


def assert_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use, stats.adapter_references) == (0, 0, 0, 0)
    assert not llm.engine.has_work


def test_one_prompt_and_several_each_with_its_adapter(llm: LLM):
    base = llm.generate("hello there", GREEDY)[0]
    adapted = llm.generate("hello there", GREEDY, adapter="a")[0]
    assert base.text != adapted.text
    both = llm.generate(["hello there"] * 3, GREEDY, adapter=["a", None, "a"])
    assert [output.text for output in both] == [adapted.text, base.text, adapted.text]
    assert [output.adapter for output in both] == ["a", None, "a"]
    assert llm.generate(llm.tokenizer.encode("hello there"), GREEDY)[0].text == base.text
    assert base.outputs[0].finish_reason == "length"
    assert_idle(llm)


def test_n_answers_by_seed(llm: LLM):
    params = SamplingParams(temperature=1.5, seed=7, n=3, max_tokens=8, ignore_eos=True)
    texts = [answer.text for answer in llm.generate("once", params)[0].outputs]
    assert len(set(texts)) > 1
    assert [answer.text for answer in llm.generate("once", params)[0].outputs] == texts


def test_the_largest_seed_serves_several_answers(llm: LLM):
    params = SamplingParams(temperature=1.5, seed=2**63 - 1, n=3, max_tokens=8, ignore_eos=True)
    texts = [answer.text for answer in llm.generate("once", params)[0].outputs]
    assert len(set(texts)) > 1


def test_a_stop_string_ends_and_is_cut(llm: LLM):
    full = llm.generate("hello there", GREEDY)[0].text
    stop = full[3:5]
    answer = llm.generate("hello there", SamplingParams(temperature=0, max_tokens=12, stop=(stop,)))[0].outputs[0]
    assert answer.text == full[: full.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert_idle(llm)


def test_chat_uses_the_template(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    by_hand = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", GREEDY)[0].text
    assert llm.chat(messages, GREEDY)[0].text == by_hand
    assert [o.text for o in llm.chat([messages, messages], GREEDY)] == [by_hand] * 2


def test_errors_leave_nothing_behind(llm: LLM, tmp_path: Path):
    with pytest.raises(ModelNotFound, match="'b' is loaded .loaded: a."):
        llm.generate("x", GREEDY, adapter="b")
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 adapters"):
        llm.generate(["x", "y"], GREEDY, adapter=["a"])
    with pytest.raises(InvalidRequest, match="context holds"):
        llm.generate(["fits", "too long " * 300], GREEDY)
    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json"):
        llm.load_adapter("broken", str(tmp_path))
    assert_idle(llm)


def test_adapters_come_and_go(llm: LLM, adapter: Path):
    llm.load_adapter("again", str(adapter))
    assert llm.generate("x", GREEDY, adapter="again")[0].text == llm.generate("x", GREEDY, adapter="a")[0].text
    llm.unload_adapter("again")
    with pytest.raises(ModelNotFound):
        llm.generate("x", GREEDY, adapter="again")


def test_the_generate_command(folder: Path, adapter: Path, capsys: pytest.CaptureFixture[str], llm: LLM):
    arguments = ["generate", str(folder), "--lora-paths", f"a={adapter}", "--max-total-tokens", "512"]
    arguments += ["--prompt", "hi", "--adapter", "a", "--max-tokens", "6"]
    assert main(arguments) == 0
    expected = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=6), "a")[0].text
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    assert main([*arguments[:-4], "--adapter", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err
