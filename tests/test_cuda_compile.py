"""The kernels' sources compile, without spills and with wgmma left asynchronous. Needs nvcc, but no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[1] / "csrc" / "cuda"
NVCC = shutil.which("nvcc")
FEATURES = ("CAUSAL", "LOCAL", "VARLEN", "SCORE", "DROPOUT")
COLUMNS = ("HEAD_DIM", "BLOCK_KV", "WGS", "STAGES", "Q_STAGES", "TURN", "O_WAIT")

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
    if isinstance(x, (str, int)):
        return str(x)
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


def backward_variants():
    """Each row of the backward in the sets of features that differ most. One warpgroup of four feeds the others with 24
    registers a thread: what it spills is read once a tile. Score and dropout spill a little everywhere."""
    text = (CUDA / "tiles.def").read_text()
    for row in re.finditer(r"^FA_BWD_(WIDE_)?TILE_SM90\(\s*(\d+),\s*(\d+),\s*(\d+),", text, re.MULTILINE):
        name = "attn_bwd_wide_sm90" if row[1] else "attn_bwd_sm90"
        numbers = tuple(int(x) for x in row.groups()[1:])
        wide_open = {"LOCAL", "SCORE", "DROPOUT", "VARLEN", "DETERMINISTIC"}
        yield name, numbers, set(), 150
        yield name, numbers, {"CAUSAL", "DETERMINISTIC"}, 200
        yield name, numbers, {"CAUSAL", "VARLEN"}, 200
        yield name, numbers, wide_open, 500
        yield "attn_bwd_prep", numbers, {"VARLEN"}, 0
        yield "attn_bwd_convert", numbers, {"VARLEN"}, 0


@pytest.mark.parametrize(("name", "numbers", "features", "most_spilled"), list(backward_variants()), ids=words)
def test_backward_compiles_clean(name, numbers, features, most_spilled, tmp_path):
    names = (*FEATURES, "DETERMINISTIC")
    options = [f"-D{name}={value}" for name, value in zip(("HEAD_DIM", "BLOCK_Q", "BLOCK_KV"), numbers)]
    options += [f"-D{name}={int(name in features)}" for name in names]
    command = [NVCC, "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-use_fast_math", "-Xptxas=-v"]
    done = subprocess.run(
        [*command, *options, "-DBF16=1", CUDA / f"{name}.cu", "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= most_spilled, log
    assert not re.search(r"\(C75\d\d\)|warning", log), log


def decode_rows():
    for row in re.finditer(r"^FA_DECODE_TILE_SM90\((.*?)\)", (CUDA / "tiles.def").read_text(), re.MULTILINE):
        yield tuple(int(x) for x in row[1].split(","))


@pytest.mark.parametrize("numbers", decode_rows(), ids=words)
def test_decode_compiles_clean(numbers, tmp_path):
    columns = ("HEAD_DIM", "WARPS_Q", "TEAMS", "SLOTS", "CTAS")
    options = [f"-D{name}={value}" for name, value in zip(columns, numbers)]
    command = [NVCC, "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-use_fast_math", "-Xptxas=-v"]
    done = subprocess.run(
        [*command, *options, "-DBF16=1", CUDA / "attn_decode_sm90.cu", "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "warning" not in log, log


ANY_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def any_variants():
    """Every generic kernel for the oldest and the newest architecture, those that take most registers for all."""
    for kind, columns, grads in (("FWD", ("HEAD_DIM", "BLOCK_KV", "WARPS"), (None,)),
                                 ("BWD", ("HEAD_DIM", "WALK", "WARPS"), (0, 1, 2))):  # fmt: skip
        for row in re.finditer(rf"^FA_{kind}_TILE_ANY\((.*?)\)", (CUDA / "tiles.def").read_text(), re.MULTILINE):
            *numbers, element_bytes = (int(x) for x in row[1].split(","))
            options = [f"-D{name}={value}" for name, value in zip(columns, numbers)]
            for grad in grads:
                own = [] if grad is None else [f"-DGRAD={grad}"]
                for arch in ANY_ARCHS if numbers[0] == 256 else (ANY_ARCHS[0], ANY_ARCHS[-1]):
                    yield arch, f"attn_{kind.lower()}_any.cu", element_bytes == 4, (*options, *own)
    for name in ("attn_delta_any.cu", "attn_probs_any.cu", "kvcache.cu"):
        yield from ((arch, name, is_fp32, ()) for arch in (ANY_ARCHS[0], ANY_ARCHS[-1]) for is_fp32 in (False, True))


@pytest.mark.parametrize(("arch", "name", "is_fp32", "options"), any_variants(), ids=str)
def test_generic_kernel_compiles_clean(arch, name, is_fp32, options, tmp_path):
    command = [NVCC, "-cubin", f"-arch={arch}", "-std=c++17", "-use_fast_math", "-Xptxas=-v", *options]
    command += [f"-DF32={int(is_fp32)}", f"-DBF16={int(not is_fp32)}"]
    done = subprocess.run([*command, CUDA / name, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "warning" not in log, log
    # 256 columns of a warp's 16 rows take 128 registers of a thread's 255: ptxas keeps a few addresses elsewhere.
    allowed = 128 if "-DHEAD_DIM=256" in options else 0
    assert max(int(spilled) for spilled in re.findall(r"(\d+) bytes spill stores", log)) <= allowed, log
