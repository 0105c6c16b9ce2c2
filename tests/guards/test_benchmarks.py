"""Benchmarks do not erase results. The tests check the folder, the replaced rows, and the use of NVML's samples."""

import argparse

import _gpu
import _results
import pytest
from toolbox import ROOT, relative

SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if not path.name.startswith("_") and path.name != "tables.py"
]


def test_a_row_replaces_only_its_own(tmp_path):
    """A second command, with a new column, changes one cell of a file. All other rows stay as they were."""
    path, key = tmp_path / "new folder" / "x.csv", ["device", "d", "length"]
    _results.save([{"device": "A", "d": 64, "length": n, "ms": 1.5} for n in (1, 2)], path, [*key, "ms"], key)
    rows = _results.save(
        [{"device": "A", "d": 64, "length": 2, "ms": 9, "watts": 700}, {"device": "B", "d": 64, "length": 2, "ms": 3}],
        path,
        [*key, "ms", "watts"],
        key,
    )
    assert [(row["device"], row["length"], row["ms"], row["watts"]) for row in rows] == [
        ("A", "1", "1.5", ""),
        ("A", "2", "9", "700"),
        ("B", "2", "3", ""),
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_only_out_is_written(script):
    text = script.read_text(encoding="utf-8")
    assert "add_out(parser)" in text or "add_options(parser" in text
    for line in text.splitlines():
        assert '"w"' not in line and '"a"' not in line and ".to_csv" not in line, f"{line}: rows go through save()"


def test_out_is_not_committed_unless_asked():
    parser = argparse.ArgumentParser()
    _results.add_out(parser)
    out = parser.parse_args([]).out
    assert f"/{relative(out)}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_watts_are_energy_between_two_steps_of_the_counter():
    """The counter steps every 100 ms and is read every 20 ms. Steps of 2 J are 20 W, wherever the window begins."""
    meter = _gpu.Meter()
    meter.samples = [(0.02 * i, 100 + 2 * (i // 5), 1500 if i % 2 else 1400) for i in range(100)]
    assert meter.between(0.31, 1.63) == {"mhz": 1450, "watts": 20}
    meter.samples = [(at, None, None) for at, _, _ in meter.samples]
    assert meter.between(0.31, 1.63) == {"mhz": None, "watts": None}
