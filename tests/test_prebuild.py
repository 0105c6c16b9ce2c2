"""Compiling GPU kernels in advance, on a machine without a GPU."""

import os
import re
import subprocess
from pathlib import Path

import flash_attn_2_cuda
import fresh_python
import pytest
import torch
from harness_plan import GCC

import flash_attn
from flash_attn import flash_attn_with_kvcache, prebuild_call
from flash_attn._variants import choose

CSRC = Path(__file__).resolve().parents[1] / "csrc"
NAME = re.compile(
    r"attn_(fwd|fwd_fp8|bwd|bwd_wide)_sm90_(bf16|fp16|e4m3)_d(32|48|64|80|96|112|128|160|192|256)(v\d+)?_q\d+kv\d+(?:x2)?"
    r"(_causal|_local)?(_varlen)?(_score)?(_cache(?:_single|_whole)?)?(_dropout)?(_alibi)?"
)
DTYPES = ("bf16", "fp16")
HELPER = re.compile(
    r"attn_bwd_prep_(bf16|fp16)_d(32|48|64|80|96|112|128|160|192|256)(v\d+)?_q\d+kv\d+(_varlen)?|flex_walks|gather"
)


ANY = re.compile(
    r"(attn_fwd_any|attn_bwd_any|attn_delta_any|attn_probs_any|kvcache|combine|sinks|bias_shift|quantize)"
    r"_(bf16|fp16|fp32|e4m3(?=.*_of3))(?:(?<=quantize_....)_(?:plain|rotated)(?:_12)?)?"
    r"((?<=fwd_any_....)|_dq|_dk|_dv|_dkdv)?(_d(48|64|96|128|192|256)_q\d+kv\d+)?(_of3)?((?<=delta_any_...._of3)_flex)?"
    r"|attn_fwd_sm80_(bf16|fp16)_d(32|48|64|80|96|112|128|160|192|256)_q\d+kv\d+s\dr?(_score)?(_cache)?(_dropout)?"
    r"|attn_decode_sm80_(bf16|fp16)_d(64|96|128|192|256)_q\d+t\ds\d"
    r"|attn_(fwd|bwd)_short_(bf16|fp16)_d(32|48|64|80|96|128|160)_q(16|32|64)kv\d\d(_varlen)?(_score)?(_dropout)?"
    r"|attn_bwd_sm80_(bf16|fp16)_d(32|48|64|96|128|160|192|256)_q\d+kv\d+w\d+(g2)?(_score)?(_dropout)?"
    r"|attn_bwd_dq_sm80_(bf16|fp16)_d(32|48|64|96|128|160|192|256)_q\d+kv\d+w\d+(g2)?|flex_blocks|flex_lists"
    r"|flex_exact_sums|sinks_grad|max_logits|align"
)


def test_no_kernel_lists_a_file_twice():
    """NVRTC would refuse it. The compiler expands the macros of the lists."""
    table = CSRC / "plan" / "kernel_table.c"
    if GCC is None:
        pytest.skip("gcc is not installed")
    text = subprocess.check_output([GCC, "-E", "-P", "-I", CSRC, table], text=True)
    lists = [re.findall(r'"([^"]+)"', files) for files in re.findall(r"\.files = \(+const char[^{]*\{(.*?)\}", text)]
    assert len(lists) == len(re.findall(r"\.files = ", table.read_text()))
    assert all(len(files) == len(set(files)) for files in lists)


def test_every_kernel_has_a_name_and_a_row():
    kernels = flash_attn_2_cuda.cuda_kernels()
    assert len({tuple(variant) for _, *variant in kernels}) == len(kernels)
    any_kernels = [name for name, _, _, _, arch in kernels if arch == 0]
    assert all(ANY.fullmatch(name) for name in any_kernels)
    assert (
        len(set(any_kernels))
        == len(any_kernels)
        == 2 * ((6 + 6 + 3) + (12 + 12 + 8) + 3 * 3)
        + 3 * 3
        + 6
        + 2
        + 5 * 3
        + 4
        + 2 * 11 * (4 + 1)
        + 5 * (4 + 1)
        + 2 * 19 * 8
        + 2 * 16
        + 2 * 2 * 21 * 8
        + 1
    )
    hopper = [name for name, _, _, _, arch in kernels if arch == 90 and not HELPER.fullmatch(name)]
    hopper = [name for name in hopper if not name.startswith("attn_decode_")]
    found = {tuple(NAME.fullmatch(name).groups()) for name in hopper}
    caches = None, "_cache", "_cache_single"
    of_fwd = [(m, v, s, c, d, None) for m in (None, "_causal", "_local") for v in (None, "_varlen")
              for s in (None, "_score") for c in caches for d in (None, "_dropout")]  # fmt: skip
    options = [o for o in of_fwd if not o[3]]
    alone = [(*o[:5], "_alibi") for o in options if not (o[2] or o[4])]
    wanted = ("64", "80", "96", "112", "128", "192", "256")
    whole = [(*o[:3], "_cache_whole", *o[4:]) for o in of_fwd if o[3] == "_cache"]
    fwd = {("fwd", t, d, None, *o) for t in DTYPES for d in wanted for o in of_fwd}
    fwd |= {("fwd", t, d, None, *o) for t in DTYPES for d in ("128", "192", "256") for o in whole}
    fwd |= {("fwd", t, "160", None, *o) for t in DTYPES for o in of_fwd if not o[3]}
    fwd |= {("fwd", t, d, None, *o) for t in DTYPES for d in ("32", "48") for o in of_fwd if not (o[3] or o[4])}
    bwd = {("bwd", t, d, None, *o) for t in DTYPES for d in ("32", "48", *wanted[:5]) for o in options + alone}
    wide = {("bwd_wide", t, d, None, *o) for t in DTYPES for d in ("160", "192", "256") for o in options}
    plain = [o for o in options if not o[4]]  # v of another width is never dropped
    widths = ("64", "v128"), ("64", "v256"), ("192", "v128")
    fwd |= {("fwd", t, *d, *o) for t in DTYPES for d in widths for o in of_fwd + whole if not o[4]}
    wide |= {("bwd_wide", t, "192", "v128", *o) for t in DTYPES for o in plain}
    fp8 = {("fwd_fp8", "e4m3", d, None, *o) for d in ("64", "128", "192", "256") for o in plain}
    assert found == fwd | bwd | wide | fp8


