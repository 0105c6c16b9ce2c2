"""How Hopper's backward adds up gradients of captures (``csrc/cuda/attn_bwd_captures.cuh``), compiled for the CPU.

One warp on the emulated GPU walks over all pairs as the kernel's warps do, without the products."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import flash_attn_2_cuda
import oracle_derivative
import pytest
import torch
from oracle_flex import grids
from score_catalogue import SCORES

from flash_attn.flex import tracer
from flash_attn.flex.derivative import derivative_of

ROOT = Path(__file__).resolve().parents[2]
CC, CXX = shutil.which("gcc"), shutil.which("g++")
pytestmark = pytest.mark.skipif(not (CC and CXX), reason="gcc is not installed")

# The walk of attn_bwd_sm90.cu: each work tile has 16 keys of a warp, and its steps come from the last queries. Heads of
# a group alternate.
KERNEL = """
#include "attn_bwd_captures.cuh"
extern "C" {
#include "tests/c/emulate_cuda.h"
}

struct problem {
    const flex_values *values;
    const float *score, *grad;
    int b, h, len_q, len_kv, group, first;
};

static void kernel(const problem &p) {
    const int lane = (int)threadIdx.x, heads = p.group > 32 ? -1 : p.group;
    for (int tile = 0; tile < p.b * (p.h / p.group) * ((p.len_kv + 15) / 16); tile++) {
        const int key_0 = tile % ((p.len_kv + 15) / 16) * 16, heads_0 = tile / ((p.len_kv + 15) / 16);
        const int b = heads_0 / (p.h / p.group), head_0 = heads_0 % (p.h / p.group) * p.group;
        sums_of_heads of_heads;
        for (int row_0 = (p.len_q - 1) / ROWS * ROWS; row_0 >= 0; row_0 -= ROWS)
            for (int head = 0; head < p.group; head++) {
                const mod_functions mod(*p.values, b, head_0 + head, p.first);
                captured_sums<ROWS / 2> sums;
                for (int i = 0; i < ROWS / 2; i++) {
                    const int row = row_0 + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                    const int key = key_0 + lane / 4 + 8 * (i / 2 % 2);
                    const bool exists = row < p.len_q && key < p.len_kv;
                    const long long at = (((long long)b * p.h + head_0 + head) * p.len_q + row) * p.len_kv + key;
                    sums.derivative(mod, i, exists ? p.score[at] : 0, exists ? p.grad[at] : 0, row, key);
                }
                sums.give(mod, {row_0, key_0, lane, heads < 0 ? -1 : head}, of_heads);
            }
        if (lane < p.group)
            captured_sums<ROWS / 2>::give_heads(mod_functions(*p.values, b, head_0 + lane, p.first), of_heads);
    }
}

extern "C" __attribute__((visibility("default"))) void run(const problem *p) {
    const emulated_shape shape = {1, 1, 1, 1, 32, 1024};
    emulate_launch([](const void *parameter) { kernel(*(const problem *)parameter); }, p, &shape);
}
"""


class Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "score", "grad")]
    _fields_ += [(name, ctypes.c_int) for name in ("b", "h", "len_q", "len_kv", "group", "first")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The object of the emulated GPU."""
    path = tmp_path_factory.mktemp("engine") / "emulate_cuda.o"
    command = [CC, "-std=c11", "-O1", "-fPIC", "-D_FORTIFY_SOURCE=0", "-c", ROOT / "tests/c/emulate_cuda.c", "-o", path]
    subprocess.run(command, check=True)
    return path


def compiled(text, rows, folder, engine):
    (folder / "flex_mods.cuh").write_text(text)
    (folder / "kernel.cpp").write_text(KERNEL)
    folders = [f"-I{x}" for x in (folder, ROOT, ROOT / "csrc", ROOT / "csrc/cuda", ROOT / "tests/c")]
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-DROWS={rows}"]
    options += ["-DFLEX=1", "-DBF16=1", "-DF32=0", "-DE4M3=0"]
    included = ["-include", "cuda_emulation.h", "-include", "flex_device.h"]
    names = [folder / "kernel.cpp", engine, "-o", folder / "kernel.so"]
    # The names of the engine must not be those of another library with an emulated GPU.
    subprocess.run([CXX, *options, *folders, *included, "-Wl,-Bsymbolic", *names], check=True)
    return ctypes.CDLL(folder / "kernel.so").run


