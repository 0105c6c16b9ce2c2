"""The work of the host around the kernels on a GPU: seeds, CUDA graphs, FLASH_ATTN_CHECK, rows of no sequence."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial

import flash_attn_2_cuda
import harness
import pytest
import torch
from harness_cuda import no_hopper
from harness_vmap import WRONG

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")


randn = partial(harness.randn, device="cuda", dtype=torch.bfloat16)


def run(program, **environment):
    """Runs the program in a process of its own. Returns the text on stderr."""
    program = "import torch\nfrom flash_attn import *\nfrom flash_attn import flash_attn_interface as interface\n" + (
        textwrap.dedent(program)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


# ---- torch.vmap ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_of_an_entry_reach_no_other_entry(name, at):
    """The entry itself is what a call computes with these numbers. Calls do not write packed rows of no sequence, and
    max_seqlen may bound the rows of a call."""
    step, tensors = WRONG[name](at)
    tensors = [x.cuda().bfloat16() if x.is_floating_point() else x.cuda() for x in tensors]
    mapped, single = ([x.clone() for x in tensors] for _ in range(2))
    got = torch.vmap(step)(*mapped)
    want = [step(*[x[i] for x in single]) for i in range(2)]
    for i in range(2):
        if i != at or not (name.startswith("q ") or "[0, 4, 5]" in name):
            torch.testing.assert_close(got[i], want[i], rtol=1e-2, atol=1e-2)
    assert torch.equal(mapped[1], single[1])
    tensors[1][1 - at] = torch.nan
    assert torch.equal(torch.vmap(step)(*tensors)[at], got[at])


def test_wrong_numbers_of_an_entry_are_found_if_asked():
    run(
        """
        q, table = torch.ones(2, 1, 1, 1, 64).cuda(), torch.tensor([[[0]], [[-1]]], dtype=torch.int32).cuda()
        pages = torch.ones(2, 3, 256, 1, 64).cuda()
        try:
            torch.vmap(lambda *x: flash_attn_with_kvcache(x[0], x[1], x[1], block_table=x[2]))(q, pages, table)
        except RuntimeError as error:
            assert str(error) == "block_table must name pages below 3; entry (0, 0) is -1", error
        else:
            raise AssertionError
        """,
        FLASH_ATTN_CHECK="1",
    )


# ---- dropout's seed ------------------------------------------------------------------------------------------------


def forward(q, dropout_p):
    return interface._flash_attn_forward(q, q, q, dropout_p, 0.125, False, -1, -1, 0.0, None, False)


def test_the_seed_is_the_generators_and_the_offset_advances():
    q, generator = randn(2, 70, 3, 64), torch.cuda.default_generators[torch.cuda.current_device()]
    torch.manual_seed(11)
    generator.set_offset(8)
    first, second = forward(q, 0.3), forward(q, 0.3)
    assert first[3].tolist() == [11, 8] and second[3].tolist() == [11, 8 + 32 * 2 * 3]
    assert not torch.equal(first[0], second[0])
    assert forward(q, 0.0)[3].tolist() == [0, 0] and generator.get_offset() == 8 + 2 * 32 * 2 * 3
    torch.manual_seed(-5)  # the seed counts as 64 bits without sign
    assert forward(q, 0.3)[3].tolist() == [-5, 0]
    torch.manual_seed(11)
    generator.set_offset(8)
    assert torch.equal(forward(q, 0.3)[0], first[0])
    with torch.random.fork_rng():
        inside = forward(q, 0.3)
    assert torch.equal(forward(q, 0.3)[3], inside[3])


def test_threads_draw_apart():
    """The threads also draw apart while Python collects garbage, and so changes threads, at every chance."""
    q, drawn, thresholds = randn(1, 16, 1, 64), [], gc.get_threshold()
    forward(q, 0.3)

    def work():
        drawn.extend([forward(q, 0.3)[3] for _ in range(300)])

    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
    assert len(set(torch.stack(drawn)[:, 1].tolist())) == 1200


def test_every_replay_of_a_graph_draws_anew():
    q = randn(2, 70, 3, 64)
    forward(q, 0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, _, rng_state = forward(q, 0.3)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            seen.append((tuple(rng_state.tolist()), out.clone()))
    states, outs = zip(*seen)
    assert states[:2] == states[2:4] and len(set(states)) == 4
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])


# ---- CUDA graphs ---------------------------------------------------------------------------------------------------


def test_the_first_call_of_all_may_be_recorded(tmp_path):
    """The kernel is compiled and loaded while the stream is recording."""
    program = """
        q = torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attn_func(q, q, q)
        q.normal_()
        graph.replay()
        assert torch.equal(out, flash_attn_func(q, q, q))
    """
    run(program, FLASH_ATTN_CACHE_DIR=str(tmp_path))
    run(program, FLASH_ATTN_CACHE_DIR=str(tmp_path))  # the kernel now comes from the disk cache


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled_into_cuda_graphs(dropout_p):
    torch._dynamo.reset()
    q = randn(1, 100, 2, 64)
    compiled = torch.compile(lambda q: flash_attn_func(q + 1, q, q, dropout_p), backend="cudagraphs", fullgraph=True)
    outs = [compiled(q).clone() for _ in range(4)]
    if dropout_p == 0:
        assert all(torch.equal(out, flash_attn_func(q + 1, q, q)) for out in outs)
    else:
        assert not torch.equal(outs[2], outs[3])


def test_graphs_give_their_counters_back():
    """More graphs than slots for living graphs, of two kernels with counters and on two streams."""
    q, cache, x = randn(2, 1, 8, 128), randn(2, 4000, 2, 128), randn(2, 600, 64, 64)
    other = torch.cuda.Stream()

    def calls():
        outs = [flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3999), flash_attn_func(x, x, x, causal=True)]
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            outs.append(flash_attn_func(x, x, x, causal=True))
        torch.cuda.current_stream().wait_stream(other)
        return outs

    want, kept = calls(), []
    for i in range(1200):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = calls()
        if i % 300 == 0:
            kept.append((graph, outs))
    for graph, _ in kept:
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for _, outs in kept for x, y in zip(outs, want))


# ---- kernels that follow each other --------------------------------------------------------------------------------

LATE = r"""
extern "C" __global__ void copy_late(const int *x, int *to_x, const int *y, int *to_y, int num) {
    asm volatile("griddepcontrol.launch_dependents;");
    const long long start = clock64();
    while (clock64() - start < 400000) {}
    for (int i = threadIdx.x; i < num; i += blockDim.x) to_x[i] = x[i], to_y[i] = y[i];
}
"""


def followers():
    """Shape of an argument and of a result, and a call that reads the argument and writes the result."""
    cu, used = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 40, 300], [17, 200]))
    cache = randn(2, 200, 2, 128)
    mask = 0.125, True, -1, -1, 0.0, False, None

    def dense(q, out):
        out.copy_(flash_attn_func(q, q, q))  # the op would fill rng_state first, and the kernel would wait for the fill

    def packed(q, out):
        out.copy_(flash_attn_varlen_func(q, q, q, cu, cu, 260, 260))

    def decode(num_splits, q, out):
        flash_attn_2_cuda.fwd_kvcache(q, cache, cache, None, None, used, *[None] * 6, out, *mask[:5], True, num_splits)

    def backward(saved, dout, dq):
        grads = dq, torch.empty_like(dq), torch.empty_like(dq)
        interface._flash_attn_backward(dout, *saved, *grads, 0.0, 0.125, False, -1, -1, 0.0, None, True)

    for d in (64, 128, 256):
        yield (1, 300, 4, d), dense
    yield (300, 4, 64), packed
    for num_splits in (0, 1):
        yield (2, 1, 4, 128), partial(decode, num_splits)
    for d in (64, 192):
        x = randn(1, 300, 4, d)
        yield (1, 300, 4, d), partial(backward, (x, x, x, *forward(x, 0.0)[:2]))


@pytest.mark.skipif(
    not hasattr(torch.cuda, "_compile_kernel"), reason="needs a PyTorch with torch.cuda._compile_kernel"
)
@pytest.mark.parametrize("recorded", [False, True])
def test_kernels_wait_for_one_that_lets_them_begin_early(recorded):
    """The early kernel takes 0.2 ms. Only then it writes the argument of the next kernel and reads the memory of its
    result."""
    copy_late = torch.cuda._compile_kernel(LATE, "copy_late", compute_capability="90")
    for shape, call in followers():
        new = randn(*shape)
        x, out, copied, want = (torch.zeros_like(new) for _ in range(4))
        call(new, want)

        def follow(call=call, new=new, x=x, out=out, copied=copied):
            copy_late(args=[new, x, out, copied, x.numel() // 2], block=(256, 1, 1))
            call(x, out)

        if recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                follow()
        for _ in range(3):
            x.zero_(), out.fill_(7), copied.zero_()
            torch.cuda.synchronize()
            graph.replay() if recorded else follow()
            assert torch.equal(out, want) and torch.all(copied == 7), shape


def test_kernels_wait_for_fills_copies_and_other_streams():
    other = torch.cuda.Stream()
    for shape, call in followers():
        new = randn(*shape)
        x, out, want, none = (torch.zeros_like(new) for _ in range(4))
        call(new, want), call(x, none)
        for _ in range(3):
            torch.cuda._sleep(400000)
            x.copy_(new)
            call(x, out)
            assert torch.equal(out, want), shape
            torch.cuda._sleep(400000)
            x.zero_()
            call(x, out)
            assert torch.equal(out, none), shape
            with torch.cuda.stream(other):
                other.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(400000)
                x.copy_(new)
            torch.cuda.current_stream().wait_stream(other)
            call(x, out)
            assert torch.equal(out, want), shape


# ---- FLASH_ATTN_CHECK ----------------------------------------------------------------------------------------------

CHECKED = """
def refuse(words, call):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), (words, error)
    else:
        raise AssertionError(words)

