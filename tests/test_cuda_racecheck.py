"""compute-sanitizer's racecheck finds no hazard in the kernels for Hopper, and in those before Hopper.

racecheck counts an arrival at an mbarrier for one lane only. If a warp synchronises and its leader arrives for all
lanes, racecheck reports the accesses of the other lanes. So the test compiles kernels in which all lanes of a warp
arrive (ARRIVING_LANES in ptx_cluster.cuh). Before Hopper, arrivals at a named barrier wait there. All of our kernels
are instrumented, for the reason in csrc/cuda/measurements/checks.md.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flash_attn_2_cuda
import pytest
from harness_cuda import copy_texts, module_in, no_hopper

import flash_attn

TOOL = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here"),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer, of the CUDA toolkit, is not on the PATH"),
]

# Forward and backward of problems: head_dim, is_packed, options.
PROGRAM = """
import json, sys, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention
cu = torch.tensor([0, 130, 131, 131, 400, 555], device="cuda", dtype=torch.int32)
def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
for head_dim, is_packed, options in json.loads(sys.argv[1]):
    shape = (555,) if is_packed else (1, options.pop("length", 300))
    q, k, v = (randn(*shape, heads, head_dim) for heads in (4, 2, 2))
    if options.pop("has_sinks", False):
        options["sinks"] = torch.randn(4, device="cuda")
    if options.pop("has_bias", False):
        options["attn_bias"] = randn(1, 4, *[q.shape[1]] * 2)
    if is_packed:
        out = flash_attn_varlen_func(q, k, v, cu, cu, 269, 269, **options)
    elif options.get("has_mods"):
        sees = lambda b, h, i, j: (i >= j) & (i // 100 % 2 == 0)
        blocks = create_block_mask(sees, 1, 4 if options["has_mods"] == "of heads" else 1, 300, 300, "cuda", 64)
        biased = lambda s, b, h, i, j: s + 0.1 * (j - i)
        wanted = {"enable_gqa": True, "return_aux": AuxRequest(lse=True, max_scores=True)}
        out, _ = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), biased, blocks, **wanted)
    else:
        out = flash_attn_func(q, k, v, **options)
    out.backward(torch.ones_like(out))
