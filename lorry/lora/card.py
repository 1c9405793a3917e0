"""What an adapter's folder says about itself to people: the front matter of its README.md (a hub model card)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class AdapterCard:
    """One line on what the adapter does (`description`) and prompts that show it (`widget`, as model hubs use it)."""

    description: str | None = None
    examples: tuple[str, ...] = ()


def read_card(path: str) -> AdapterCard:
    """The card of an adapter's folder. It is for show only: one that is missing or damaged is an empty card."""
    try:
        text = (Path(path) / "README.md").read_text()
        fields = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError):
        return AdapterCard()
    if not isinstance(fields, dict):
        return AdapterCard()
    description = fields.get("description")
    widget = fields.get("widget")
    items = widget if isinstance(widget, list) else []
    examples = [item["text"] for item in items if isinstance(item, dict) and isinstance(item.get("text"), str)]
    return AdapterCard(description if isinstance(description, str) else None, tuple(examples[:8]))
