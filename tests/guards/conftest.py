"""Fixtures of the guards that build packages."""

import sys
import sysconfig

import pytest
from packages import pip, tracked_files
from toolbox import ROOT, run


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the files that git tracks, so that no earlier build can help or hide an error."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked_files():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture
def install(tmp_path):
    """install(what) installs a wheel or sdist in a fresh environment that borrows torch, and returns the environment's
    python."""

    def install(what, *options):
        run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
        python = tmp_path / "fresh" / "bin" / "python"
        (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # its own .pth files stay unread
        pip("--python", python, "install", "--no-deps", "--ignore-installed", *options, what)
        return python

    return install
