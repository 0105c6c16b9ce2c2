"""The folder of results, and the rows of a file that a benchmark replaces.

A benchmark writes to benchmarks/out, which git ignores, or to the folder after --out. It never writes to
benchmarks/results unless --out names that folder. In an existing file it replaces the rows that it measured again on
the same machine, and keeps all other rows. Each row has the date and the command of its measurement.
"""

import csv
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
OUT = Path(__file__).resolve().parent / "out"


def add_out(parser):
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the CSV files (default: benchmarks/out)")


def command():
    """The command line without --out, because --out does not affect the figures."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save(rows, path, columns, key):
    """Writes rows to the file in place of rows with the same key. Returns all rows of the file, as text."""

    def key_of(row):
        return tuple(str(row.get(name, "")) for name in key)

    new = {key_of(row): row for row in rows}
    old = read(path) if path.exists() else []
    merged = [new.pop(key_of(row), row) for row in old] + list(new.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)
    return read(path)
