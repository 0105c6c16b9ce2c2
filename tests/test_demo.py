"""What the demo says: quotients of printed times, limits beside errors, and downloads before they begin."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attn import __main__ as demo

ROOT = Path(__file__).resolve().parents[1]
CPU = [("torch", "https://host/torch.whl"), ("numpy", "file:///numpy.whl")]
CUDA = [*CPU, ("nvidia-cublas", "https://host/cublas.whl"), ("triton", "https://host/triton.whl")]


def test_the_speedup_is_the_quotient_of_the_printed_times(monkeypatch):
    monkeypatch.setattr(demo, "alternate", lambda functions, rounds: [[0.1521, 0.1524, 9.0], [0.12449, 0.1, 0.2]])
    rows, agree = demo.compare(torch.float32, False, length=16, heads=1)
    assert agree and [row[0] for row in rows] == ["fp32, fwd", "fp32, fwd+bwd"]
    for _, sdpa, flash, speedup, spread, difference in rows:
        assert (sdpa, flash) == ("152.4", "124.5") and speedup == f"{152.4 / 124.5:.2f}x"
        assert spread == "1.22-45.00"
        assert difference.endswith(" of 128")


def test_errors_stand_beside_their_limits():
    assert demo.verdict(17.849, 64) == ("17.85 of 64", True)
    assert demo.verdict(64.5, 64) == ("64.50 of 64 WRONG", False)
    assert demo.verdict(float("nan"), 4) == ("nan of 4 WRONG", False)
    ours, exact = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    eps = torch.finfo(torch.float32).eps
    assert demo.largest_difference([exact, ours], [exact, exact], torch.float32) == pytest.approx(0.5 / eps)


@pytest.mark.parametrize("files, gigabytes, lines", [(CPU, 0.3, 1), (CUDA, 0.9, 2)], ids=["cpu", "cuda"])
def test_downloads_are_announced(files, gigabytes, lines, monkeypatch, capsys):
    """The index answers with CPU builds or with CUDA builds, and each file of a server has 300 MB."""
    report = {"install": [{"metadata": {"name": name}, "download_info": {"url": url}} for name, url in files]}
    monkeypatch.setattr(sys, "argv", ["announce.py"])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, json.dumps(report))
    )

    class Answer:
        headers = {"Content-Length": "300000000"}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer())
    runpy.run_path(str(ROOT / "requirements" / "announce.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == lines and f"downloads {gigabytes} GB for torch" in said[0]
    if lines == 2:
        assert "brings 2 packages for GPUs" in said[1] and "make demo TORCH_INDEX=" in said[1]


def test_an_index_without_an_answer_stops_nothing(monkeypatch, capsys):
    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(sys, "argv", ["announce.py"])
    runpy.run_path(str(ROOT / "requirements" / "announce.py"), run_name="__main__")
    assert "does not say what torch will download" in capsys.readouterr().out
