"""The files of examples/ run. Each compares itself with plain arithmetic and fails where they differ."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def names_of_examples(*arguments):
    command = [sys.executable, "examples/flex.py", "--length", "128", "--dim", "16", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return [line.split()[0] for line in done.stdout.splitlines()[1:]]


def test_flex():
    names = names_of_examples()
    assert names[0] == "causal" and names[-1] == "sinks" and len(names) == 11


def test_pictures_of_flex(tmp_path):
    pytest.importorskip("matplotlib")
    names = names_of_examples("--pictures", str(tmp_path))
    pictures = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert pictures.keys() == set(names) and all(x.startswith(b"\x89PNG") for x in pictures.values())
    assert pictures["causal"] != pictures["softcap"]
