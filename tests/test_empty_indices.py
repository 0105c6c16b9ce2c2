"""Index tensors without rows or columns, on both devices. A block table without columns is still a block table.

Caches lie inside larger memory, whose every byte is compared afterwards. On the CPU a sequence that needs a missing
page is an error. On a GPU the host reads no lengths, so such a sequence sees no key and writes nothing.
"""

import flash_attn_2_cuda
import pytest
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

H, D, ROWS = 2, 64, 5
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU of compute capability 8.0 or newer")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu), pytest.param("cuda any", marks=needs_gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    device, *kernels = request.param.split()
    if not kernels:
        yield device
        return
    flash_attn_2_cuda.set_cuda_kernels(*kernels)
    yield device
    flash_attn_2_cuda.set_cuda_kernels(None)


@pytest.fixture
def tensors(device):
    def make(*shape, dtype=torch.bfloat16):
        torch.manual_seed(0)
        return torch.randn(shape).to(device, dtype)

    return make


@pytest.fixture
def i32(device):
    return lambda *values, shape=(-1,): torch.tensor(values, dtype=torch.int32, device=device).view(shape)


class Guarded:
    """Caches [num, ROWS, H, D], k and v, in memory that must not change."""

    def __init__(self, make, num):
        self.memory = make(2 * num + 3, ROWS, H, D)
        self.k, self.v = self.memory[1 : 1 + num], self.memory[2 + num : 2 + 2 * num]
        self.before = self.memory.clone()

    def is_untouched(self):
        return torch.equal(self.memory, self.before)


def refused_or_empty(device, words, call):
    """Expects an error on the CPU, and on a GPU (out, lse) of rows that see no key."""
    if device == "cpu":
        with pytest.raises(RuntimeError) as raised:
            call()
        assert all(word in str(raised.value) for word in words), str(raised.value)
    else:
        assert_no_keys(*call())


def assert_no_keys(out, lse, *_):
    assert not out.any() and (lse == float("inf")).all()


@pytest.mark.parametrize("lengths", [(0, 0), (1, ROWS)])
@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize(
    "pages, table_rows, columns, words",
    [
        (2, 2, 0, ["block_table has 0 columns", "needs 1"]),  # a table without columns
        (0, 2, 3, ["block_table must name pages below 0"]),  # a pool without pages
        (0, 2, 0, ["block_table has 0 columns"]),
        (2, 0, 3, ["cache_batch_idx must be within the 0 rows of block_table"]),  # a table without rows
        (2, 0, 0, ["cache_batch_idx must be within the 0 rows of block_table"]),
    ],
)
def test_pages_that_are_not_there(pages, table_rows, columns, words, len_q, lengths, device, tensors, i32):
    cache, table = Guarded(tensors, pages), i32(*[0] * (table_rows * columns), shape=(table_rows, columns))
    indices = {"cache_batch_idx": i32(0, 1)} if table_rows == 0 else {}
    options = {"cache_seqlens": i32(*lengths), "block_table": table, "return_softmax_lse": True, **indices}
    q = tensors(2, len_q, H, D)

    def call():
        return flash_attn_with_kvcache(q, cache.k, cache.v, **options)

    if any(lengths) or indices:
        refused_or_empty(device, words, call)
    else:
        assert_no_keys(*call())
    assert cache.is_untouched()


