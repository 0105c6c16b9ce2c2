"""Memory is linear in the lengths and does not leak. Any number of threads and any Python thread give the same bits."""

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flash_attn_2_cuda
import fresh_python
import pytest
import torch
from cases import Case
from harness import ISAS, ours

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

MIB = 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


PEAK = """
import resource, sys, torch
import flash_attn_2_cuda
from flash_attn import flash_attn_func, flash_attn_varlen_func
torch.set_num_threads(2)
dtype, packed, options = eval(sys.argv[1])

def run(n):
    q, k, v, dout = (torch.randn(1, n, 1, 64).to(getattr(torch, dtype)) for _ in range(4))
    if packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        cu = torch.tensor([0, n // 3, n], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = flash_attn_varlen_func(q, k, v, cu, cu, n, n, **options) if packed else flash_attn_func(q, k, v, **options)
    torch.autograd.grad(out, (q, k, v), dout)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

run(256)
before = peak()
run(8192)
print("grown by", peak() - before)
"""


@pytest.mark.parametrize(
    "dtype, packed, options",
    [
        ("float32", False, {}),
        ("bfloat16", False, {"causal": True}),
        ("float16", False, {"window_size": (512, 0)}),
        ("bfloat16", True, {"dropout_p": 0.1, "softcap": 5.0}),
        ("float32", True, {"deterministic": True, "alibi_slopes": torch.tensor([0.1])}),
    ],
)
def test_length_8192_stores_no_scores(dtype, packed, options):
    """One head, forward and backward, with tensors of 0.5 to 2 MiB each. The scores would be 128 MiB in 16 bit.

    A fork has a peak of its own, which begins with what the import of torch has left.
    """
    text = repr((dtype, packed, options)).replace("tensor(", "torch.tensor(")
    done = fresh_python.python(PEAK, text, cwd=Path(__file__).parent, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.split()[-1])
    assert grown < 64, f"{grown} MiB more at length 8192"


def leak_of(call, times):
    for _ in range(200):
        call()
    before = resident()
    for _ in range(times):
        call()
    return resident() - before


def test_no_leak_over_ten_thousand_calls():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2, 16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2)

    def train():
        out = flash_attn_func(q, k, v, 0.1, causal=True, alibi_slopes=slopes)
        torch.autograd.grad(out, (q, k, v), out)

    assert leak_of(train, 10_000) < 4 * MIB


def test_no_leak_of_packed_and_cached_calls():
    q, cache = torch.randn(2, 1, 4, 16), torch.zeros(2, 64, 2, 16)
    new, lens = torch.randn(2, 1, 2, 16), torch.tensor([3, 60], dtype=torch.int32)
    pages, table = torch.zeros(8, 16, 2, 16), torch.arange(8, dtype=torch.int32).view(2, 4)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)

    def decode():
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lens, return_softmax_lse=True)
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lens, block_table=table)
        flash_attn_varlen_func(q[:, 0], cache[:, 0], cache[:, 1], cu, cu, 1, 1)

    assert leak_of(decode, 5_000) < 4 * MIB


def test_no_leak_of_refused_calls():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 3, 16)
    cu, bad = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)

    def refused():
        for call in (
            lambda: flash_attn_func(q, k, k),
            lambda: flash_attn_varlen_func(q[0], q[0], q[0], cu, bad, 4, 5),
            lambda: flash_attn_2_cuda.fwd(q, q, q, None, None, 2.0, 1.0, False, -1, -1, 0.0, False, None),
        ):
            with pytest.raises(RuntimeError):
                call()

    assert leak_of(refused, 3_000) < 4 * MIB


CASES = [
    Case(300, 517, b=2, h=4, h_kv=2, d=64, causal=True),
    Case(33, 1500, b=1, h=1, d=64),
    Case((300, 0, 5, 129), (17, 30, 1200, 129), h=2, d=40, window=(100, 7), alibi="h"),
    Case(200, 200, b=1, h=3, d=96, dropout=0.2, softcap=9.0),
    Case(150, 2100, b=1, h=1, d=32, window=(700, 9)),
]


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_bits_do_not_depend_on_the_number_of_threads(case, dtype, isa):
    from dataclasses import replace

    case = replace(case, dtype=dtype)
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 7) if isa == "reference" else (1, 2, 7):
            torch.set_num_threads(n)
            got = ours(case, True, deterministic=True)
            results.append([x for name in ("out", "lse", "dq", "dk", "dv") for x in getattr(got, name)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, results[0]))


@pytest.mark.parametrize("num_splits", (0, 1))
def test_decode_bits_do_not_depend_on_the_number_of_threads(num_splits, isa):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 2100, 2, 64), torch.randn(2, 2100, 2, 64)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            results.append(flash_attn_with_kvcache(q, k, v, num_splits=num_splits, return_softmax_lse=True))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_repeats_give_the_same_bits(isa):
    case = Case(129, 200, h=4, h_kv=2, d=64, causal=True)
    want = ours(case, True, deterministic=True).whole
    for _ in range(10):
        assert all(torch.equal(x, y) for x, y in zip(ours(case, True, deterministic=True).whole, want))


def test_python_threads_do_not_meet():
    """Eight Python threads at once, each with its own problem, again and again."""

    def work(seed):
        gen = torch.Generator().manual_seed(seed)
        n = 20 + 37 * seed
        q, k, v = (torch.randn(1, n, 2, 48, generator=gen, requires_grad=True) for _ in range(3))
        out = flash_attn_func(q, k, v, causal=seed % 2 == 0, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    want = [work(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for got, ref in zip(pool.map(work, range(8)), want):
                assert all(torch.equal(x, y) for x, y in zip(got, ref))


def test_python_threads_get_their_own_errors():
    """A message belongs to the refused call, also when other calls fail at the same time."""

    def work(h):
        with pytest.raises(RuntimeError) as caught:
            flash_attn_func(torch.zeros(1, 4, h, 8), *(torch.zeros(1, 4, h + 1, 8),) * 2)
        assert f"{h + 1}" in str(caught.value) and f"{h}" in str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [11, 23, 37, 41, 53, 67, 71, 83] * 20))


def test_inputs_are_not_written(isa):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 33, 2, 24) for _ in range(4))
    before = [x.clone() for x in (q, k, v, dout)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(flash_attn_func(*leaves, 0.2, causal=True), leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, dout), before))


def test_denormals_of_the_caller_survive(isa):
    """Kernels flush denormal numbers to zero in their workers, and restore the mode of the processor."""
    ours(Case(33, 49), True)
    tiny = torch.full((64,), 1e-39)
    assert (tiny * 1.0 != 0).all() and (tiny.double().float() * 2 != 0).all()


def test_instruction_sets():
    assert ISAS[0] == "reference" and len(set(ISAS)) == len(ISAS)
    x86, arm = ("avx2", "avx512", "avx512bf16", "amx"), ("neon", "neonbf16")
    assert any(set(ISAS) <= {"reference", "scalar", *names} for names in (x86, arm))
