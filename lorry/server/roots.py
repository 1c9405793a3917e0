"""Adapters that are looked for by name, below folders that were allowed for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

CONFIG_FILE = "adapter_config.json"


def find_below(name: str, roots: Sequence[str]) -> Path | None:
    """The folder `name` of the first root that has an adapter there; None where none has.

    A name may have slashes. It never leads out of its root: not by "..", not as an absolute path, not by a link,
    whose target is what counts; nor to hidden files.
    """
    path = PurePosixPath(name)
    parts = path.parts
    if str(path) != name or "\0" in name or "\\" in name or any(part.startswith((".", "/")) for part in parts):
        return None
    for root in roots:
        try:
            top = Path(root).resolve(strict=True)
            folder = top.joinpath(*parts).resolve(strict=True)
            if folder.is_relative_to(top) and folder != top and (folder / CONFIG_FILE).is_file():
                return folder
        except (OSError, RuntimeError):  # not there, not readable, or a circle of links
            continue
    return None
