"""The adapters that were loaded while a server ran, in a file: a server that is started again has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from lorry.errors import ConfigError

log = logging.getLogger(__name__)


class SavedAdapter(msgspec.Struct, frozen=True):
    """What was asked for."""

    name: str
    path: str
    pinned: bool = False


class SavedAdapters:
    """A JSON file, replaced as a whole whenever something changes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[SavedAdapter]:
        """Nothing where there is no file yet; `ConfigError` where it is damaged, so that nothing is lost silently."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[SavedAdapter])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"--lora-state {self._path} cannot be read: {error}; mend it, or remove it to start without it"
            ) from None

    def write(self, adapters: Iterable[SavedAdapter]) -> None:
        """A file that cannot be written is logged: the adapters are served all the same."""
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            new.write_bytes(msgspec.json.format(msgspec.json.encode(list(adapters))) + b"\n")
            os.replace(new, self._path)
        except OSError as error:
            log.error("--lora-state %s cannot be written: %s", self._path, error)
