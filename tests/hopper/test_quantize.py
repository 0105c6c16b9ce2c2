"""quantize of flash_attn_3: the same bits as a computation with torch, on the CPU and on a GPU."""

import flash_attn_3
import pytest
import torch
from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INF, NAN = float("inf"), float("nan")

on_devices = pytest.mark.parametrize("device", DEVICES)
on_gpus = pytest.mark.parametrize("device", DEVICES[1:])


# ---- the formula in torch ----------------------------------------------------------------------------------------


def split_mix(num, seed=0):
    """The first outputs of SplitMix64."""
    mask, outputs = 2**64 - 1, []
    for _ in range(num):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        outputs.append(z ^ z >> 31)
    return outputs


def rotate(x):
    """The rows of x, rotated in fp32 as csrc/quantization.h says."""
    x, d, at = x.float().clone(), x.shape[-1], 0
    words = split_mix(4)
    x *= torch.tensor([-1.0 if words[c // 64] >> c % 64 & 1 else 1.0 for c in range(d)])
    for n in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        if d & n:
            block = x[..., at : at + n]
            step = 1
            while step < n:
                pairs = block.unflatten(-1, (-1, 2, step))
                a, b = pairs[..., 0, :], pairs[..., 1, :]
                block = torch.stack([a + b, a - b], -2).flatten(-3)
                step *= 2
            norm = torch.tensor(n, dtype=torch.float32).double().rsqrt().float()
            x[..., at : at + n] = block * norm + 0  # -0 becomes 0
            at += n
    return x


def expected_heads(x, h_kv, hadamard):
    """The result and the maxima [h_kv] of one sequence [len, h, d]."""
    y = rotate(x) if hadamard else x.float()
    if x.numel() == 0:
        return y, torch.zeros(h_kv)
    most = y.abs().nan_to_num(nan=0, posinf=INF).unflatten(1, (h_kv, -1)).amax((0, 2, 3))
    infinite = x.isinf().unflatten(1, (h_kv, -1)).any(0).any(1).any(1)
    return y, torch.where(infinite, INF, most)


def expected(x, h_kv, cu_seqlens=None, per="head", hadamard=False):
    """The result, and its descales [b, h_kv]."""
    x = x.cpu()
    sequences = list(x)
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        sequences = [x[begin:end] for begin, end in zip(ends, ends[1:])]
    results = [expected_heads(s, h_kv, hadamard) for s in sequences]
    most = torch.stack([m for _, m in results]) if results else torch.zeros(0, h_kv)
    if per == "tensor" and most.numel():
        most = most.amax().expand_as(most)
    descale = torch.where(most == 0, 1, (most / 448).clamp(min=2.0**-126))
    out = torch.zeros(x.shape)
    for i, (y, _) in enumerate(results):
        factor = (1 / descale[i]).repeat_interleave(x.shape[-2] // h_kv)[:, None]
        place = out[i] if cu_seqlens is None else out[ends[i] : ends[i + 1]]
        place.copy_((y * factor).clamp(-448, 448))
    return out.to(torch.float8_e4m3fn), descale


def assert_same(result, descale, truth, true_descale):
    result, descale = result.cpu(), descale.cpu()
    assert result.dtype == torch.float8_e4m3fn and result.is_contiguous() and result.shape == truth.shape
    assert descale.dtype == torch.float32 and descale.shape == true_descale.shape
    assert torch.equal(descale, true_descale)
    is_nan = truth.float().isnan()
    assert torch.equal(result.float().isnan(), is_nan)
    assert torch.equal(result.view(torch.uint8)[~is_nan], truth.view(torch.uint8)[~is_nan])


def check(q, k, v, cu_seqlens=None, **options):
    results = quantize(q, k, v, cu_seqlens, **options)
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    for i, (x, sums) in enumerate(zip((q, k, v), (pair[0], pair[1], pair[1]))):
        hadamard = options.get("hadamard", False) and i < 2
        truth = expected(x, k.shape[-2], sums, options.get("per", "head"), hadamard)
        assert_same(results[i], results[3 + i], *truth)
    return results


def make(b, len_q, len_k, h, h_kv, d, dtype=torch.bfloat16, device="cpu", d_v=None):
    sizes = (b, len_q, h, d), (b, len_k, h_kv, d), (b, len_k, h_kv, d_v or d)
    return [(torch.randn(size) * 3).to(dtype).to(device) for size in sizes]


def sums_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


# ---- the same bits -------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("per", ["head", "tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 192, 256])
def test_dense(d, dtype, per, hadamard, device):
    check(*make(2, 70, 133, 6, 2, d, dtype, device), per=per, hadamard=hadamard)


@on_devices
@pytest.mark.parametrize("d", [1, 5, 36, 100, 255])
def test_any_width(d, device):
    for dtype in DTYPES:
        check(*make(1, 9, 5, 4, 4, d, dtype, device))


@on_devices
@pytest.mark.parametrize("d, d_v", [(64, 512), (192, 128), (128, 256), (8, 3)])
def test_values_of_another_width(d, d_v, device):
    check(*make(2, 31, 40, 4, 2, d, device=device, d_v=d_v), hadamard=True)


@on_devices
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_packed(per, hadamard, device):
    lengths_q, lengths_k = [5, 0, 300, 1, 64, 0], [0, 7, 129, 64, 1, 500]
    q, _, _ = (x[0] for x in make(1, sum(lengths_q) + 9, 1, 6, 3, 128, device=device))
    _, k, v = (x[0] for x in make(1, 1, sum(lengths_k) + 4, 3, 3, 128, device=device))
    q[-9:], k[-4:], v[-4:] = NAN, INF, 1e30  # rows that belong to no sequence
    results = check(q, k, v, (sums_of(lengths_q, device), sums_of(lengths_k, device)), per=per, hadamard=hadamard)
    assert all((x[-4:].float() == 0).all() for x in results[:3])
    check(k, k, v[:, :, :40], sums_of(lengths_k, device), per=per, hadamard=hadamard)


@on_devices
def test_many_short_sequences(device):
    lengths = (torch.arange(700) * 37 % 11).tolist()
    q, k, v = (x[0] for x in make(1, sum(lengths), sum(lengths), 2, 1, 64, device=device))
    check(q, k, v, sums_of(lengths, device), hadamard=True)


@on_devices
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (1, 0, 0)], ids=str)
def test_empty(sizes, device):
    for per in ("head", "tensor"):
        check(*make(*sizes, 4, 2, 64, device=device), per=per)


@on_devices
def test_packed_without_sequences(device):
    q, k, v = (x[0] for x in make(1, 5, 5, 2, 2, 64, device=device))
    results = check(q, k, v, sums_of([], device))
    assert (results[0].float() == 0).all() and results[3].shape == (0, 2)


@on_devices
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_strides(hadamard, device):
    q, k, v = make(2, 70, 70, 4, 4, 128, device=device)
    qkv = torch.stack([q, k, v], 2)
    check(*qkv.unbind(2), hadamard=hadamard)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(*heads_first, hadamard=hadamard)
    check(q[:, ::2], k[:, :, 1:2], v[:, :, 1:2], hadamard=hadamard)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape).copy_(q)  # 2 bytes off
    check(shifted, k, v, hadamard=hadamard)
    columns_apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    check(columns_apart, k.expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), hadamard=hadamard)


