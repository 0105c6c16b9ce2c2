"""Runs the C test programs of tests/c: CPU kernels against the reference, plain and sanitized, and texts of GPU
kernels."""

import os
import re
import shlex
import warnings
from pathlib import Path

import flash_attn_2_cuda
import pytest
from object_cache import INSTALLED_FLAGS, SETUP_FLAGS, cached
from toolbox import CSRC, ROOT, lacking, run, share_of, tool

SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer"
EMULATION_FLAGS = "-Og --param asan-instrumentation-with-call-threshold=0"
BUILDS = {
    "gcc": ("gcc", "-O2"),
    "clang, a quarter of the cases": ("clang", "-O2 -DFEW_SEEDS=1"),
    "gcc with AddressSanitizer and UBSan": ("gcc", f"-O1 -g1 {SANITIZERS}"),
}


def make_options(compiler, flags):
    """Variables of tests/c/Makefile. Without sanitizers the engine's objects are those of other tests."""
    engine = INSTALLED_FLAGS if compiler == "gcc" else ["-fPIC", *SETUP_FLAGS]
    plain, engine = (engine, []) if SANITIZERS in flags else ([], engine)
    variables = {"CC": cached(tool(compiler)), "ENGINE_FLAGS": engine, "PLAIN_FLAGS": plain}
    return (
        f"CFLAGS={flags}",
        f"EMULATION_FLAGS={EMULATION_FLAGS}",
        *(f"{name}={shlex.join(words)}" for name, words in variables.items()),
    )


@pytest.mark.parametrize(("compiler", "flags"), BUILDS.values(), ids=BUILDS)
def test_kernels_meet_the_reference(compiler, flags, tmp_path):
    if not list(Path("/usr/include").glob("**/cmocka.h")):
        lacking("cmocka.h is not installed: apt-get install libcmocka-dev")
    command = [tool("make"), "-j", str(os.cpu_count()), "--output-sync", "-C", ROOT / "tests" / "c"]
    printed = run(*command, *make_options(compiler, flags), f"BUILD={tmp_path}", "check")
    assert "[  PASSED  ]" in printed, printed
    assert "[  SKIPPED ]" not in printed, printed
    for line in re.findall(".*no test ran.*", printed):
        warnings.warn(line, stacklevel=1)


# Programs of tests/c with emulated GPU kernels. A group shares the kernels that it compiles.
GPU_PROGRAMS = {
    "dense and packed": ["cuda"],
    "with mods": ["cuda_flex", "flex_classify", "flex_walks"],
    "decode and small kernels": ["cuda_decode", "cuda_combine", "gather", "align", "quantize"],
}


@pytest.mark.parametrize("programs", GPU_PROGRAMS.values(), ids=GPU_PROGRAMS)
def test_generic_gpu_kernels_meet_the_reference(programs, tmp_path):
    """The texts of the GPU kernels are compiled for the CPU (tests/c/cuda_emulation.h)."""
    if not list(Path("/usr/include").glob("**/cmocka.h")):
        lacking("cmocka.h is not installed: apt-get install libcmocka-dev")
    files = [tmp_path / f"check_{program}" for program in programs]
    command = [tool("make"), "-j", str(os.cpu_count()), "-C", ROOT / "tests" / "c", *make_options("gcc", "-O2")]
    run(*command, f"CXX={tool('g++')}", f"BUILD={tmp_path}", *files)
    for file in files:
        printed = run(file, cwd=ROOT / "tests" / "c")
        assert "[  PASSED  ]" in printed and "[  SKIPPED ]" not in printed, printed


