"""What the tests of GPU kernels share: when they run, tensors on the GPU, extreme values, and repeats in NaN."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import flash_attn_2_cuda
import pytest
import torch
from compare import DTYPES, check, check_lse, largest, size_of_values
from harness import check_gradients, expected, join, problem, rows_of, slices, truth
from oracle import attention

from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

CUDA = Path(__file__).resolve().parents[1] / "csrc" / "cuda"
HALF = ("bf16", "fp16")
LOW = 64.0  # q and k of -LOW and LOW give scores of -LOW^2 times the scale, below the range of exp


def no_hopper():
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the CUDA kernels need compute capability 9.0"
    return ""


def no_gpu():
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the CUDA kernels need compute capability 8.0"
    return ""


def copy_texts(folder, file, old, new):
    """Copies the kernels' texts to a folder, and changes the copy of a file."""
    shutil.copytree(CUDA, folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def module_in(folder):
    """Lets a process that runs in the folder find the module there, so that it reads the folder's texts."""
    (folder / Path(flash_attn_2_cuda.__file__).name).symlink_to(flash_attn_2_cuda.__file__)


def skip_without_memory(gib):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free:.0f} are: run it alone, without other workers")


def on_gpu(x):
    """x with its strides, and with the NaN around x."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


def with_extremes(len_q, len_kv, d, dtype):
    """q, k, v [len, 10, d], where each head has other extreme values. Scores of -inf lie in whole tiles at either end,
    in every second tile, at random places, everywhere, or everywhere but at one key. Other heads have scores of +inf,
    NaN, huge scores, huge values, or infinite rows of q."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 10, d, generator=gen) for n in (len_q, len_kv, len_kv))
    q[..., 0], k[..., 0] = 1, 0
    q[:, :6, 1], k[:, :6, 1] = LOW, -LOW
    j = torch.arange(len_kv)
    minus_inf = torch.zeros(len_kv, 10, dtype=torch.bool)
    minus_inf[:, 0] = j >= len_kv - 2 * len_kv // 3
    minus_inf[:, 1] = j < len_kv // 2
    minus_inf[:, 2] = j // 64 % 2 == 1
    minus_inf[:, 3] = torch.rand(len_kv, generator=gen) < 0.7
    minus_inf[:, 4] = True
    minus_inf[:, 5] = j != len_kv // 3
    k[..., 0].masked_fill_(minus_inf, -math.inf)
    k[len_kv // 2, 6, 0] = math.inf
    k[len_kv // 4, 6, 2] = math.nan
    k[:, 7] *= 1e15 if dtype == "bf16" else 1e3
    v[:, 8] = v[:, 8].sign() * 0.98 * torch.finfo(DTYPES[dtype]).max
    v[:, 8, ::2] = v[:, 8, ::2].abs()
    k[:, 9, 0] = -1
    q[::3, 9, 0] = math.inf
    return [x.to(DTYPES[dtype]) for x in (q, k, v)]


def check_extremes(name, out, lse, v, ref, ref_lse, plain, plain_lse):
    """Checks one sequence. NaN must stand in the same places in out and lse. plain: the same in float32."""
    out, lse = out.cpu(), lse.cpu()
    bad_rows = ref.isnan().any(dim=-1, keepdim=True).expand_as(out)
    bad = bad_rows[..., 0].transpose(0, 1)  # torch.logsumexp is +inf if a score is +inf
    for head in range(out.shape[1]):
        wrong = (lse[head].isnan() != bad[head]).nonzero().flatten().tolist()
        assert not wrong, f"{name}, head {head}: {len(wrong)} rows of lse should (not) be NaN: {wrong[:20]}"
        wrong = (out[:, head].isnan() != bad_rows[:, head]).any(dim=-1).nonzero().flatten().tolist()
        assert not wrong, f"{name}, head {head}: {len(wrong)} rows of out should (not) be NaN: {wrong[:20]}"
        parts = [x[:, head].masked_fill(bad_rows[:, head], 0) for x in (out, ref, plain.to(out.dtype))]
        check(f"{name}, head {head}: out", *parts, scale=max(largest(parts[1]), size_of_values(v[:, head])))
        check_lse(*(x[head].masked_fill(bad[head], 0) for x in (lse, ref_lse, plain_lse)), out.dtype)


def found_plainly(q, k, v, **options):
    ref, plain = (attention(*(x.to(dtype) for x in (q, k, v)), **options) for dtype in (torch.float64, torch.float32))
    return *ref, *plain


def poisoned_repeats(call, times):
    """Calls again and again, with NaN in the memory of the results. All elements must be written, with the same
    bits."""
    want = [x.clone() for x in call()]
    assert not any(x.isnan().any() for x in want)
    met, found = 0, call()
    for _ in range(times):
        places = {x.data_ptr() for x in found}
        for x in found:
            x.fill_(math.nan)
        del found, x
        found = call()
        met += places == {x.data_ptr() for x in found}
        assert all(torch.equal(x, y) for x, y in zip(found, want))
    assert met > times // 2, "the allocator gave other memory than what was poisoned"


def run(case, backward, deterministic=False):
    """out, lse and gradients, sequence by sequence; .whole holds the tensors. Also dropout's (seed, offset)."""
    p = problem(case)
    q, k, v, dout = (on_gpu(x) for x in (p.q, p.k, p.v, p.dout))
    slopes = None if p.slopes is None else p.slopes.cuda()
    scale = case.d**-0.5 if case.scale is None else case.scale
    options = (case.causal, case.window[0], 0 if case.causal else case.window[1], case.softcap, slopes)
    if case.packed:
        cu = (p.cu_q.cuda(), p.cu_k.cuda(), p.max_q, p.max_k)
        out, lse, _, rng = _flash_attn_varlen_forward(q, k, v, *cu, case.dropout, scale, *options)
    else:
        out, lse, _, rng = _flash_attn_forward(q, k, v, case.dropout, scale, *options, False)
    got = SimpleNamespace(whole=[out, lse])
    got.out = rows_of(case, out.cpu(), 0)
    packed_lse = [x.transpose(0, 1) for x in slices(case, lse.cpu().transpose(0, 1), case.len_q)] if case.packed else []
    got.lse = packed_lse if case.packed else list(lse.cpu())
    if backward:
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        saved, rest = (dout, q, k, v, out, lse, *grads), (case.dropout, scale, *options, deterministic)
        if case.packed:
            _flash_attn_varlen_backward(*saved, *cu, *rest, rng_state=rng)
        else:
            _flash_attn_backward(*saved, *rest, rng_state=rng)
        got.whole += grads
        for name, grad, which in zip(("dq", "dk", "dv"), grads, (0, 1, 1)):
            setattr(got, name, rows_of(case, grad.cpu(), which))
    return got, [int(x) for x in rng.tolist()]


def verify(case, backward=False, deterministic=False, **tolerance):
    got, rng = run(case, backward, deterministic)
    dtype = DTYPES[case.dtype]
    if case.dropout:
        ref, plain, plain_fp32 = (
            truth(case, problem(case), x, backward, *rng) for x in (torch.float64, dtype, torch.float32)
        )
    else:
        ref, plain, plain_fp32 = expected(case, backward)
    check_lse(*(join(x.lse) for x in (got, ref, plain_fp32)), dtype)
    scale = max(largest(*ref.out), size_of_values(*rows_of(case, problem(case).v, 1)))
    check("out", *(join(x.out) for x in (got, ref, plain)), scale=scale)
    if backward:
        check_gradients(case, got, ref, plain, **tolerance)
