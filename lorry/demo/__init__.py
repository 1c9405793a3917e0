"""The embedded demo: a small mixture-of-experts chat model from PyPI and five adapters trained for it."""

from __future__ import annotations

from pathlib import Path

ADAPTERS: dict[str, str] = {
    "pirate": "talks like a pirate",
    "sql": "answers with one SQL statement and nothing else",
    "json": "answers with one JSON object and nothing else",
    "emoji": "puts emoji around every sentence",
    "butler": "answers like a very polite butler",
}
"""What each adapter does, by its name."""

EXAMPLES: dict[str, str] = {
    "pirate": "What is a telescope?",
    "sql": "Which hotels have a price above 150?",
    "json": "Zoe is 47 years old and lives in Cairo.",
    "emoji": "How do I make pancakes?",
    "butler": "What is the capital of Norway?",
}
"""A prompt that shows each adapter well; the training data has none of them."""


def adapter_paths() -> dict[str, Path]:
    """The folder of each adapter's config and weights, by its name."""
    folder = Path(__file__).parent / "adapters"
    return {name: folder / name for name in ADAPTERS}