@pytest.mark.parametrize(
    ("family", "row", "features", "arch"),
    [
        (-1, 0, 0, 90),
        (1000, 0, 0, 90),
        (0, -1, 0, 90),
        (0, 1000, 0, 90),
        (0, 0, 3, 90),
        (0, 0, 4096, 90),
        (0, 0, 8192, 90),
        (0, 0, 16, 90),
        (0, 0, 0, 80),
    ],
)
def test_what_no_call_asks_for_is_refused(family, row, features, arch):
    words = f"no CUDA kernel of family {family}, row {row}, with features {features} for sm_{arch}"
    with pytest.raises(RuntimeError, match=words):
        flash_attn_2_cuda.build_cuda_kernel(family, row, features, arch)


def test_unknown_arch():
    with pytest.raises(ValueError, match="there are kernels for sm_80, .*, not for sm_42"):
        flash_attn.prebuild(["sm_42"])


def nvrtc_is_here():
    try:
        return any("nvrtc" in line for line in open("/proc/self/maps")) or bool(os.environ.get("CUDA_HOME"))
    except OSError:
        return False


@pytest.mark.skipif(nvrtc_is_here(), reason="NVRTC is here")
def test_without_nvrtc_one_sentence(tmp_path):
    environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(tmp_path), "FLASH_ATTN_NVRTC": str(tmp_path / "none.so")}
    done = fresh_python.module("flash_attn.build", env=environment)
    if done.returncode == 0:
        pytest.skip("the system has an NVRTC")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "install NVIDIA's package nvidia-cuda-nvrtc, or set FLASH_ATTN_NVRTC" in done.stderr
    assert f"it is {environment['FLASH_ATTN_NVRTC']}, which cannot be loaded" in done.stderr


def test_kept_kernels_are_listed(tmp_path):
    name = "attn_fwd_any_fp32_d48_q64kv64_of3_flex_0123456789abcdef"
    for release in ("00000001", "00000002"):
        (tmp_path / f"{name}-{'ab' * 8}-{release}.cubin").write_bytes(bytes(4096))
    (tmp_path / "notes.txt").write_text("no kernel")
    environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(tmp_path)}
    done = fresh_python.module("flash_attn.build", "--list", env=environment)
    assert done.returncode == 0, done.stderr
    row = f"{4:8} KiB  {name}"
    assert done.stdout.splitlines() == [row, row, f"2 kernels in {tmp_path}"]
    done = fresh_python.module("flash_attn.build", "--list", "--arch", "sm_80", env=environment)
    assert done.returncode == 2 and "--list lists the kernels of all GPUs: leave out --arch" in done.stderr


@pytest.mark.parametrize("given", [{"FLASH_ATTN_CACHE_DIR": "/a"}, {"XDG_CACHE_HOME": "/b"}, {"HOME": "/c"}, {}])
def test_the_folder_of_kernels(given):
    names = ("FLASH_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    environment = {**{name: x for name, x in os.environ.items() if name not in names}, **given}
    code = "import flash_attn; print(flash_attn.kernel_root())"
    done = fresh_python.python(code, env=environment)
    if not given:
        assert done.returncode == 1 and "there is no home folder" in done.stderr
        return
    ((variable, root),) = given.items()
    below = {"FLASH_ATTN_CACHE_DIR": "", "XDG_CACHE_HOME": "/flash_attn", "HOME": "/.cache/flash_attn"}[variable]
    assert done.stdout == f"{root}{below}\n"


def test_few_queries_over_a_cache_ask_for_kernels_of_a_wheel():
    """Few work tiles are cut into parts, which a second kernel combines."""
    q = torch.empty(2, 64, 32, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(256, 64, 8, 128, dtype=torch.bfloat16, device="meta")
    table, used = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((2, 128), (2,)))
    options = {"cache_seqlens": used, "block_table": table, "causal": True, "compiles": False}
    forward = "attn_fwd_sm90_bf16_d128_q128kv128_causal_cache"
    for num_splits, names in ((0, [forward, "combine_bf16"]), (1, [forward]), (3, [forward, "combine_bf16"])):
        asked = prebuild_call(flash_attn_with_kvcache, q, cache, cache, num_splits=num_splits, **options)
        assert [kernel.name for kernel in asked] == names
        assert set(names) <= {name for name, *_ in choose(flash_attn_2_cuda, ["sm_90a"])}