@pytest.mark.parametrize("pages, columns", [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("rotary_dim", [None, 0, 32])
def test_appends_to_pages_that_are_not_there(rotary_dim, pages, columns, device, tensors, i32):
    cache, table = Guarded(tensors, pages), i32(*[0] * (2 * columns), shape=(2, columns))
    capacity, q, new = columns * ROWS, tensors(2, 1, H, D), tensors(2, 1, H, D)
    turn = {} if rotary_dim is None else dict.fromkeys(("rotary_cos", "rotary_sin"), tensors(capacity, rotary_dim // 2))

    def call(new):
        return flash_attn_with_kvcache(
            q, cache.k, cache.v, new, new, cache_seqlens=i32(0, 0), block_table=table, return_softmax_lse=True, **turn
        )

    assert_no_keys(*call(new[:, :0]))
    if columns == 0:
        with pytest.raises(
            RuntimeError, match="it must have seqlen <= the seqlen of the KV cache; k has 1, the cache 0"
        ):
            call(new)
    elif device == "cpu":
        with pytest.raises(RuntimeError, match="block_table must name pages below 0"):
            call(new)
    else:
        call(new)
    assert cache.is_untouched()


@pytest.mark.parametrize("lengths", [(0, 0), (1, 2)])
@pytest.mark.parametrize("seqused", [False, True])
@pytest.mark.parametrize("pages, columns", [(2, 0), (0, 3), (0, 0)])
def test_packed_queries_over_pages_that_are_not_there(pages, columns, seqused, lengths, device, tensors, i32):
    cache, table = Guarded(tensors, pages), i32(*[0] * (2 * columns), shape=(2, columns))
    q, cu_q, cu_k = tensors(7, H, D), i32(0, 3, 7), i32(0, lengths[0], sum(lengths))
    used = i32(*lengths) if seqused else None

    def call():
        options = 0.0, 0.2, False, -1, -1, 0.0, None, False, table, None, used
        return _flash_attn_varlen_forward(q, cache.k, cache.v, cu_q, cu_k, 4, 2, *options)

    if any(lengths):
        refused_or_empty(device, ["block_table"], call)
    else:
        assert_no_keys(*call())
    assert cache.is_untouched()


def test_a_cache_without_rows(device, tensors, i32):
    """cache_batch_idx must name rows of a cache without rows. Also a cache of length 0."""
    cache, q = Guarded(tensors, 0), tensors(2, 1, H, D)
    options = {"cache_seqlens": i32(1, 1), "cache_batch_idx": i32(0, 1), "return_softmax_lse": True}
    refused_or_empty(
        device,
        ["cache_batch_idx must be within the 0 rows"],
        lambda: flash_attn_with_kvcache(q, cache.k, cache.v, **options),
    )
    no_keys = tensors(2, 0, H, D)
    turn = dict.fromkeys(("rotary_cos", "rotary_sin"), tensors(0, 16))
    assert_no_keys(*flash_attn_with_kvcache(q, no_keys, no_keys, return_softmax_lse=True))
    assert_no_keys(
        *flash_attn_with_kvcache(
            q, no_keys, no_keys, q[:, :0], q[:, :0], cache_seqlens=i32(0, 0), return_softmax_lse=True, **turn
        )
    )
    assert cache.is_untouched()


@pytest.mark.parametrize("columns", [0, 3])
def test_an_empty_batch(columns, device, tensors, i32):
    """Every index tensor has no element."""
    cache, none = Guarded(tensors, 2), i32()
    q, table = tensors(0, 1, H, D), none.view(0, columns)
    slopes = torch.empty(0, H, device=device)
    indices = {"cache_batch_idx": none, "cache_leftpad": none, "alibi_slopes": slopes}
    for options in ({}, {"block_table": table}):
        new = q[:, :0] if options and columns == 0 else q
        out, lse = flash_attn_with_kvcache(
            q, cache.k, cache.v, new, new, cache_seqlens=none, return_softmax_lse=True, **indices, **options
        )
        assert out.shape == q.shape and lse.shape == (0, H, 1)
    assert flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=3).shape == q.shape
    rows, cu = tensors(0, H, D), i32(0)
    options = 0.0, 0.2, False, -1, -1, 0.0, slopes, False
    out, lse, *_ = _flash_attn_varlen_forward(rows, cache.k, cache.v, cu, cu, 0, 0, *options, table, none, none)
    assert out.shape == rows.shape and lse.shape == (H, 0)
    out, lse, *_ = _flash_attn_varlen_forward(rows, rows, rows, cu, cu, 0, 0, *options, None, none, none)
    saved = rows, rows, rows, rows, out, lse, *[torch.empty_like(rows) for _ in range(3)]
    _flash_attn_varlen_backward(*saved, cu, cu, 0, 0, 0.0, 0.2, False, -1, -1, 0.0, slopes, False)
    assert cache.is_untouched()


def test_offsets_without_an_element(device, tensors, i32):
    x = tensors(3, H, D)
    for cu_q, cu_k, name in ((i32(), i32(0), "cu_seqlens_q"), (i32(0), i32(), "cu_seqlens_k")):
        with pytest.raises(RuntimeError, match=name):
            flash_attn_varlen_func(x, x, x, cu_q, cu_k, 3, 3)


def test_slopes_of_no_head():
    """On a GPU q must have a head here."""
    q, k = torch.randn(2, 3, 0, D), torch.randn(2, 3, H, D)
    for slopes in (torch.empty(0), torch.empty(2, 0)):
        assert flash_attn_func(q, k, k, alibi_slopes=slopes).shape == q.shape
