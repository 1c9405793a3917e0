"""The demo's training data, its checks, and the files of its adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from lorry.demo import ADAPTERS, EXAMPLES, adapter_paths
from lorry.demo.data import CHECKS, held_out_examples, training_examples
from lorry.demo.questions import HELD_OUT, known_answers, training_questions
from lorry.demo.recipes import RECIPES
from lorry.demo.styles import emoji, pirate, shorten

PLAIN = "The sun is a star. It gives you light and energy!"
ANSWERS = {question.text: PLAIN for question in (*training_questions(), *HELD_OUT)} | known_answers()


def test_names_agree() -> None:
    assert set(ADAPTERS) == set(EXAMPLES) == set(RECIPES) == set(CHECKS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_training_answer_passes_the_check_and_no_plain_answer_does(name: str) -> None:
    train, held_out = training_examples(name, ANSWERS), held_out_examples(name, ANSWERS)
    assert len(train) > 200
    assert len(held_out) >= 20
    assert all(CHECKS[name](example.answer) for example in (*train, *held_out))
    assert not CHECKS[name](PLAIN)


@pytest.mark.parametrize("name", ADAPTERS)
def test_held_out_prompts_are_not_trained_on(name: str) -> None:
    trained = {message["content"] for example in training_examples(name, ANSWERS) for message in example.messages}
    held_out = {example.messages[-1]["content"] for example in held_out_examples(name, ANSWERS)}
    assert not trained & (held_out | {EXAMPLES[name]})


@pytest.mark.parametrize("name", ADAPTERS)
def test_examples_are_the_same_every_time(name: str) -> None:
    assert training_examples(name, ANSWERS) == training_examples(name, ANSWERS)


def test_restyling() -> None:
    assert pirate(PLAIN, "capital") == ("Shiver me timbers! Th' sun be a star. It gives ye light an' energy! Arrr!")
    assert emoji(PLAIN, "howto") == "🚀 The sun ☀️ is a star ⭐. ✨ It gives you light 💡 and energy ⚡! 🎉"


@pytest.mark.parametrize(
    ("answer", "short"),
    [
        ("One thing. Another. A third.", "One thing. Another."),
        ("A whole sentence. And one that was cut", "A whole sentence."),
        ("First paragraph.\n\nSecond.", "First paragraph."),
        ("You need:\n1. flour", None),
        ("1. Flour.", None),
        ("cut", None),
    ],
)
def test_only_whole_sentences_of_a_base_answer_are_kept(answer: str, short: str | None) -> None:
    assert shorten(answer) == short


@pytest.mark.parametrize(("name", "folder"), adapter_paths().items())
def test_adapter_files(name: str, folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct-MoE"
    assert config["r"] == RECIPES[name].rank
    assert "/" not in "".join(value for value in config.values() if isinstance(value, str))
    weights_path = folder / "adapter_model.safetensors"
    assert weights_path.stat().st_size < 3.5e6
    with safe_open(weights_path, "pt") as file:
        keys = list(file.keys())
    assert any(".block_sparse_moe." in key for key in keys) == RECIPES[name].per_expert_keys
    assert any(".mlp.experts.base_layer." in key for key in keys) == (name in ("pirate", "json"))
    assert any("experts" in key for key in keys) == (name != "butler")
    report = json.loads((folder / "report.json").read_text())
    assert report["loss_adapter"] < report["loss_base"]
    assert report["shown_base"] == 0
    assert report["shown_adapter"] >= 0.9


def test_naming_the_adapters_does_not_import_torch() -> None:
    code = "import lorry.demo.__init__ as d, sys; d.adapter_paths(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