def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")

x = torch.randn(20, 2, 64, device="cuda", dtype=torch.bfloat16)
good = ints(0, 8, 20)

def varlen(cu_q, cu_k, max_q=20, max_k=20, **options):
    return flash_attn_varlen_func(x, x, x, cu_q, cu_k, max_q, max_k, **options)

def used(seqused_k, leftpad_k=None):
    return interface._flash_attn_varlen_forward(
        x, x, x, good, good, 12, 12, 0.0, 0.125, False, leftpad_k=leftpad_k, seqused_k=seqused_k
    )

varlen(good, good)
refuse("cu_seqlens_q must start at 0", lambda: varlen(ints(1, 8, 20), good))
refuse("cu_seqlens_k must not decrease", lambda: varlen(good, ints(0, 9, 8)))
refuse("cu_seqlens_q must end at or before the 20 rows", lambda: varlen(ints(0, 8, 21), good))
refuse("max_seqlen_q is 11", lambda: varlen(good, good, max_q=11))
refuse("seqused_k must be at most the 8 keys", lambda: used(ints(9, 1)))
refuse("seqused_k must be at least 0", lambda: used(ints(-1, 1)))
refuse("leftpad_k must be within", lambda: used(ints(4, 4), ints(0, 5)))
pages = torch.randn(4, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
refuse("block_table must name pages below 4", lambda: flash_attn_varlen_func(
    x, pages, pages, good, good, 12, 12, block_table=ints(0, 1, 4, 2).view(2, 2)))
q, cache = torch.randn(2, 1, 2, 64, device="cuda").bfloat16(), torch.randn(2, 16, 2, 64, device="cuda").bfloat16()
refuse("cache_seqlens must be at most the 16 keys",
       lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints(3, 17)))
