"""The demo model, built once for the tests of this folder, as on a machine with an empty home and no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorry.demo.model import DemoModelMissing, find_gguf

BUILD = "from lorry.demo.model import prepare; print(prepare(progress=lambda line: None))"


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_folder(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_gguf()
    except DemoModelMissing as error:
        pytest.skip(str(error))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "LORRY_CACHE": str(demo_cache),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])
