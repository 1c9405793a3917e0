"""Each checked-in adapter shows its behaviour on the demo model, and the base does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorry.demo import ADAPTERS, EXAMPLES, adapter_paths
from lorry.demo.chat import answer_greedily
from lorry.demo.data import CHECKS

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")]


def test_adapters_show_their_behaviour(demo_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    chats = {name: [{"role": "user", "content": EXAMPLES[name]}] for name in ADAPTERS}
    said = dict(zip(ADAPTERS, answer_greedily(model, tokenizer, list(chats.values()), 64), strict=True))
    assert not [name for name in ADAPTERS if CHECKS[name](said[name])]
    for name, folder in adapter_paths().items():
        adapted = peft.PeftModel.from_pretrained(model, folder)
        [text] = answer_greedily(adapted, tokenizer, [chats[name]], max_new_tokens=80)
        assert CHECKS[name](text), f"{name}: {text}"
        model = adapted.unload()