def test_every_program_of_the_makefile_runs():
    """`make check_cuda` runs the programs of all groups."""
    makefile = (ROOT / "tests" / "c" / "Makefile").read_text()
    listed = re.search(r"^check_cuda: \$\(addprefix \$\(BUILD\)/check_,(.*)\)$", makefile, re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(sum(GPU_PROGRAMS.values(), []))


def compile_emulation(object_file, source="emulate_cuda.c", level="-O1"):
    flags = ["-std=c11", level, "-Wall", "-Wextra", "-I", CSRC]
    run(*cached(tool("gcc")), *flags, "-c", ROOT / "tests" / "c" / source, "-o", object_file)


def scheduled_kernels():
    """Hopper's rows with each mask, packed, and some rows that are not packed or read a cache: {name: arguments of
    cuda_kernel_source}."""
    mask = r"kv\d+(_causal|_local)?"
    in_8_bits = r"fwd_fp8_sm90_e4m3_d(64_q192|256_q128)"
    some = rf"(fwd_sm90_bf16_d(64_q192|192_q128)|{in_8_bits}|bwd\w*_sm90_bf16_d(64|96|192)_q\d+)"
    cache = r"fwd_sm90_bf16_d(64_q192kv128|192_q128kv96|256_q128kv64)(_causal|_local)(_varlen)?_cache"
    cache += r"|fwd_sm90_bf16_d(128_q128kv128|192v128_q128kv96)_causal(_varlen)?_cache_whole"
    wanted = re.compile(rf"attn_((fwd|bwd|bwd_wide)_sm90_bf16_\w*?{mask}_varlen|{some}{mask}|{cache})")
    return {name: rest for name, *rest in flash_attn_2_cuda.cuda_kernels() if wanted.fullmatch(name)}


@pytest.mark.parametrize("name", share_of(scheduled_kernels(), 4))
def test_tiles_are_found_once_and_boxes_of_tma_begin_inside_their_maps(name, tmp_path):
    _, options = flash_attn_2_cuda.cuda_kernel_source(*scheduled_kernels()[name])
    constants = [option for option in options if option.startswith("-D")] + ["-DBACKWARD"] * name.startswith("attn_bwd")
    c = ROOT / "tests" / "c"
    compile_emulation(tmp_path / "engine.o")
    compiler = [tool("g++"), "-std=c++17", "-O1", "-w", "-include", c / "cuda_emulation.h", "-I", CSRC]
    run(
        *compiler, *constants, c / "check_boxes.cpp", tmp_path / "engine.o", "-rdynamic", "-o", tmp_path / "check_boxes"
    )
    assert "begin inside" in run(tmp_path / "check_boxes")


MODS = """
#ifndef FLEX_SCORE
#define FLEX_SCORE 1
#endif
#ifndef FLEX_BLOCKS
#define FLEX_BLOCKS 1
#endif
#ifndef HIDES_ROWS
#define HIDES_ROWS 0
#endif
#ifndef FLEX_MASK
#define FLEX_MASK 1
#endif
#define FLEX_DERIVATIVE 1
#define FLEX_PARTS 0
#ifndef FLEX_HIDDEN
#define FLEX_HIDDEN 0
#endif
#define FLEX_LONG_MASK 0
#ifndef FLEX_PREFETCHES
#define FLEX_PREFETCHES 1
#endif
#define FLEX_PAIR_BITS HAS_PAIRS
#define FLEX_ROW HAS_PAIRS
#ifndef FLEX_OCTETS
#define FLEX_OCTETS 0
#endif
#define FLEX_ADDS (FLEX_SCORE && !FLEX_FACTOR)
#define FLEX_HEAD_VALUES FLEX_ADDS
struct flex_values { long long words[1]; };
struct flex_sums {};
#define INDICES int b, int h, int i, int j
DEVICE float flex_factor(int i, int j) { return FLEX_FACTOR ? (float)((i + j) % 7 - 3) : 1; }
DEVICE float flex_score_factor(const flex_values &, int b, int h, int i, float row) {
    if (HAS_PAIRS && row != (float)i) return NAN;
#ifdef FLEX_IS_FINITE /* the backward: the text of a mod that clears scores says 0 */
    if (FLEX_IS_FINITE) return 1;
#endif
    return FLEX_ADDS && i % 13 == 5 ? 0 : 1;
}
static enum { OF_PLACES, OF_MASKS, OF_SLOPES, OF_KEYS } added_scores;
DEVICE float flex_score(const flex_values &, float x, INDICES, int j_step = -1) {
    if (j_step >= 0 && j_step % 2 != j % 2) return NAN;
    x *= flex_score_factor({}, b, h, i, (float)i);
    if (added_scores == OF_MASKS) return x + (i / 150 == j / 150 && i >= 64 ? 0 : h % 2 ? -1e4f : -3e38f);
    if (added_scores == OF_SLOPES) return x - (h % 2 ? 0.7f : 2.0f) * fabsf((float)(i - j));
    if (added_scores == OF_KEYS) return x + (h % 2 ? 0.5f : 0.7f) * (float)(700 - j);
    return x * flex_factor(i, j) - 0.01f * (float)((i + 3 * j + h + b) % 50);
}
DEVICE void flex_prefetch(const flex_values &, INDICES) {
    if (i < 0 || j < 0) abort();
}
DEVICE unsigned short flex_pair_bits(const flex_values &, INDICES) {
    if (i < 0 || j < 0) abort();
    return (unsigned short)(i * 131 + j * 7 + h * 3 + b);
}
/* 8 keys from each place. */
DEVICE const unsigned short *flex_pair_place(const flex_values &x, INDICES) {
    alignas(16) static unsigned short octets[1 << 16][8];
    static bool is_filled = false;
    for (int n = 0; !is_filled && n < 8 << 16; n++) octets[n / 8][n % 8] = (unsigned short)(n / 8 + n % 8 * 7);
    is_filled = true;
    if (j % 8 || j < 0) abort();
    return octets[flex_pair_bits(x, b, h, i, j)];
}
DEVICE float flex_row(const flex_values &, int b, int h, int i) {
    if (i < 0) abort();
    return (float)i; /* lanes are told apart by this */
}
DEVICE float flex_score_of(const flex_values &x, unsigned short bits, float row, float score, INDICES) {
    if (bits != flex_pair_bits(x, b, h, i, j) || row != (float)i) return NAN;
    return flex_score(x, score, b, h, i, j);
}
DEVICE void flex_head_values(const flex_values &, float *values, int b, int h) { values[0] = (float)(h + b); }
DEVICE bool is_pair_of_thread(int i, int j, int i_step, int j_step) {
#ifdef BLOCK_Q /* the backward */
    return (i - i_step) % 2 == 0 && i_step < BLOCK_Q && (j - j_step) % 16 < 8;
#else
    return i_step >= 0 && i_step < 16 && i_step % 8 == 0 && (j - j_step) % 2 == 0 && j_step < BLOCK_KV;
#endif
}
DEVICE float flex_exponent(const flex_values &x, const float *values, float start, INDICES, int i_step, int j_step
#if HAS_PAIRS
                           , unsigned short bits, float row) {
    if (bits != flex_pair_bits(x, b, h, i, j) || row != (float)i) return NAN;
#else
                           ) {
#endif
    if (!is_pair_of_thread(i, j, i_step, j_step) || values[0] != (float)(h + b)) return NAN;
    return start + 1.44269504f * flex_score(x, 0, b, h, i, j);
}
DEVICE bool flex_mask(const flex_values &, INDICES) {
    return (i * 7 + j * 3 + h + b) % 5 != 0 && !(HIDES_ROWS && i % 11 == 3);
}
DEVICE float flex_derivative(const flex_values &, flex_sums &, float, float grad, INDICES) {
    return grad * flex_factor(i, j);
}
DEVICE void flex_add_sums(const flex_values &, const flex_sums &, int, int) {}
"""


def kernels_with_mods():
    """Hopper's rows of the backward, which take mods: {name: arguments of cuda_kernel_source}. Without options there is
    no kernel of 64 queries and columns."""
    wanted = re.compile(r"attn_bwd_(wide_)?sm90_((bf16_d\d+(v\d+)?|fp16_d64)_q\d+kv\d+|bf16_d64_q64kv128_score)")
    return {name: rest for name, *rest in flash_attn_2_cuda.cuda_kernels() if wanted.fullmatch(name)}


@pytest.mark.parametrize("name", share_of(kernels_with_mods(), 2))
def test_lists_turns_hidden_pairs_and_weights_of_the_backward_with_mods(name, tmp_path):
    _, options = flash_attn_2_cuda.cuda_kernel_source(*kernels_with_mods()[name])
    given = ("-DFLEX=", "-DSCORE=")
    constants = [x for x in options if x.startswith("-D") and not x.startswith(given)] + ["-DSCORE=0"]
    c = ROOT / "tests" / "c"
    (tmp_path / "flex_mods.cuh").write_text(MODS)
    compile_emulation(tmp_path / "engine.o")
    compiler = [tool("g++"), "-std=c++17", "-O1", "-w", "-include", c / "cuda_emulation.h", "-I", CSRC, "-I", tmp_path]
    for factor, is_finite, has_pairs in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)):
        options = ["-DFLEX=1", "-DFLEX_MAX=0", f"-DFLEX_FACTOR={factor}", f"-DFLEX_IS_FINITE={is_finite}"]
        options.append(f"-DHAS_PAIRS={has_pairs}")
        mods = [*options, c / "check_bwd_mods.cpp", tmp_path / "engine.o", "-rdynamic"]
        run(*compiler, *constants, *mods, "-o", tmp_path / "check_bwd_mods")
        assert "as they should be" in run(tmp_path / "check_bwd_mods")