def check(mod, leaves, folder, engine, *, shape=(2, 4, 150, 75), group=2, rows=64, first=0, grad=None):
    """Compares the gradients of `leaves` with the oracle's. Returns the text."""
    program, tensors, numbers = tracer.program_of(mod, torch.float32)
    wanted = [i for i, tensor in enumerate(tensors) if any(tensor is leaf for leaf in leaves)]
    text, order = derivative_of(program, wanted)
    taken = tuple(tensors[i].detach() for i in order)
    gradients = tuple(torch.zeros(x.shape) if i in wanted else None for i, x in zip(order, taken))
    generator = torch.Generator().manual_seed(1)
    score = torch.randn(shape, generator=generator) * 2
    grad = torch.randn(shape, generator=generator) if grad is None else grad.expand(shape).contiguous()
    bound = program.text, tuple(x.detach() for x in tensors), numbers
    source, values = flash_attn_2_cuda.flex_source(bound, None, (text, taken, numbers), gradients)
    words = ctypes.create_string_buffer(values, len(values))
    run = compiled(source, rows, folder, engine)
    run(ctypes.byref(Problem(ctypes.addressof(words), score.data_ptr(), grad.data_ptr(), *shape, group, first)))
    indices = list(grids(*shape))
    indices[2] = indices[2] + first
    _, sums = oracle_derivative.run(text, taken, numbers, indices, score, grad)
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            size = float(sums[i].abs().max())
            torch.testing.assert_close(gradient.double(), sums[i], rtol=1e-5, atol=2e-5 * max(size, 1.0))
            assert size > 0
    return source


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=True)


def table_of_differences():
    table = leaf(4, 300)
    return lambda s, b, h, i, j: s + table[h, i - j + 80], [table]


def table_the_other_way():
    table = leaf(300)
    return lambda s, b, h, i, j: s * table[(3 - i) + j + 200], [table]


def buckets():
    """Most warps have one bucket, and some have several."""
    table = leaf(4, 33)
    return lambda s, b, h, i, j: s + table[h, torch.clamp(i - j, -16, 16) + 16], [table]


def steps_of_differences():
    """By a lookup of the difference, with a factor that is no difference."""
    table, places = leaf(5), torch.randint(0, 5, (400,), generator=torch.Generator().manual_seed(2))
    return lambda s, b, h, i, j: s + table[places[2 * i - j * 2 + 150]] * (i + j), [table]


def queries():
    table = leaf(2, 4, 200)
    return lambda s, b, h, i, j: s + table[b, h, i] * s, [table]


def keys():
    table = leaf(4, 75)
    return lambda s, b, h, i, j: s - table[h, j], [table]


def heads():
    slopes, cap = leaf(4), torch.tensor(3.0, requires_grad=True)
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap) + slopes[h] * (j - i), [slopes, cap]


def pairs():
    table, number = leaf(4, 200, 75), leaf(9)
    return lambda s, b, h, i, j: s + table[h, i, j] + number[(i * j) % 9], [table, number]


def negative_places():
    """Indices that count from the end, and places outside of the table."""
    table, other = leaf(20), leaf(30)
    return lambda s, b, h, i, j: s + table[-1 - (i % 7)] + other[i - j], [table, other]


def wide_differences():
    """A text with integers of 64 bits."""
    table, number = leaf(4, 64), 2**40
    return lambda s, b, h, i, j: s + table[h, (i - j + number) % 64], [table]


KINDS = {
    wide_differences: "DIFFERENCE",
    table_of_differences: "DIFFERENCE",
    table_the_other_way: "DIFFERENCE",
    buckets: "DIFFERENCE",
}
KINDS |= {steps_of_differences: "DIFFERENCE", queries: "QUERY", keys: "KEY", heads: "HEAD", pairs: "PAIR"}


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("make", [*KINDS, negative_places], ids=lambda make: make.__name__)
def test_every_kind_of_sum(make, rows, tmp_path, engine):
    mod, leaves = make()
    source = check(mod, leaves, tmp_path, engine, rows=rows, group=4 if rows == 64 else 1, first=rows - 64)
    if make in KINDS:
        assert f"part == 0 ? FLEX_OF_{KINDS[make]}" in source


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 64, 16), (1, 2, 65, 17), (2, 1, 8, 130)])
def test_differences_of_any_lengths(shape, tmp_path, engine):
    """Each diagonal for itself, exactly: grads are small integers."""
    table = torch.zeros(1000, requires_grad=True)
    grad = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(3)).float()
    check(lambda s, b, h, i, j: s + table[i - j + 400], [table], tmp_path, engine, shape=shape, group=1, grad=grad + 1)


def test_more_heads_than_lanes(tmp_path, engine):
    slopes = leaf(40)
    check(lambda s, b, h, i, j: s + slopes[h] * i, [slopes], tmp_path, engine, shape=(1, 40, 9, 20), group=40)


SHAPE = (2, 2, 70, 33)


def has_captures(make):
    leaves = make(random.Random(3), SHAPE)[1]
    return leaves and all(x.dtype != torch.float64 for x in leaves)


@pytest.mark.parametrize("make", list(filter(has_captures, SCORES)), ids=lambda make: make.__name__)
def test_every_score_mod(make, tmp_path, engine):
    check(*make(random.Random(3), SHAPE), tmp_path, engine, shape=SHAPE)