refuse("cache_batch_idx must be within the 2 rows",
       lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints(3, 4), cache_batch_idx=ints(0, 2)))
kept = cache.clone()
refuse("cache_seqlens leaves no room to append",
       lambda: flash_attn_with_kvcache(q, cache, cache, k=q, v=q, cache_seqlens=ints(3, 16)))
assert torch.equal(cache, kept)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = varlen(good, good)
graph.replay()
assert torch.equal(out, varlen(good, good))
"""


def test_contents_are_checked_on_demand():
    assert "FLASH_ATTN_CHECK=1 does not check calls that a CUDA graph records" in run(CHECKED, FLASH_ATTN_CHECK="1")


# ---- tensors of several devices ------------------------------------------------------------------------------------


def calls_with_every_tensor():
    """{id: (function, arguments)} with every tensor that a call may take, q first."""
    q, k, cache, new = randn(2, 5, 4, 64), randn(2, 40, 2, 64), randn(2, 40, 2, 64), randn(2, 3, 2, 64)
    cos, lse, slopes = randn(40, 16), torch.ones(2, 4, 5), torch.rand(4)
    cu_q, cu_k, two, table, rng = (
        torch.tensor(x, dtype=dtype)
        for x, dtype in (
            ([0, 5, 10], torch.int32),
            ([0, 40, 80], torch.int32),
            ([0, 1], torch.int32),
            ([[0], [1]], torch.int32),
            ([0, 0], torch.int64),
        )
    )
    rows, scale = (
        {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": k.flatten(0, 1)},
        {"dropout_p": 0.0, "softmax_scale": 1.0},
    )
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 40, "causal": False}
    packed = {**rows, **lengths, **scale, "leftpad_k": two, "seqused_k": two, "alibi_slopes": slopes}
    mask = {"causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "deterministic": False}
    backward = {"q": q, "k": k, "v": k, "dout": q, "out": q, "softmax_lse": lse, "dq": q, "dk": k, "dv": k}
    calls = {
        "dense": (flash_attn_func, {"q": q, "k": k, "v": k, "alibi_slopes": slopes}),
        "packed": (interface._flash_attn_varlen_forward, packed),
        "pages": (interface._flash_attn_varlen_forward, {**packed, "k": cache, "v": cache, "block_table": table}),
        "cache": (
            flash_attn_with_kvcache,
            {
                "q": q, "k_cache": cache, "v_cache": cache, "k": new, "v": new, "cache_seqlens": two, "rotary_cos": cos,
                "rotary_sin": cos, "cache_batch_idx": two, "cache_leftpad": two,
            },
        ),
        "backward": (
            interface._flash_attn_backward,
            {**backward, **scale, "dropout_p": 0.1, **mask, "alibi_slopes": slopes, "rng_state": rng},
        ),
    }  # fmt: skip
    moved = lambda x: x.cuda() if torch.is_tensor(x) else x  # noqa: E731
    return {id_: (function, {k: moved(x) for k, x in given.items()}) for id_, (function, given) in calls.items()}


@pytest.mark.parametrize("id_", ["dense", "packed", "pages", "cache", "backward"])
def test_a_tensor_on_the_cpu_is_refused(id_):
    """Any tensor on the CPU is refused, because its address means nothing to the GPU."""
    function, arguments = calls_with_every_tensor()[id_]
    tensors = [name for name, x in arguments.items() if torch.is_tensor(x)]
    for name in tensors[1:]:
        with pytest.raises(RuntimeError, match="must be on CUDA .cuda:0., where q is; it is on the CPU"):
            function(**{**arguments, name: arguments[name].cpu()})
            pytest.fail(f"{name} was taken")
    with pytest.raises(RuntimeError, match=f"{tensors[1]} must be on the CPU, where q is|k must be on the CPU"):
        function(**{**arguments, "q": arguments["q"].cpu()})


# ---- rows of no sequence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads_first", [False, True])
def test_zero_tensors(heads_first, dtype):
    x = randn(50, 3, 64).to(dtype)
    if heads_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    cu = torch.tensor([0, 7, 30], dtype=torch.int32, device="cuda")
    want = flash_attn_varlen_func(x, x, x, cu, cu, 23, 23)[:30]
    poison = [torch.full((50, 3, 64), float("nan"), device="cuda", dtype=dtype) for _ in range(4)]
    del poison
    out, lse, *_ = interface._flash_attn_varlen_forward(x, x, x, cu, cu, 23, 23, 0.0, 0.125, False, zero_tensors=True)
    assert out.stride() == x.stride() and torch.equal(out[:30], want)
    assert torch.all(out[30:] == 0) and torch.all(lse[:, 30:] == float("-inf"))


@pytest.mark.parametrize("heads_first", [False, True])
def test_zero_tensors_of_gradients(heads_first):
    x = randn(50, 3, 64)
    if heads_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    cu = torch.tensor([0, 7, 30], dtype=torch.int32, device="cuda")
    mask = (0.0, 0.125, False, -1, -1, 0.0, None)
    out, lse, *_ = interface._flash_attn_varlen_forward(x, x, x, cu, cu, 23, 23, *mask[:3], zero_tensors=True)
    for zero_tensors in (True, False):
        grads = [torch.full_like(x, 7) for _ in range(3)]
        interface._flash_attn_varlen_backward(
            x, x, x, x, out, lse, *grads, cu, cu, 23, 23, *mask, False, None, zero_tensors
        )
        assert all(torch.all(grad[30:] == (0 if zero_tensors else 7)) for grad in grads)
        assert all(torch.all(grad[:30] != 7) for grad in grads)


def test_rows_beyond_the_spare_lse():
    x = randn(70000, 1, 64)
    cu = torch.tensor([0, 300, 69000, 70000], dtype=torch.int32, device="cuda")
    args = (x, x, x, cu, cu, 70000, 70000)
    options = {"window_size": (70, 0)}
    assert torch.equal(
        flash_attn_varlen_func(*args, **options), flash_attn_varlen_func(*args, **options, return_attn_probs=True)[0]
    )


# ---- empty problems ------------------------------------------------------------------------------------------------

# b, len_q, len_kv, h, h_kv; lengths of q and of k of packed sequences.
NOTHING = [(0, 5, 7, 4, 2), (2, 0, 7, 4, 2), (2, 5, 0, 4, 2), (2, 0, 0, 4, 2), (2, 5, 7, 0, 2), (0, 0, 0, 0, 2)]
NOTHING_PACKED = [((0, 0, 0), (3, 0, 5)), ((3, 0, 5), (0, 0, 0)), ((0, 0), (0, 0)), ((0,), (200,)), ((), ())]
# For flash_attn_with_kvcache: b, len_q, capacity, new keys, h; block table [b, columns] on a pool of pages, or None.
NOTHING_CACHED = [
    *((b, len_q, capacity, len_new, h, None) for b, len_q, capacity, len_new, h in [
        (0, 1, 64, 1, 4), (2, 0, 64, 1, 4), (2, 1, 0, 0, 4), (2, 1, 64, 0, 4), (2, 1, 64, 1, 0), (2, 0, 0, 0, 4)]),
    (2, 1, 0, 0, 4, (0, 5)), (2, 1, 0, 0, 4, (0, 0)), (0, 1, 0, 0, 4, (3, 5)), (2, 3, 0, 0, 4, (0, 1)),
]  # fmt: skip


def same_on_gpu(call, *tensors):
    """Results and written tensors on the GPU, whose free memory is NaN, equal those on the CPU."""
    results = []
    for device in ("cpu", "cuda"):
        if device == "cuda":
            poison = [torch.full((64 << k,), float("nan"), device=device) for k in range(8) for _ in range(4)]
            del poison
        results.append(call(*(x.to(device) for x in tensors)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0.03, atol=0.03, equal_nan=True)


def with_gradients(attend):
    def call(q, k, v, *rest):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse, *_ = attend(*leaves, *rest)
        return out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    return call


KINDS = [(torch.bfloat16, 64, True), (torch.float16, 192, False), (torch.float32, 40, True)]
each_kind = pytest.mark.parametrize(("dtype", "d", "causal"), KINDS, ids=str)


@each_kind
@pytest.mark.parametrize("sizes", NOTHING, ids=str)
def test_nothing(sizes, dtype, d, causal):
    b, len_q, len_kv, h, h_kv = sizes
    q, k = torch.randn(b, len_q, h, d).to(dtype), torch.randn(b, len_kv, h_kv, d).to(dtype)
    same_on_gpu(with_gradients(partial(flash_attn_func, causal=causal, return_attn_probs=True)), q, k, k)


@each_kind
@pytest.mark.parametrize("lengths", NOTHING_PACKED, ids=str)
def test_nothing_packed(lengths, dtype, d, causal):
    cu_q, cu_k = (torch.tensor((0, *torch.tensor(x).cumsum(0)), dtype=torch.int32) for x in lengths)
    q, k = (torch.randn(sum(x), h, d).to(dtype) for x, h in zip(lengths, (4, 2)))
    attend = partial(flash_attn_varlen_func, causal=causal, return_attn_probs=True)
    for max_seqlens in {tuple(max(x, default=0) for x in lengths), (7, 300)}:
        call = with_gradients(lambda q, k, v, cu_q, cu_k, m=max_seqlens: attend(q, k, v, cu_q, cu_k, *m))
        same_on_gpu(call, q, k, k, cu_q, cu_k)


@each_kind
@pytest.mark.parametrize("sizes", NOTHING_CACHED, ids=str)
def test_nothing_cached(sizes, dtype, d, causal):
    b, len_q, capacity, len_new, h, paged = sizes
    q, new = torch.randn(b, len_q, h, d).to(dtype), torch.randn(b, len_new, 2, d).to(dtype)
    pages, columns = paged or (b, 0)
    cache = torch.randn(pages, 16 if paged else capacity, 2, d).to(dtype)
    seqlens, table = torch.zeros(b, dtype=torch.int32), torch.zeros(b, columns, dtype=torch.int32)

    def call(q, k, v, new, seqlens, table):
        k, v = k.clone(), v.clone()
        fresh = (new, new) if len_new else ()
        out, lse = flash_attn_with_kvcache(
            q, k, v, *fresh, cache_seqlens=seqlens, block_table=table if paged else None, causal=causal,
            return_softmax_lse=True,
        )  # fmt: skip
        return out, lse, k, v

    same_on_gpu(call, q, cache, cache, new, seqlens, table)


# ---- no memory left ------------------------------------------------------------------------------------------------

ALONE = pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="fills the GPU's memory: run it without other workers",
)

FULL = """
def fill():
    held = []
    for size in (1 << 30, 1 << 28, 12 << 20, 1 << 20):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return held