def emulated_on_hopper(program, kernel, tmp_path, *more):
    """Compiles a program of tests/c with the constants of a kernel's row of tiles.def, and runs it. `more` replaces
    constants. The whole kernel runs on emulated threads, TMA, mbarriers and wgmma (tests/c/hopper_emulation.h). By hand
    the program takes a seed and a number of rounds, too."""
    kernels = {name: rest for name, *rest in flash_attn_2_cuda.cuda_kernels()}
    _, options = flash_attn_2_cuda.cuda_kernel_source(*kernels[kernel])
    given = [x.split("=")[0] for x in more]
    constants = [x for x in options if x.startswith("-D") and x.split("=")[0] not in given]
    c = ROOT / "tests" / "c"
    objects = [tmp_path / "engine.o", tmp_path / "products.o"]
    compile_emulation(objects[0])
    compile_emulation(objects[1], "emulate_products.c", "-O3")
    compiler = [tool("g++"), "-std=c++17", "-O1", "-w", "-include", c / "cuda_emulation.h", "-I", CSRC, "-I", c]
    memory = [f"-Wl,--defsym={name}=memory+1024" for name in ("smem", "smem_bytes")]
    files = [c / f"{program}.cpp", *objects, "-rdynamic", *memory, "-o", tmp_path / program]
    run(*compiler, "-I", tmp_path, *constants, *more, *files)
    return run(tmp_path / program)


