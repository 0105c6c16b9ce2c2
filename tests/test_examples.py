"""The files of examples/ run. Each compares itself with plain arithmetic and fails where they differ."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_flex():
    command = [sys.executable, "examples/flex.py", "--length", "128", "--dim", "16"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert names[0] == "causal" and names[-1] == "sinks" and len(names) == 11, done.stdout
