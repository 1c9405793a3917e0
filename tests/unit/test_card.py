"""An adapter's card is for show: good ones are read, damaged ones are nothing."""

from pathlib import Path

import pytest

from lorry.lora.card import AdapterCard, read_card


def test_description_and_examples(tmp_path: Path):
    (tmp_path / "README.md").write_text("---\ndescription: talks\nwidget:\n- text: Hi\n- text: Ho\n---\n# x\n")
    assert read_card(str(tmp_path)) == AdapterCard("talks", ("Hi", "Ho"))


@pytest.mark.parametrize(
    "text", ["", "# no front matter", "---\n: [\n---\n", "---\n- 1\n---\n", "---", "---\nwidget: 3\n---\n"]
)
def test_anything_else_is_an_empty_card(text: str, tmp_path: Path):
    (tmp_path / "README.md").write_text(text)
    assert read_card(str(tmp_path)) == AdapterCard()
    assert read_card(str(tmp_path / "none")) == AdapterCard()