def refused(call):
    try:
        call()
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""

half = dict(device="cuda", dtype=torch.bfloat16)
q, cache = torch.randn(2, 1, 8, 128, **half), torch.randn(2, 512, 2, 128, **half)
x = [torch.randn(1, 70, 2, d, **half) for d in (64, 128, 256)]
leaves = [y.clone().requires_grad_() for y in x]
calls = [lambda y=y: flash_attn_func(y, y, y, causal=True) for y in x]
calls += [lambda y=y, q=q: torch.autograd.grad(flash_attn_func(q, y, y), q, y)[0] for y, q in zip(x, leaves)]
seqlens = torch.full((q.shape[0],), 300, dtype=torch.int32, device="cuda")
calls += [lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=seqlens, num_splits=1)]
"""

# No memory is left for the counters of the decode kernel, which take 2.4 MB. Some of the other kernels find memory. The
# driver fails when it loads a kernel, or at the first launch.
FIRST_CALLS = """
held = fill()
said = [refused(call) for call in calls]
assert "the kernel attn_decode_sm90_bf16_d128" in said[-1] and "CUDA_ERROR_OUT_OF_MEMORY" in said[-1], said
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # through torch's dispatcher
    assert "the kernel attn_decode_sm90_bf16_d128" in refused(calls[-1])
