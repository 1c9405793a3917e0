"""The kernels are usable without the engine: what their page says runs, and imports nothing else of Lorry."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text()


def run(code: str) -> None:
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_runs_and_loads_nothing_but_kernels():
    code = "\n".join(re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL))
    assert "add_lora" in code
    own = "{m.split('.')[1] for m in sys.modules if m.startswith('lorry.')}"
    check = f"import sys; own = {own}; assert own == {{'kernels', 'errors', 'types'}}, own"
    run(f"{code}\n{check}")


def test_the_page_names_what_there_is():
    for module, functions in re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE):
        for function in re.findall(r"`(\w+)`", functions):
            assert f"def {function}(" in (ROOT / "lorry" / "kernels" / f"{module}.py").read_text(), (module, function)