# Rows of up to 64 columns walk in bursts without options. The others have the steps of kernels with options.
EMULATED_BACKWARDS = [
    "bf16_d64_q128kv128_causal", "fp16_d64_q128kv128", "bf16_d64_q128kv128_local_varlen",
    "fp16_d64_q128kv128_causal_varlen", "bf16_d128_q64kv128_causal", "fp16_d32_q128kv128_causal",
    "bf16_d48_q128kv128_varlen", "bf16_d80_q64kv128_causal_varlen", "fp16_d112_q64kv128_local_varlen_alibi",
    "fp16_d48_q128kv128_causal_score_dropout", "bf16_d64_q64kv128_causal_score_dropout", "fp16_d64_q64kv128_dropout",
    "bf16_d64_q64kv128_local_varlen_score", "bf16_d128_q64kv128_causal_varlen_dropout"
]  # fmt: skip


@pytest.mark.parametrize("row", share_of(EMULATED_BACKWARDS, 2))
def test_gradients_of_the_emulated_backward_on_hopper(row, tmp_path):
    assert "all gradients are right" in emulated_on_hopper("check_bwd_sm90", f"attn_bwd_sm90_{row}", tmp_path)


# A bias in the exponent, loaded late, early or through shared memory, and a score_mod whose derivative is a factor.
@pytest.mark.parametrize("row, dropout, factor, pairs, octets, blocks", [
    ("bf16_d128_q64kv128", 0, 0, 1, 0, 0), ("fp16_d64_q64kv128", 1, 1, 0, 0, 0), ("bf16_d128_q64kv128", 1, 0, 0, 0, 0),
    ("bf16_d64_q64kv128", 0, 0, 1, 1, 0), ("fp16_d64_q64kv128", 1, 0, 1, 1, 0), ("bf16_d64_q64kv128", 0, 1, 1, 1, 1)
])  # fmt: skip
def test_gradients_of_the_emulated_backward_with_mods(row, dropout, factor, pairs, octets, blocks, tmp_path):
    (tmp_path / "flex_mods.cuh").write_text(MODS)
    mods = [
        f"-DDROPOUT={dropout}",
        "-DFLEX=1",
        "-DFLEX_MAX=0",
        "-DFLEX_IS_FINITE=0",
        f"-DFLEX_BLOCKS={blocks}",
        f"-DFLEX_OCTETS={octets}",
    ]
    mods += [f"-DFLEX_FACTOR={factor}", f"-DHAS_PAIRS={pairs}"]
    kernel = f"attn_bwd_sm90_{row}_dropout"  # without options there is no kernel of 64 queries and columns
    assert "all gradients are right" in emulated_on_hopper("check_bwd_sm90", kernel, tmp_path, *mods)


