"""Reads a checkpoint's files ahead of the loader, which maps them and would wait for one page after the other."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil
from huggingface_hub import try_to_load_from_cache

NUM_THREADS = 4
BLOCK = 2**24
"""Bytes of one read."""

SHARE_OF_MEMORY = 0.8
"""Of the free host memory that the files may fill; larger ones would drive each other out of the page cache."""

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a model's folder, or of a hub's copy that is on this machine already."""
    index, whole = (_find(path, name) for name in (_INDEX, _WHOLE))
    if index is not None:
        names = json.loads(index.read_text())["weight_map"].values()
        files = [index.parent / name for name in dict.fromkeys(names)]
        return [file for file in files if file.is_file()]
    return [whole] if whole is not None else []


def _find(path: str, name: str) -> Path | None:
    file = Path(path) / name
    if file.is_file():
        return file
    if Path(path).exists():
        return None
    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


class Readahead:
    """As a context: reads the files in order on threads of its own, into the page cache and nowhere else."""

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [file.stat().st_size for file in files]
        fits = sum(sizes) <= SHARE_OF_MEMORY * psutil.virtual_memory().available
        self._blocks: Iterator[tuple[Path, int]] = iter(
            [(f, at) for f, n in zip(files, sizes, strict=True) for at in range(0, n, BLOCK)] if fits else []
        )
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_THREADS)]
        self.num_read = 0

    def __enter__(self) -> Readahead:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Until all is read, or the context has ended."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        buffer = bytearray(BLOCK)
        while not self._stopped.is_set():
            with self._lock:
                block = next(self._blocks, None)
            if block is None:
                return
            file, at = block
            try:
                with _opened(file) as handle:
                    count = os.preadv(handle, [buffer], at)
            except OSError:  # the loader will meet it too, and say what is wrong
                return
            with self._lock:
                self.num_read += count


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    handle = os.open(file, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
