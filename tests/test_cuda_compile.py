"""The kernels' sources compile, without spills and with wgmma left asynchronous. Needs nvcc, but no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[1] / "csrc" / "cuda"
NVCC = shutil.which("nvcc")
FEATURES = ("CAUSAL", "LOCAL", "VARLEN", "SCORE", "DROPOUT")
COLUMNS = ("HEAD_DIM", "BLOCK_KV", "WGS", "STAGES", "Q_STAGES", "EARLY", "TURN", "SPLIT_WAIT")

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def rows():
    """(columns, features that the row serves) of tiles.def."""
    for line in (CUDA / "tiles.def").read_text().splitlines():
        row = re.match(r"FA_FWD_TILE_SM90\((.*)\)", line)
        if row:
            *numbers, serves = (x.strip() for x in row[1].split(","))
            names = FEATURES if serves == "FA_ALL_FEATURES" else re.findall(r"FA_(\w+)", serves)
            yield tuple(int(x) for x in numbers), set(names)


def variants():
    """Each row in the sets of features that differ most, among those it serves."""
    wanted = [set(), {"CAUSAL", "VARLEN"}, {"LOCAL", "SCORE", "VARLEN"}, {"CAUSAL", "DROPOUT"}]
    return [(numbers, features) for numbers, serves in rows() for features in wanted if features <= serves]


def words(x):
    return "-".join(map(str, x if isinstance(x, tuple) else sorted(x))) or "plain"


@pytest.mark.parametrize(("numbers", "features"), variants(), ids=words)
def test_variant_compiles_clean(numbers, features, tmp_path):
    options = [f"-D{name}={value}" for name, value in zip(COLUMNS, numbers)]
    options += [f"-D{name}={int(name in features)}" for name in FEATURES]
    command = [NVCC, "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-use_fast_math", "-Xptxas=-v"]
    done = subprocess.run(
        [*command, *options, "-DBF16=1", CUDA / "attn_fwd_sm90.cu", "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log
    assert not re.search(r"\(C75\d\d\)|warning", log), log