@pytest.mark.parametrize("name", [name for name in kernels_with_mods() if "_wide_" not in name])
def test_shared_memory_of_the_backward_has_room_for_what_options_add(name, tmp_path):
    """Bits of hidden pairs, dropout and biases of pairs. Static assertions of the text know its size."""
    _, options = flash_attn_2_cuda.cuda_kernel_source(*kernels_with_mods()[name])
    constants = [x for x in options if x.startswith("-D") and not x.startswith(("-DFLEX=", "-DSCORE=", "-DDROPOUT="))]
    (tmp_path / "flex_mods.cuh").write_text(MODS)
    c = ROOT / "tests" / "c"
    compiler = [tool("g++"), "-std=c++17", "-fsyntax-only", "-w", "-include", c / "cuda_emulation.h", "-I", CSRC]
    has_dropout = int("_d64_q128" not in name)  # its calls with dropout have 64 rows
    mods = ["-DFLEX=1", "-DSCORE=0", f"-DDROPOUT={has_dropout}", "-DFLEX_MAX=0", "-DFLEX_IS_FINITE=0"]
    mods.append("-DFLEX_FACTOR=0")
    of_pairs = ["-DHAS_PAIRS=1", f"-DFLEX_OCTETS={int('_d64_q64' in name)}"]
    of_mask = ["-DHAS_PAIRS=0", "-DFLEX_HIDDEN=1", "-DFLEX_SCORE=0", "-DFLEX_MASK=0"]
    for more in (of_pairs, of_mask):
        run(*compiler, "-I", c, "-I", tmp_path, *constants, *mods, *more, c / "check_bwd_sm90.cpp")


@pytest.mark.parametrize("row", ["bf16_d64_q128kv128", "fp16_d80_q64kv128_varlen", "bf16_d256_q64kv128_varlen"])
def test_rows_of_the_emulated_preparation_of_the_backward(row, tmp_path):
    assert "all rows are prepared" in emulated_on_hopper("check_bwd_prep", f"attn_bwd_prep_{row}", tmp_path)


# O leaves from the place of Q, from a place of its own, or without shared memory. There are one to four warpgroups, two
# CTAs on an SM, every mask, packed sequences, fewer columns than shared memory has, V of other columns, KV caches,
# and single or whole keys of them.
EMULATED_FORWARDS = [
    "bf16_d64_q192kv128_causal_varlen", "fp16_d64_q192kv128", "bf16_d64_q64kv64_local_varlen", "fp16_d64_q256kv64",
    "bf16_d128_q128kv128", "bf16_d128_q128kv64_local", "bf16_d256_q128kv64_causal", "bf16_d80_q192kv96_causal_varlen",
    "fp16_d112_q128kv128", "bf16_d160_q128kv128_local", "fp16_d32_q256kv64_causal", "bf16_d192v128_q128kv96",
    "fp16_d112_q192kv80_varlen", "bf16_d64_q192kv128_causal_cache", "fp16_d64_q64kv64_local_varlen_cache",
    "bf16_d128_q128kv128_cache", "bf16_d80_q192kv96_causal_varlen_cache", "bf16_d128_q128kv128_cache_single",
    "bf16_d64_q64kv64_causal_cache_single", "fp16_d96_q128kv128_local_varlen_cache_single",
    "bf16_d192_q128kv96_cache_single", "bf16_d256_q128kv64_causal_cache_single",
    "fp16_d128_q64kv128", "bf16_d128_q64kv128_cache", "bf16_d256_q64kv64_causal", "fp16_d192_q64kv96_causal_cache",
    "fp16_d192v128_q128kv96_causal_varlen_cache_whole", "bf16_d128_q128kv128_cache_whole",
    "bf16_d256_q64kv64_local_cache_whole", "fp16_d64_q128kv64x2", "bf16_d64_q128kv64x2_causal_varlen",
    "fp16_d128_q128kv64_varlen", "bf16_d128_q64kv64_causal_varlen", "bf16_d64_q128kv64_dropout",
    "fp16_d128_q128kv128_causal_varlen_dropout", "bf16_d64_q128kv128_cache_dropout"
]  # fmt: skip


