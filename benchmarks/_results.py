"""The folder of results, the facts that every row carries, and the rows of a file that a benchmark replaces.

A benchmark writes to benchmarks/out, which git ignores, or to the folder after --out. With --save it writes to
benchmarks/results, which git tracks. In an existing file it replaces the rows that it measured again on the same
machine, and keeps all other rows. Every row has the date, the commit, the command, the processor and the versions of
its measurement. A "+" behind the commit means changed files. Where there is no git, FLASH_ATTN_COMMIT gives the commit.
"""

import argparse
import csv
import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "benchmarks" / "out"
FACTS = ["date", "commit", "cpu", "python", "torch", "flash_attn", "command"]

sys.path.insert(0, str(ROOT / "tests"))  # cases.py is there


def folder(text):
    path = Path(text).resolve()
    if path == RESULTS:
        raise argparse.ArgumentTypeError("benchmarks/results is tracked by git; --save writes there")
    return path


def add_out(parser):
    parser.add_argument("--out", type=folder, default=OUT, help="folder of the CSV files (default: benchmarks/out)")
    parser.add_argument(
        "--save", dest="out", action="store_const", const=RESULTS, help="write to benchmarks/results, which git tracks"
    )


def pictures(out):
    """The folder of the pictures beside the rows. Pictures that no document shows are not kept with the results."""
    return OUT if out == RESULTS else out


def need_gpu():
    """Ends the program with one sentence where there is no GPU to measure, before anything is written."""
    import torch

    if not torch.cuda.is_available():
        name = Path(sys.argv[0]).name
        sys.exit(f"{name} measures a CUDA GPU, torch {torch.__version__} finds none, and nothing was written.")


def command():
    """The command line without --out and --save, because they do not affect the figures."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=") and word != "--save"]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


@functools.cache
def commit():
    def git(*words):
        try:
            done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("FLASH_ATTN_COMMIT", "")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@functools.cache
def facts():
    """The values of FACTS."""
    from flash_attn._measure import machine

    where = machine()
    return {**{name: where[name] for name in FACTS if name in where}, "commit": commit(), "command": command()}


def read(path):
    """The rows of a file. Older files lack some columns; row.get takes what is there."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save(rows, path, columns, key):
    """Writes rows with their facts to the file in place of rows with the same key. Returns all rows, as text.

    Without rows the file stays as it is. Columns that only the file has are kept.
    """
    columns = [*columns, *(name for name in FACTS if name not in columns)]
    return merge([{**facts(), **row} for row in rows], path, columns, key)


def merge(rows, path, columns, key):
    """``save`` of rows that have their facts."""

    def key_of(row):
        return tuple(str(row.get(name, "")) for name in key)

    old = read(path) if path.exists() else []
    if not rows:
        return old
    new = {key_of(row): row for row in rows}
    columns = [*columns, *(name for name in (old[0] if old else ()) if name not in columns)]
    merged = [new.pop(key_of(row), row) for row in old] + list(new.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")  # a run that ends in the middle leaves the old file
    with open(fresh, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)
    fresh.replace(path)
    return read(path)
