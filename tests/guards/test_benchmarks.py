"""Benchmarks do not erase results. The tests check the folder, the replaced rows, and the use of NVML's samples."""

import argparse
import re
import runpy
import sys
from pathlib import Path

import _gpu
import _results
import pytest
import tables
import torch
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
    assert all(row[name] for row in rows for name in ("date", "cpu", "python", "torch", "flash_attn", "command"))
    before = path.read_bytes()
    assert _results.save([], path, key, key) == rows and path.read_bytes() == before
    less = _results.save([{"device": "C", "d": 1, "length": 1}], path, key, key)
    assert less[1]["watts"] == "700" and less[3]["watts"] == "", "columns that a command does not know are kept"


def test_take_replaces_rows_from_before_rows_had_their_facts(monkeypatch, tmp_path):
    """A new row of a GPU, with the commit and the host's processor, takes the place of the old row without them."""
    results, new = tmp_path / "results", tmp_path / "new"
    old = [{"date": "1", "device": "H", "kernel": "ours", "d": d, "ms": ms} for d, ms in ((64, 2), (128, 3))]
    _results.merge(old, results / "x.csv", list(old[0]), ["device", "d"])
    fresh = {"date": "2", "commit": "abc", "cpu": "Xeon", "device": "H", "kernel": "ours", "d": 64, "ms": 1}
    _results.merge([fresh], new / "x.csv", list(fresh), ["device", "d"])
    monkeypatch.setattr(tables, "RESULTS", results)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.take(new)
    assert [(row["d"], row["ms"], row["commit"]) for row in _results.read(results / "x.csv")] == [
        ("64", "1", "abc"),
        ("128", "3", ""),
    ]


def test_a_row_tells_where_it_was_measured(monkeypatch):
    facts = _results.facts()
    assert set(_results.FACTS) == set(facts)
    assert "family" in facts["cpu"] or not Path("/proc/cpuinfo").exists()
    monkeypatch.setattr(_results, "ROOT", Path("/"))
    monkeypatch.setenv("FLASH_ATTN_COMMIT", "0123abc")
    assert _results.commit.__wrapped__() == "0123abc"


ON_A_GPU = [
    script
    for script in SCRIPTS
    if "need_gpu()" in script.read_text(encoding="utf-8") or "from _gpu import" in script.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("script", ON_A_GPU, ids=relative)
def test_without_a_gpu_nothing_is_written(script, monkeypatch, tmp_path):
    """The program says one sentence. It neither measures nor touches files."""
    device = ["--device", "cuda"] if '"--device"' in script.read_text(encoding="utf-8") else []
    monkeypatch.setattr(sys, "argv", [str(script), *device, "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        pytest.skip(str(error))
    sentence = rf"{script.name} measures a CUDA GPU, torch \S+ finds none, and nothing was written\."
    assert re.fullmatch(sentence, ended.value.code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_only_out_is_written(script):
    text = script.read_text(encoding="utf-8")
    assert "add_out(parser)" in text or "add_options(parser" in text
    for line in text.splitlines():
        assert '"w"' not in line and '"a"' not in line and ".to_csv" not in line, f"{line}: rows go through save()"


def test_out_is_not_committed_unless_asked(monkeypatch):
    parser = argparse.ArgumentParser()
    _results.add_out(parser)
    assert parser.parse_args(["--save"]).out == _results.RESULTS
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", str(_results.RESULTS)])
    monkeypatch.setattr(sys, "argv", ["x.py", "--d", "64", "--save", "--out", "folder", "--e"])
    assert _results.command() == "python benchmarks/x.py --d 64 --e"
    out = parser.parse_args([]).out
    assert f"/{relative(out)}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_watts_are_energy_between_two_steps_of_the_counter():
    """The counter steps every 100 ms and is read every 20 ms. Steps of 2 J are 20 W, wherever the window begins."""
    meter = _gpu.Meter()
    meter.samples = [(0.02 * i, 100 + 2 * (i // 5), 1500 if i % 2 else 1400) for i in range(100)]
    assert meter.between(0.31, 1.63) == {"mhz": 1450, "watts": 20}
    meter.samples = [(at, None, None) for at, _, _ in meter.samples]
    assert meter.between(0.31, 1.63) == {"mhz": None, "watts": None}


def test_a_comparison_tells_why_a_cell_is_empty(monkeypatch):
    """Memory that is missing, a backend that refuses, and a kernel that was too slow at a shorter length. Any other
    failure ends the program."""
    import random

    import _compare_tables
    import compare_sdpa

    def failing(error):
        def call(*_):
            raise error

        return call

    kernels = {
        "ours": compare_sdpa.KERNELS["ours"],
        "eager": compare_sdpa.eager,
        "hungry": failing(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")),
        "absent": failing(RuntimeError("No available kernel. Aborting execution.")),
    }
    monkeypatch.setattr(compare_sdpa, "KERNELS", {**compare_sdpa.KERNELS, **kernels})
    monkeypatch.setattr(compare_sdpa, "peak_on_cpu", lambda name, *_: (1.5, 99 if name == "eager" else 0.01))
    options, slow, rows = argparse.Namespace(device="cpu", seconds=0.01, limit=20), set(), []
    for length in (32, 64):
        tensors = [torch.randn(1, length, 2, 16) for _ in range(4)]
        found = compare_sdpa.compare(tensors, "backward", list(kernels), True, slow, options, random.Random(0))
        problem = {"device": "cpu", "pass": "backward", "dtype": "float32", "h": 2, "d": 16, "causal": True}
        for name, row in found.items():
            empty = dict.fromkeys(("ms", "mib", "out_error", "dq_error"), "")
            rows.append({**empty, **problem, "kernel": name, "length": length, **row})
    rows = [{name: str(value) for name, value in row.items()} for row in rows]
    assert all(float(row["dq_error"]) < 1e-5 for row in rows if row["kernel"] == "ours")
    cells = {(row["kernel"], row["length"]): _compare_tables.cell(row, "mib") for row in rows}
    assert cells["ours", "64"] == cells["eager", "32"] == "1.5" and cells["eager", "64"] == "too slow"
    assert cells["hungry", "32"] == "out of memory" and cells["absent", "64"] == "none"
    facts = {"cpu": "a CPU", "torch": "2", "date": "1"}
    text = "\n".join(_compare_tables.tables_of("compare_cpu.csv", [{**row, **facts} for row in rows]))
    assert "out of memory" in text and text.endswith("`compare_cpu.csv`.")
    with pytest.raises(RuntimeError, match="another"):
        compare_sdpa.why(RuntimeError("another failure"))