torch.cuda.synchronize()
"""

# Few queries over caches, dense and in pages, and a packed batch with a prompt in it: head_dim, rows of a key head.
PROGRAM_WITH_CACHES = """
import json, sys, torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
def ints(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)
for head_dim, heads in json.loads(sys.argv[1]):
    q, used = randn(3, 3, 2 * heads, head_dim), ints(200, 0, 65)
    table = torch.randperm(90, device="cuda").view(3, 30).int()
    new = [randn(3, 3, 2, head_dim) for _ in range(2)] + [randn(256, head_dim // 4)] * 2
    for shape, pages in (((3, 210, 2, head_dim), None), ((90, 7, 2, head_dim), table)):
        k, v = randn(*shape), randn(*shape)
        for num_splits in (0, 3):
            options = {"cache_seqlens": used, "block_table": pages, "num_splits": num_splits, "causal": True}
            flash_attn_with_kvcache(q, k, v, **options)
            flash_attn_with_kvcache(q, k, v, *new, softcap=9.0, **options)
    pool = [randn(90, 16, 2, head_dim) for _ in range(2)]
    lengths = ints(0, 100, 101, 118), ints(0, 300, 364, 493)
    flash_attn_varlen_func(randn(118, 2 * heads, head_dim), *pool, *lengths, 100, 300, causal=True, block_table=table)
torch.cuda.synchronize()
"""

# The forward in 8 bits, of hopper/: head_dim, is_packed, options. The keys are so many that O moves to its sums.
PROGRAM_IN_8_BITS = """
import json, sys, torch
from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
cu = torch.tensor([0, 130, 131, 131, 400, 555], device="cuda", dtype=torch.int32)
def randn(*shape):
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
for head_dim, is_packed, options in json.loads(sys.argv[1]):
    keys = options.pop("keys", 300)
    if is_packed:
        q, k, v = (randn(555, heads, head_dim) for heads in (4, 2, 2))
        flash_attn_varlen_func(q, k, v, cu, cu, 269, 269, **options)
    else:
        q, k, v = randn(1, 150, 4, head_dim), randn(1, keys, 2, head_dim), randn(1, keys, 2, head_dim)
        flash_attn_func(q, k, v, **options)
torch.cuda.synchronize()
"""

DENSE = [{}, {"causal": True, "dropout_p": 0.2}, {"causal": True, "has_sinks": True}]
WINDOW = {"window_size": (50, 20)}
PACKED = [{"causal": True}, {**WINDOW, "has_sinks": True}]
PROBLEMS = {f"d{d}-dense": [(d, False, options) for options in DENSE] for d in (64, 128, 160, 192, 256)}
PROBLEMS |= {f"d{d}-packed": [(d, True, options) for options in PACKED] for d in (64, 128, 160, 192, 256)}
PROBLEMS["short"] = [(d, False, {"causal": causal, "length": 100}) for d in (64, 128) for causal in (False, True)]
PROBLEMS["d64-converter"] = [(64, False, {"causal": True, "length": 1100})]
PROBLEMS |= {f"d{d}-mods": [(d, False, {"has_mods": of}) for of in ("of all", "of heads")] for d in (64, 128)}
PROBLEMS |= {f"d{d}-mods": [(d, False, {"has_mods": "of all"})] for d in (160, 192, 256)}
PROBLEMS |= {
    f"d{d}-biased": [(d, False, {"has_bias": True, "length": 304, "dropout_p": 0.2})] for d in (64, 128, 192, 256)
}
PROBLEMS |= {f"d{d}-causal_bias": [(d, False, {"has_bias": True, "length": 304, "causal": True})] for d in (64, 128)}
PROBLEMS["d128-in_order"] = [(128, False, {"deterministic": True})]
BEFORE_HOPPER = {f"d{d}-dense": [(d, False, options) for options in DENSE] for d in (64, 96, 128, 192, 256)}
BEFORE_HOPPER |= {f"d{d}-packed": [(d, True, options) for options in PACKED] for d in (64, 96, 128, 192, 256)}
BEFORE_HOPPER |= {f"d{d}-in_order": [(d, False, {"causal": True, "deterministic": True})] for d in (64, 128, 256)}
IN_8_BITS = {f"d{d}-{keys}": [(d, False, {"keys": keys})] for d in (64, 128, 192, 256) for keys in (300, 4500)}
IN_8_BITS |= {
    f"d{d}-packed": [(d, True, options) for options in ({"causal": True}, WINDOW)] for d in (64, 128, 192, 256)
}


WITH_CACHES = {f"d{d}": [(d, heads) for heads in (1, 8, 16)] for d in (64, 96, 128, 192, 256)}


def racecheck(problems, folder, program=PROGRAM, kernels=""):
    """The output of compute-sanitizer for the problems, with the module in a folder and the kernels' texts beside the
    module. kernels: words of the kernels' names."""
    path = os.pathsep.join([str(folder), str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    tool = [
        TOOL,
        "--tool",
        "racecheck",
        "--error-exitcode",
        "7",
        "--kernel-name",
        "kns=attn",
        "--kernel-name",
        "kns=flex_walks",
    ]
    command = [*tool, sys.executable, "-c", program, json.dumps(problems)]
    environment = {**os.environ, "PYTHONPATH": path, "FLASH_ATTN_CUDA_KERNEL": kernels}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def let_all_lanes_arrive(folder):
    copy_texts(folder, "ptx_cluster.cuh", "ARRIVING_LANES = 1;", "ARRIVING_LANES = 32;")


def check_all(problems, folder, program, kernels=""):
    """The processes run in parallel, because each waits for its compiler."""
    with ThreadPoolExecutor(len(problems)) as pool:
        done = dict(zip(problems, pool.map(lambda some: racecheck(some, folder, program, kernels), problems.values())))
    clean = {name for name, x in done.items() if x.returncode == 0 and "RACECHECK SUMMARY: 0 hazards" in x.stdout}
    assert clean == set(problems), "\n".join(done[name].stdout + done[name].stderr for name in set(problems) - clean)


def test_no_hazards_where_all_lanes_arrive(tmp_path):
    module_in(tmp_path)
    let_all_lanes_arrive(tmp_path / "csrc" / "cuda")
    check_all(PROBLEMS, tmp_path, PROGRAM)


def test_no_hazards_in_prompts_where_all_lanes_arrive(tmp_path):
    module_in(tmp_path)
    let_all_lanes_arrive(tmp_path / "csrc" / "cuda")
    check_all(WITH_CACHES, tmp_path, PROGRAM_WITH_CACHES, "any,fwd_sm90")


def test_no_hazards_in_8_bits_where_all_lanes_arrive(tmp_path):
    package = Path(pytest.importorskip("flash_attn_3").__file__).parent
    shutil.copytree(package, tmp_path / "flash_attn_3", ignore=shutil.ignore_patterns("cuda"))
    let_all_lanes_arrive(tmp_path / "flash_attn_3" / "cuda")
    check_all(IN_8_BITS, tmp_path, PROGRAM_IN_8_BITS)


def test_no_hazards_before_hopper_where_arrivals_wait(tmp_path):
    """A group of warps of the backward arrives at a barrier, and goes on to the next barrier. racecheck does not order
    accesses by that one. So the group waits at both."""
    module_in(tmp_path)
    copy_texts(tmp_path / "csrc" / "cuda", "ptx_sm80.cuh", '"bar.arrive %0', '"bar.sync %0')
    check_all(BEFORE_HOPPER, tmp_path, PROGRAM, "any,sm80")


@pytest.mark.parametrize("kernels", ("any,sm80", "any,fwd_sm80"))
def test_no_hazards_in_caches_before_hopper(kernels):
    check_all(WITH_CACHES, Path(flash_attn_2_cuda.__file__).parent, PROGRAM_WITH_CACHES, kernels)


def test_racecheck_sees_the_kernels():
    """If leaders arrive for their warps, racecheck reports the accesses of the other lanes."""
    done = racecheck(PROBLEMS["d128-dense"], Path(flash_attn_2_cuda.__file__).parent)
    assert done.returncode == 7 and "Race reported" in done.stdout, done.stdout + done.stderr
