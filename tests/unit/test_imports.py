"""The rooms of the house: imports point one way, and some rooms never see torch."""

import ast
from pathlib import Path

import pytest

import lorry

ROOT = Path(lorry.__file__).parent
LAYERS = [
    {"errors", "types", "config"},
    {"kernels", "threads", "upload"},
    {"kv", "attention", "models", "text"},
    {"lora"},
    {"engine"},
    {"server", "cli", "demo", "__init__"},
]
NO_TORCH = ["server", "text.py", "kv/prefix.py", "engine/scheduler.py", "engine/sequence.py", "engine/messages.py"]
NO_TORCH += ["engine/worker.py", "lora/store.py", "config.py", "types.py", "errors.py", "cli.py"]


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it the import stands, save those for type checkers only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(room: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if room in layer)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "lorry" and len(parts) > 1 and (ROOT / parts[1]).exists() | (ROOT / f"{parts[1]}.py").exists():
            assert layer_of(parts[1]) <= layer_of(room), f"{path} imports {name}, which is further up the house"


def closure(path: Path, seen: set[Path]) -> set[Path]:
    """A file and all files of the package that importing it runs."""
    if path in seen:
        return seen
    seen.add(path)
    for name in imported(path):
        target = ROOT.parent / Path(*name.split("."))
        for file in (target.with_suffix(".py"), target / "__init__.py"):
            if name.startswith("lorry.") and file.exists():
                closure(file, seen)
    return seen


@pytest.mark.parametrize("room", NO_TORCH)
def test_some_rooms_never_import_torch(room: str):
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        assert not any(name.split(".")[0] == "torch" for name in imported(path)), path
    if room in ("kv/prefix.py", "engine/scheduler.py", "lora/store.py"):
        for path in closure(ROOT / room, set()):
            assert not any(name.split(".")[0] in ("torch", "transformers") for name in imported(path)), path


def test_public_names():
    assert lorry.__all__ == ["LLM", "Completion", "LorryError", "RequestOutput", "SamplingParams", "__version__"]