def test_threads():
    tensors = make(2, 300, 200, 4, 2, 96)
    before, results = torch.get_num_threads(), []
    for num in (1, 2):
        torch.set_num_threads(num)
        results.append(quantize(*tensors, hadamard=True))
    torch.set_num_threads(before)
    for one, two in zip(*results):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


# ---- special values ------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_zeros(hadamard, device):
    q, k, v = make(2, 9, 9, 4, 2, 64, device=device)
    q[0, :, :2], k[1], v[:] = 0, 0, 0
    results = check(q, k, v, hadamard=hadamard)
    assert results[3][0, 0] == 1 and (results[4][1] == 1).all() and (results[5] == 1).all()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_nan_and_infinity(hadamard, dtype, device):
    q, k, v = make(2, 9, 9, 4, 2, 192, dtype, device)
    q[0, 3, 1, 5], k[0, 2, 0, 7], v[1, 8, 1, 2], v[1, 7, 0, 0] = NAN, INF, -INF, NAN
    q[1, 4, 2, 130:134] = torch.tensor([INF, INF, INF, -INF])  # every rotated column is NaN
    results = check(q, k, v, hadamard=hadamard)
    q_descale, k_descale, v_descale = (x.cpu() for x in results[3:])
    assert k_descale[0, 0] == INF and v_descale[1, 1] == INF and q_descale[1, 1] == INF
    assert q_descale[0].isfinite().all() and v_descale[1, 0].isfinite()
    assert results[0][0, 3, 1, 5].float().isnan() and results[1][0, 2, 0, 7].float().isnan()
    assert results[2][1, 8, 1, 2].float().isnan()


