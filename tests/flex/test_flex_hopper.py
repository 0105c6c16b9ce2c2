"""flex_attention's forward in Hopper's own kernel, against its specification in fp64.

Only this kernel may run, so a call that it refuses is an error. The catalogues have long mods, too, which generic
kernels compute."""

import random

import flash_attn_2_cuda
import pytest
import torch
from catalogue import CATALOGUE
from harness_flex import DIMS, block_mask_on_gpu, on_hopper, prepared, random_blocks, shape_of, tensors_of
from oracle_attention import INF, TOLERANCES, attention, close
from score_catalogue import SCORES

from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

pytestmark = pytest.mark.skipif(not on_hopper, reason="there is no Hopper GPU")


@pytest.fixture(autouse=True)
def only_hoppers_kernel(request):
    flash_attn_2_cuda.set_cuda_kernels(None if "make" in request.fixturenames else "attn_fwd_sm90")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


def compare(tensors, score_mod=None, *args, wants_max=False, **kwargs):
    """Compares out, lse and max_scores, with the arguments of prepared(). Returns out.

    wants_max: a kernel that keeps the largest scores is another kernel.
    """
    mask, kwargs = prepared(tensors, score_mod, *args, **kwargs)
    if wants_max:
        del kwargs["return_lse"]
        kwargs["return_aux"] = AuxRequest(lse=True, max_scores=True)
    with torch.no_grad():
        out, rest = flex_attention(*(x.cuda() for x in tensors), **kwargs)
        want = attention(*(x.double() for x in tensors), score_mod, mask)
    got = (out, rest.lse, rest.max_scores) if wants_max else (out, rest)
    for has, wants in zip(got, want[: len(got)], strict=True):
        close(has.cpu(), wants, max(TOLERANCES[tensors[0].dtype], 1e-4))
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_every_mask_on_hopper(make, seed):
    rng = random.Random(1000 * seed + CATALOGUE.index(make))
    shape = shape_of(rng)
    block = rng.choice([None, 128, 128, 64, (256, 128), (16, 24), (128, 64)])
    compare(tensors_of(rng, shape), mask_mod=make(rng, shape), block=block, wants_max=seed == 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_every_score_mod_on_hopper(make, seed):
    rng = random.Random(1000 * seed + SCORES.index(make))
    shape = shape_of(rng)
    score_mod, _ = make(rng, shape)
    mask_mod = rng.choice([None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (i + j + h) % 3 != 0])
    block = rng.choice([None, 128]) if mask_mod else None
    compare(tensors_of(rng, shape), score_mod, mask_mod, block, wants_max=seed == 1)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_blocks_on_hopper(dims, dtype):
    """Lists in any order, with garbage behind the counts, rows without blocks, and masks of their own for each head."""
    rng, generator = random.Random(dims[0]), torch.Generator().manual_seed(dims[1])
    mod = lambda b, h, i, j: (i * 7 + j * 3 + h) % 5 != 0  # noqa: E731
    for block_q, block_kv in ((128, 128), (64, 96), (192, 32)):
        len_q, len_kv = 5 * block_q - 17, 6 * block_kv - 5
        block_mask, mask = random_blocks(rng, generator, mod, (2, 4), (len_q, len_kv), (block_q, block_kv))
        tensors = tensors_of(rng, (2, 4, len_q, len_kv), dims, dtype)
        tensors[1] = tensors[1] * 3  # the row maximum rises often
        compare(tensors, mask=mask, block_mask=block_mask, wants_max=block_q != 64)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_masked_values_may_be_anything_on_hopper(dims):
    """NaN and inf in keys and values that no row, or only some rows, see."""
    tensors = tensors_of(random.Random(0), (1, 2, 400, 400), dims, torch.bfloat16)
    tensors[2][:, :, 300:], tensors[1][:, :, 350] = float("nan"), INF
    score_mod = lambda s, b, h, i, j: torch.where(j <= i, s, -INF)  # noqa: E731
    mask_mod = lambda b, h, i, j: (j <= i) & (h >= 0)  # noqa: E731
    blocks = block_mask_on_gpu(create_block_mask(mask_mod, 1, 2, 400, 400, device="cpu"), mask_mod)
    want = attention(*(x[:, :, :300].double() for x in tensors), None, torch.ones(300, 300).tril().bool())[0]
    for kwargs in ({"score_mod": score_mod}, {"mask_mod": mask_mod}, {"block_mask": blocks}):
        out = flex_attention(*(x.cuda() for x in tensors), enable_gqa=True, **kwargs).cpu()
        close(out[:, :, :300], want, 2e-2)
        assert not out[:, :, 300:].isfinite().any()


@pytest.mark.parametrize("step", [0.0, 3.0, 50.0, 1e3, 2.0**100, INF])
def test_scores_of_any_size_on_hopper(step):
    """Scores that rise or fall from key tile to key tile by more than floats reach, and scores of -inf."""
    tensors = tensors_of(random.Random(1), (1, 2, 300, 700), (128, 128))
    for sign in (1, -1):

        def mod(s, b, h, i, j, sign=sign):
            return s + sign * torch.where(j // 128 > 0, step, 0.0) * (j // 128)

        for wants_max in (False, True):
            compare(tensors, mod, wants_max=wants_max)
    compare(tensors, lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, -INF), wants_max=True)
    for wants_max in (False, True):
        out = compare(tensors, lambda s, b, h, i, j: torch.where(i % 2 == 0, s, -INF), wants_max=wants_max)
        assert not out[:, :, 1::2].any()
    nan = lambda s, b, h, i, j: torch.where((i == 5) & (j == 600), float("nan"), s)  # noqa: E731
    for aux in (None, AuxRequest(max_scores=True)):
        got = flex_attention(*(x.cuda() for x in tensors), nan, enable_gqa=True, return_aux=aux)
        for x in [got] if aux is None else [got[0], got[1].max_scores]:
            assert x[:, :, 5].isnan().all() and x[:, :, 6:].isfinite().all() and x[:, :, :5].isfinite().all()


@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (96, 96), (128, 128), (64, 256), (192, 128), (256, 256)])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 1), (129, 300), (300, 129), (1000, 1), (0, 9), (9, 0)])
def test_max_scores_without_mods_on_hopper(dims, lengths):
    """Rows of wholly equal scores, the largest key first, last or alone, and no key at all."""
    tensors = tensors_of(random.Random(dims[0]), (2, 4, *lengths), dims, torch.bfloat16)
    compare(tensors, wants_max=True)
    if min(lengths) > 0:
        tensors[1][:, :, 0] *= 100  # the repetition of a work tile keeps the maximum, too
        tensors[1][:, :, -1] *= -3
        compare(tensors, wants_max=True)
        compare([tensors[0] * 0, *tensors[1:]], wants_max=True)


def test_long_sequences_and_many_heads_on_hopper():
    """More work tiles than multiprocessors, walks of very different lengths, and lists that a graph changes."""
    n, document = 3000, torch.tensor([0] * 100 + [1] * 1900 + [2] * 300 + [3] * 700)
    mod = lambda b, h, i, j: (document[i] == document[j]) & (i >= j)  # noqa: E731
    tensors = tensors_of(random.Random(2), (2, 16, n, n), (64, 64), torch.bfloat16)
    for block in (128, (64, 256)):
        compare(tensors, mask_mod=mod, block=block, wants_max=True)
        compare(tensors, lambda s, b, h, i, j: s - (i - j) * 0.01 * (h + 1), mod, block)