@pytest.mark.parametrize("row", share_of(EMULATED_FORWARDS, 2))
def test_rows_of_the_emulated_forward_on_hopper(row, tmp_path):
    assert "all rows are right" in emulated_on_hopper("check_fwd_sm90", f"attn_fwd_sm90_{row}", tmp_path)


@pytest.mark.parametrize("row", ["d64_q192kv128_causal", "d128_q192kv96_local", "d64_q192kv128_causal_varlen"])
def test_rows_of_the_emulated_forward_in_8_bits(row, tmp_path):
    assert "all rows are right" in emulated_on_hopper("check_fwd_fp8", f"attn_fwd_fp8_sm90_e4m3_{row}", tmp_path)


# Elements of pairs come to a place of their own, to that of O, or from memory.
# A score_mod that is a sum goes to the exponents of tiles without hidden pairs. Without blocks it has no mask here.
EMULATED_MODS = [
    ("bf16_d128_q128kv128", 1, 1, 0), ("bf16_d64_q128kv128_dropout", 1, 1, 1), ("bf16_d128_q128kv128", 1, 0, 1),
    ("bf16_d64_q128kv128_dropout", 0, 1, 0), ("bf16_d192_q128kv96", 1, 0, 1), ("bf16_d96_q128kv128", 0, 0, 1)
]  # fmt: skip


@pytest.mark.parametrize("row, octets, blocks, is_sum", share_of(EMULATED_MODS, 2))
def test_rows_of_the_emulated_forward_with_mods_on_hopper(row, octets, blocks, is_sum, tmp_path):
    (tmp_path / "flex_mods.cuh").write_text(MODS)
    has_pairs = octets or not is_sum
    mods = ["-DFLEX=1", f"-DFLEX_FACTOR={1 - is_sum}", f"-DFLEX_MAX={1 - is_sum}", f"-DHAS_PAIRS={int(has_pairs)}"]
    mods += [f"-DFLEX_OCTETS={octets}", f"-DFLEX_BLOCKS={blocks}", f"-DFLEX_PREFETCHES={int(has_pairs)}"]
    mods += ["-DFLEX_MASK=0"] * (is_sum and not blocks)
    assert "all rows are right" in emulated_on_hopper("check_fwd_sm90", f"attn_fwd_sm90_{row}", tmp_path, *mods)


# Tiles of one and of several heads, with and without shared memory for O, in boxes and whole keys.
EMULATED_WITH_MODS = [
    ("bf16_d128_q128kv128_cache", 1), ("fp16_d96_q128kv128_cache", 0), ("bf16_d256_q128kv64_cache", 1),
    ("fp16_d192v128_q128kv96_cache_whole", 1), ("bf16_d128_q128kv128_cache_whole", 0)
]  # fmt: skip


@pytest.mark.parametrize("row, has_score", share_of(EMULATED_WITH_MODS, 2))
def test_rows_of_the_emulated_forward_with_mods_over_caches(row, has_score, tmp_path):
    (tmp_path / "flex_mods.cuh").write_text(MODS)
    is_sum = "bf16" in row
    mods = ["-DFLEX=1", f"-DFLEX_FACTOR={1 - is_sum}", "-DFLEX_MAX=0", "-DHAS_PAIRS=1", "-DFLEX_BLOCKS=0"]
    mods += [f"-DFLEX_OCTETS={has_score}", "-DHIDES_ROWS=1", f"-DFLEX_MASK={1 - (is_sum and has_score)}"]
    mods.append(f"-DFLEX_SCORE={has_score}")
    assert "all rows are right" in emulated_on_hopper("check_fwd_sm90", f"attn_fwd_sm90_{row}", tmp_path, *mods)