@on_devices
def test_extreme_magnitudes(device):
    for scale in (2.0**-126, 1e-37, 1e30, 3e38):
        q, k, v = (x.clamp(-1, 1).float() * scale for x in make(1, 20, 20, 2, 2, 64, device=device))
        x = torch.where(q.abs() < 2.0**-126, 0, q)
        check(x, x, x)


@on_devices
def test_every_rounding(device):
    """Every bf16 within the range of e4m3, with descale 1."""
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[bits.float() <= 448].float().to(device)
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 64, device=device)]).view(1, -1, 1, 64)
    x = torch.where(x.abs() < 2.0**-126, 0, x)
    results = check(x, x, x)
    assert results[3].item() == 1


# ---- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [16, 48, 64, 80, 96, 128, 192, 256])
def test_rotation_is_orthogonal(d):
    matrix = rotate(torch.eye(d)).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-6)
    assert (matrix == 0).any() == (d & (d - 1) != 0) and (matrix.sum(1) != d**0.5).any()


def relative_error(out, truth):
    return ((out.double() - truth.double()).norm() / truth.double().norm()).item()


@on_devices
def test_rotation_helps_against_outliers(device):
    """A huge element in a head makes small elements of e4m3 subnormal. Rotated, the head keeps more bits."""
    q, k, v = (x / 3 for x in make(1, 256, 256, 4, 2, 128, torch.float32, device))
    q[0, 0, :, 0], k[0, 0, :, 0] = 1e4, 1e-4
    truth = flash_attn_func(q, k, v, softmax_scale=0.01)
    errors = []
    for hadamard in (False, True):
        q8, k8, v8, *descales = quantize(q, k, v, hadamard=hadamard)
        out = flash_attn_func(q8, k8, v8, 0.01, False, None, *descales)
        assert out.dtype == torch.bfloat16
        errors.append(relative_error(out, truth))
    assert errors[1] < errors[0] and errors[1] < 0.1


@on_devices
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_attention_takes_the_results(per, device):
    lengths = [40, 0, 90]
    q, k, v = (x[0] / 3 for x in make(1, 130, 130, 4, 2, 64, torch.float32, device))
    sums = sums_of(lengths, device)
    q8, k8, v8, q_descale, k_descale, v_descale = quantize(q, k, v, sums, per=per, hadamard=True)
    options = {"causal": True, "max_seqlen_q": 90, "max_seqlen_k": 90, "cu_seqlens_q": sums, "cu_seqlens_k": sums}
    out = flash_attn_varlen_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **options)
    assert relative_error(out, flash_attn_varlen_func(q, k, v, **options)) < 0.06


# ---- errors, tracers -----------------------------------------------------------------------------------------------