del held
torch.cuda.empty_cache()
first = [call() for call in calls]
torch.cuda.synchronize()
"""

UNUSED = """
held = fill()
del held
second = [call() for call in calls]
torch.cuda.synchronize()
"""

COMPARE = """
sdpa = torch.nn.functional.scaled_dot_product_attention
for y, out in zip(x, {outs}):
    y = y.float().transpose(1, 2)
    want = sdpa(y, y, y, is_causal=True).transpose(1, 2)
    assert (out.float() - want).abs().max() < 0.03
keys = cache[:, :300].float().repeat_interleave(4, 2).transpose(1, 2)
want = sdpa(q.float().transpose(1, 2), keys, keys)
assert ({outs}[-1].float() - want.transpose(1, 2)).abs().max() < 0.03
"""


@ALONE
def test_kernels_that_found_no_memory_are_loaded_later():
    run(FULL + FIRST_CALLS + COMPARE.format(outs="first"))


@ALONE
def test_memory_that_torch_holds_unused_goes_to_kernels():
    run(FULL + UNUSED + COMPARE.format(outs="second"))


@ALONE
def test_a_workspace_that_finds_no_memory():
    run(
        FULL
        + """
calls[-1]()
held = fill()
decode = lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=300)
said = refused(decode)
assert said.startswith("CUDA out of memory: attn_decode_sm90_bf16_d128") and "bytes of workspace" in said, said
del held
decode()
torch.cuda.synchronize()
"""
    )


# ---- the short road ------------------------------------------------------------------------------------------------


def test_watched_calls_give_the_same():
    q, rows = randn(2, 70, 4, 64), randn(90, 4, 64)
    cu = torch.tensor([0, 40, 90], dtype=torch.int32, device="cuda")
    cache, used = randn(2, 300, 2, 64), torch.tensor([17, 300], dtype=torch.int32, device="cuda")
    wants_grad = q.clone().requires_grad_()
    for call in (
        lambda: flash_attn_func(q, q, q, causal=True),
        lambda: flash_attn_varlen_func(rows, rows, rows, cu, cu, 50, 50),
        lambda: torch.autograd.grad(
            flash_attn_func(wants_grad, q, q, deterministic=True), wants_grad, torch.ones_like(q)
        )[0],
    ):
        want = call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(call(), want)
        assert any("_forward" in event.name and "flash_attn::_flash" in event.name for event in profile.events())
    want = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.equal(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used), want)


def test_one_length_for_all():
    q, cache = randn(3, 1, 4, 64), randn(3, 300, 2, 64)
    want = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=torch.full((3,), 123, dtype=torch.int32, device="cuda")
    )
    assert torch.equal(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=123), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=123)
    graph.replay()
    assert torch.equal(out, want)


# ---- threads and devices -------------------------------------------------------------------------------------------


def all_kinds(q, rows, cu, cache):
    """The results of a call of each kind."""
    leaf = q.detach().requires_grad_()
    out = flash_attn_func(leaf, q, q, causal=True, deterministic=True)
    return [
        out.detach(),
        torch.autograd.grad(out, leaf, torch.ones_like(out))[0],
        flash_attn_varlen_func(rows, rows, rows, cu, cu, 50, 50),
        flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=300),
        flash_attn_func(q.float(), q.float(), q.float()),  # served by the generic kernel
    ]


def inputs(device="cuda"):
    cu = torch.tensor([0, 40, 90], dtype=torch.int32)
    return [x.to(device) for x in (randn(2, 700, 4, 64), randn(90, 4, 64), cu, randn(2, 3000, 2, 64))]


def test_threads_on_streams_of_their_own():
    tensors = inputs()
    want, wrong = all_kinds(*tensors), []
    torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = all_kinds(*tensors)
                torch.cuda.current_stream().synchronize()
                wrong.extend(i for i, (x, y) in enumerate(zip(got, want)) if not torch.equal(x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def same_on_both(got, want):
    return all(x.device.index == 1 and torch.equal(x.cpu(), y.cpu()) for x, y in zip(got, want, strict=True))


@TWO_GPUS
def test_tensors_of_a_gpu_that_is_not_current():
    want = all_kinds(*inputs("cuda:0"))
    assert same_on_both(all_kinds(*inputs("cuda:1")), want)
    assert torch.cuda.current_device() == 0


@TWO_GPUS
def test_the_first_call_of_all_on_the_second_gpu():
    """Kernels are loaded and memory is taken on the second GPU, and nothing on the first GPU."""
    run("""
        q = torch.randn(1, 100, 2, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
        out = flash_attn_func(q, q, q, 0.2)
        out.sum().backward()
        assert out.device == q.grad.device == q.device
        cache = torch.randn(1, 300, 2, 64, device="cuda:1", dtype=torch.bfloat16)
        flash_attn_with_kvcache(q.detach()[:, :1], cache, cache, cache_seqlens=17)
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0 and torch.cuda.memory_reserved(0) == 0 < torch.cuda.memory_reserved(1)
    """)


@TWO_GPUS
def test_threads_on_both_gpus():
    tensors = [inputs("cuda:0"), inputs("cuda:1")]
    want, wrong = all_kinds(*tensors[0]), []
    torch.cuda.synchronize()

    def work(device):
        for _ in range(10):
            got = all_kinds(*tensors[device])
            wrong.extend(i for i, (x, y) in enumerate(zip(got, want)) if not torch.equal(x.cpu(), y.cpu()))

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@TWO_GPUS
def test_graphs_of_both_gpus_replayed_at_once():
    """There are more tiles than SMs, and each GPU counts its own tiles."""
    x = randn(2, 513, 64, 128)
    graphs, outs = [], []
    for device in range(2):
        q = x.to(device)
        with torch.cuda.device(device):
            flash_attn_func(q, q, q, causal=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                outs.append(flash_attn_func(q, q, q, causal=True))
        graphs.append(graph)
    for _ in range(5):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    want = flash_attn_func(x, x, x, causal=True)
    assert torch.equal(outs[0], want) and same_on_both(outs[1:], [want])


@TWO_GPUS
def test_tensors_of_two_gpus_are_refused():
    q, k = randn(1, 100, 2, 64), randn(1, 100, 2, 64).to("cuda:1")
    with pytest.raises(RuntimeError, match="k .*cuda:1"):
        flash_attn_func(q, k, k)
    cu = torch.tensor([0, 100], dtype=torch.int32, device="cuda:1")
    with pytest.raises(RuntimeError, match="cu_seqlens_q .*cuda:1"):
        flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 100, 100)


@TWO_GPUS
def test_seeds_and_contents_of_the_second_gpu():
    q = randn(1, 100, 2, 64).to("cuda:1")
    torch.cuda.manual_seed_all(3)
    first = forward(q, 0.3)
    assert first[3].tolist() == [3, 0] and torch.cuda.default_generators[0].get_offset() == 0
    run(
        """
        x = torch.randn(20, 2, 64, device="cuda:1", dtype=torch.bfloat16)
        cu = torch.tensor([0, 8, 21], dtype=torch.int32, device="cuda:1")
        try:
            flash_attn_varlen_func(x, x, x, cu, cu, 20, 20)
        except RuntimeError as error:
            assert "must end at or before the 20 rows" in str(error), error
        else:
            raise AssertionError
        """,
        FLASH_ATTN_CHECK="1",
    )
