"""Type checkers accept typical uses of the public functions, and refuse mistakes. mypy and pyright run if present."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn

HERE = Path(__file__).parent / "typing"
ROOT = Path(flash_attn.__file__).parent.parent
MYPY = [
    "mypy",
    "--strict",
    "--no-warn-return-any",
    "--follow-imports=silent",
    "--no-error-summary",
    f"--python-executable={sys.executable}",
]
COMMANDS = {"mypy": MYPY, "pyright": ["pyright", f"--pythonpath={sys.executable}"]}


def check(tool, file):
    command = shutil.which(tool)
    if command is None:
        pytest.skip(f"{tool} is not installed")
    return subprocess.run(
        [command, *COMMANDS[tool][1:], HERE / file], capture_output=True, text=True, timeout=600, cwd=ROOT
    )


@pytest.mark.parametrize("tool", COMMANDS)
def test_typical_uses(tool):
    done = check(tool, "uses.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", COMMANDS)
def test_every_mistake_is_found(tool):
    done = check(tool, "misuses.py")
    lines = (HERE / "misuses.py").read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if re.match(r"    flash_attn_\w+\(", line)}
    found = {int(number) for number in re.findall(r"misuses\.py:(\d+)\b.*error", done.stdout)}
    assert found == mistakes and len(mistakes) == 10, done.stdout


def test_what_is_public_has_annotations():
    assert (Path(flash_attn.__file__).parent / "py.typed").exists()
    functions = [getattr(flash_attn, name) for name in flash_attn.__all__ if name != "__version__"]
    for function in functions:
        signature = inspect.signature(function)
        missing = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert not missing and signature.return_annotation is not inspect.Signature.empty, (function.__name__, missing)