Q, K = (1, 4, 4, 16), (1, 4, 2, 16)


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        ((Q, K, (1, 5, 2, 16)), {}, r"v must have shape \(batch_size, seqlen_k, num_heads_k, head_size_v\)"),
        ((Q, (2, 4, 2, 16), K), {}, "k must have shape"),
        ((Q, (1, 4, 3, 16), K), {}, "Number of heads in key/value must divide number of heads in query"),
        ((Q, (1, 4, 2, 8), K), {}, "q must have the head_size of k, 8"),
        ((Q[1:], K, K), {}, "q must have 4 dimensions"),
        (((1, 4, 4, 264), K, K), {}, "q must have a head_size of 1 to 256"),
        ((Q, K, (1, 4, 2, 520)), {}, "v must have a head_size of 1 to 512"),
        (((1, 4, 4, 20), (1, 4, 2, 20), K), {"hadamard": True}, "hadamard needs a head_size that is a multiple of 8"),
        ((Q[1:], K[1:], K[1:]), {"cu_seqlens": [1, 4]}, "^cu_seqlens must begin with 0"),
        ((Q[1:], K[1:], K[1:]), {"cu_seqlens": [0, 5]}, "^cu_seqlens must not decrease, and must not exceed the 4"),
        ((Q[1:], K[1:], K[1:]), {"cu_seqlens": []}, "^cu_seqlens must have shape"),
        ((Q, K, K), {"cu_seqlens": [0, 4]}, "q must have 3 dimensions"),
    ],
)
def test_errors(shapes, options, message):
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=message):
        quantize(*(torch.randn(shape) for shape in shapes), **options)


def test_errors_of_dtypes():
    q, k, v = make(1, 4, 4, 4, 2, 16)
    for tensors, message in [
        ((q.double(), k, v), "quantize takes fp16, bf16 and fp32; q is fp64"),
        ((q, k.half(), v), "k must have the dtype of q, bf16; it is fp16"),
        ((q, k, v.to("meta")), "v"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            quantize(*tensors)
    with pytest.raises(RuntimeError, match="^cu_seqlens must have dtype int32; it is int64"):
        quantize(q[0], k[0], v[0], torch.tensor([0, 4]))
    with pytest.raises(RuntimeError, match="cu_seqlens_k must have shape"):
        quantize(q[0], k[0], v[0], (sums_of([4], "cpu"), sums_of([2, 2], "cpu")))
    with pytest.raises(ValueError, match='per must be "head" or "tensor"; it is \'row\''):
        quantize(q, k, v, per="row")
    with pytest.raises(TypeError, match="k must be a tensor"):
        quantize(q, None, v)


def test_gradients_are_refused():
    q, k, v = make(1, 4, 4, 4, 2, 16)
    k.requires_grad_()
    with pytest.raises(RuntimeError, match="quantize has no gradient, and k requires grad"):
        quantize(q, k, v)
    with torch.no_grad():
        check(q, k, v)


@on_gpus
def test_wrong_sums_on_a_gpu_are_seen(device):
    q, k, v = (x[0] for x in make(1, 40, 40, 4, 2, 64, device=device))
    for sums in ([0, 30, 20, 40], [5, 40], [0, 50], [0, -7, 40]):
        results = quantize(q, k, v, torch.tensor(sums, dtype=torch.int32, device=device))
        assert all((x.float() == 0).all() for x in results[:3]) and all(x.isnan().all() for x in results[3:])


@on_devices
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_opcheck(per, device):
    q, k, v = make(2, 9, 5, 4, 2, 48, device=device)
    arguments = q, k, v, None, None, per == "tensor", True
    torch.library.opcheck(torch.ops.flash_attn_3.quantize, arguments)
    sums = sums_of([4, 1], device)
    torch.library.opcheck(torch.ops.flash_attn_3.quantize, (q[0], k[0], v[0], sums, sums, per == "tensor", False))


@on_devices
def test_compile(device):
    q, k, v = make(2, 9, 5, 4, 2, 48, device=device)
    compiled = torch.compile(flash_attn_3.quantize, fullgraph=True, backend="aot_eager")
    for one, two in zip(compiled(q, k, v, per="tensor", hadamard=True), quantize(q, k, v, None, "tensor", True)):
        assert torch.equal(one.float(), two.float()) and one.stride() == two.stride()


@on_gpus
def test_graph_and_repeats(device):
    tensors = make(2, 3000, 3000, 8, 2, 128, device=device)
    first = check(*tensors, hadamard=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = quantize(*tensors, hadamard=True)
    for _ in range(50):
        graph.replay()
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, results))
