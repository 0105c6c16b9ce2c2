"""Block masks against torch's, list by list, and their time and memory."""

import functools
import random

import flash_attn_2_cuda
import fresh_python
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from catalogue import CATALOGUE
from oracle_attention import moved

import flash_attn.flex_attention as ours
from flash_attn.flex import tracer

LISTS = ["kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"]
LISTS += ["full_" + name for name in LISTS]


def check(mod, *sizes, **options):
    """All lists are torch's, including what stands behind the counts."""
    got = ours.create_block_mask(mod, *sizes, device="cpu", **options)
    want = theirs.create_block_mask(mod, *sizes, device="cpu", **options)
    assert isinstance(got, theirs.BlockMask)
    for name in LISTS:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert got.seq_lengths == want.seq_lengths and got.BLOCK_SIZE == want.BLOCK_SIZE and got.mask_mod is mod
    assert torch.equal(got.to_dense(), want.to_dense()) and got.sparsity() == want.sparsity()
    return got


def check_dense(mod, shape, block):
    """The lists fit the mask that the evaluator gives, which clamps indices where torch raises an IndexError."""
    got = ours.create_block_mask(mod, *shape, device="cpu", BLOCK_SIZE=block)
    dense = ours.create_mask(mod, *shape, device="cpu")
    pad = [-length % size for length, size in zip(shape[2:], block)]
    dense = torch.nn.functional.pad(dense, (0, pad[1], 0, pad[0]))
    tiles = dense.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).transpose(3, 4).flatten(4)
    full = tiles.all(-1)
    for kinds, prefix in ((full, "full_"), (tiles.any(-1) & ~full, "")):
        for lines, name in ((kinds, "kv"), (kinds.transpose(2, 3), "q")):
            order = lines.int().argsort(dim=-1, descending=True, stable=True)
            assert torch.equal(getattr(got, f"{prefix}{name}_num_blocks"), lines.sum(-1).int())
            assert torch.equal(getattr(got, f"{prefix}{name}_indices"), order.int())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_lists_are_torchs(make, seed):
    rng = random.Random(f"{make.__name__}{seed}")
    lengths = [(256, 384), (300, 300), (rng.randint(1, 500), rng.randint(1, 500))][seed]
    shape = (rng.randint(1, 2), rng.randint(1, 2), *lengths)
    block = [128, 64, (rng.choice([16, 96, 100, 256]), rng.choice([32, 96, 129, 256]))][seed]
    shape = (*shape[:2], max(shape[2], 2), max(shape[3], 2))
    check(make(rng, shape), *shape, BLOCK_SIZE=block)


@pytest.mark.parametrize("seed", range(100))
def test_bounds_are_never_too_narrow(seed):
    """Small blocks and random formulas over everything that bounds know about."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-9, 40, (rng.choice([7, 80, 1500]),), generator=generator, dtype=torch.int32)
    square = torch.randint(-9, 40, (rng.choice([3, 50]), 40), generator=generator)
    reals = torch.randn(90, generator=generator) * 30
    reals[3], reals[20] = torch.nan, -torch.inf

    def formula(depth):
        n, m = rng.randint(-9, 9), rng.choice([-7, -2, 2, 3, 8, 31])
        if depth == 0:
            leaf = rng.choice(["q", "k", "table", "square", "number"])
            return {
                "q": lambda b, h, q, k: q - n,
                "k": lambda b, h, q, k: k + h,
                "table": lambda b, h, q, k: table[k - q] if n > 3 else table[q + n],
                "square": lambda b, h, q, k: square[q // 9, k % 41],
                "number": lambda b, h, q, k: k * 0 + n,
            }[leaf]
        x, y = formula(depth - 1), formula(depth - 1)
        binary = [torch.add, torch.sub, torch.mul, torch.minimum, torch.maximum, torch.bitwise_and, torch.bitwise_or]
        binary += [torch.bitwise_xor]
        unary = [torch.abs, torch.neg, torch.sign, torch.bitwise_not, torch.square]
        unary += [lambda x: x // m, lambda x: x % m, lambda x: x >> 2, lambda x: x << 3, lambda x: x.clamp(-n, 30)]
        unary += [lambda x: torch.fmod(x, m), lambda x: torch.div(x, m, rounding_mode="trunc"), lambda x: x.short()]
        unary += [
            lambda x: (x.float() / m).floor().int(),
            lambda x: (x * 0.3).round().long(),
            lambda x: x.to(torch.uint8),
        ]
        unary += [lambda x: (reals[x.abs() % 90] * 0.5 > n).int(), lambda x: x.float().sqrt().isnan().int()]
        if rng.random() < 0.5:
            f = rng.choice(unary)
            return lambda b, h, q, k: f(x(b, h, q, k).int())
        if rng.random() < 0.15:
            return lambda b, h, q, k: x(b, h, q, k).int() % (y(b, h, q, k).int().clamp(min=n) | 1).clamp(min=1)
        if rng.random() < 0.2:
            return lambda b, h, q, k: torch.where(q - k > n, x(b, h, q, k).int(), y(b, h, q, k).int())
        f = rng.choice(binary)
        return lambda b, h, q, k: f(x(b, h, q, k).int(), y(b, h, q, k).int())

    x, y = formula(rng.randint(0, 3)), formula(rng.randint(0, 3))
    compare = rng.choice([torch.lt, torch.le, torch.eq, torch.ne])
    check_dense(lambda b, h, q, k: compare(x(b, h, q, k), y(b, h, q, k)), (1, 2, 70, 60), (4, 6))


@pytest.mark.parametrize("mod", [
    lambda b, h, i, j: 0.1 * (h + 1) > 0.3,  # 0.1 * 3 is 0.3 in fp32, and above in fp64
    lambda b, h, i, j: (h / 3).double() >= h.double() / 3,
    lambda b, h, i, j: ((i // 128) * 0.1).double() >= (i // 128).double() * 0.1,
], ids=["products", "quotients", "rows"])  # fmt: skip
@pytest.mark.parametrize("block", [1, 128])
def test_bounds_of_fp32_are_rounded_to_fp32(mod, block):
    sizes = (1, 6, 512, 256) if block > 1 else (1, 6, 5, 3)
    mine, torchs = (
        f(mod, *sizes, device="cpu", BLOCK_SIZE=block).to_dense()
        for f in (ours.create_block_mask, theirs.create_block_mask)
    )
    assert torch.equal(mine, torchs)


def evaluated_blocks(mod, length):
    program, tensors, numbers = tracer.program_of(mod)
    n = length // 128
    shapes = [(1, 1, n), (1, 1, n, n)] * 4
    lists = tuple(torch.empty(shape, dtype=torch.int32) for shape in shapes)
    return flash_attn_2_cuda.flex_classify(program.text, tensors, numbers, lists, 1, 1, length, length, 128, 128)


def test_bounds_tell_most_blocks():
    assert evaluated_blocks(lambda b, h, q, k: q >= k, 4096) == 32
    assert evaluated_blocks(lambda b, h, q, k: (q >= k) & (q - k < 1000), 4096) < 96
    document = torch.arange(4096) // 341
    assert evaluated_blocks(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), 4096) <= 124


def test_masks_combine():
    def window(b, h, q, k):
        return (q - k).abs() < 50

    def causal(b, h, q, k):
        return q >= k

    for combine in (ours.and_masks, ours.or_masks, theirs.and_masks, theirs.or_masks):
        check(combine(window, causal, functools.partial(window)), None, None, 300, 300)
    check(ours.noop_mask, 2, None, 256, 130)
    check(ours.and_masks(), None, 2, 256, 130)
    check(ours.or_masks(), 1, 1, 256, 130)
    with pytest.raises(RuntimeError, match="All inputs should be callable mask_mods"):
        ours.and_masks(window, 3)
    with pytest.raises(RuntimeError, match="All inputs should be callable mask_mods"):
        ours.or_masks(None)


def test_a_dense_mask_is_torchs():
    table = torch.rand(2, 33, 57)

    def mask(b, h, q, k):
        return table[b, q, k] > 0.5

    def score(s, b, h, q, k):
        return torch.where(table[b, q, k] > 0.5, s, -float("inf"))

    for mod in (mask, score):
        got = ours.create_mask(mod, 2, 3, 33, 57, device="cpu")
        assert torch.equal(got, theirs.create_mask(mod, 2, 3, 33, 57, device="cpu"))


def test_torchs_types_are_the_types():
    for name in ("BlockMask", "AuxRequest", "AuxOutput"):
        assert getattr(ours, name) is getattr(theirs, name)


def test_a_block_mask_runs_in_torch():
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    mod = CATALOGUE[1](random.Random(0), (1, 1, 300, 300))
    masks = [module.create_block_mask(mod, None, None, 300, 300, device="cpu") for module in (ours, theirs)]
    got, want = (theirs.flex_attention(q, k, v, block_mask=mask) for mask in masks)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ((1, 1, 0, 8), {}, "Q_LEN must be positive"),
        ((1, 1, 8, -1), {}, "KV_LEN must be positive"),
        ((0, 1, 8, 8), {}, "B must be positive"),
        ((1, 1, 8, 8), {"BLOCK_SIZE": 0}, "BLOCK_SIZE must be positive"),
    ],
)
def test_sizes_must_be_positive(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        ours.create_block_mask(lambda b, h, q, k: q >= k, *sizes, device="cpu", **options)


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ((1, 1, 8.5, 8), {}, "Q_LEN must be an integer; it is 8.5, of type float"),
        ((1, 1, 8, "8"), {}, "KV_LEN must be an integer; it is '8', of type str"),
        ((1, 1, 8, None), {}, "KV_LEN must be an integer; it is of type NoneType"),
        ((1.0, 1, 8, 8), {}, "B must be an integer or None; it is 1.0, of type float"),
        ((1, 1, 8, 8), {"BLOCK_SIZE": 64.0}, "BLOCK_SIZE must be an integer or a pair of integers; it is 64.0"),
        ((1, 1, 8, 8), {"BLOCK_SIZE": (1, 2, 3)}, "BLOCK_SIZE must be .*it is \\(1, 2, 3\\), of type tuple"),
        ((1, 1, 8, 8), {"BLOCK_SIZE": (8, 8.0)}, "BLOCK_SIZE must be .*it is \\(8, 8.0\\), of type tuple"),
    ],
)
def test_sizes_must_be_integers(sizes, options, message):
    def mod(b, h, q, k):
        return q >= k

    with pytest.raises(TypeError, match=message):
        ours.create_block_mask(mod, *sizes, device="cpu", **options)
    if not options:
        with pytest.raises(TypeError, match=message):
            ours.create_mask(mod, *sizes, device="cpu")


def test_sizes_of_numpy_and_lists():
    def mod(b, h, q, k):
        return q >= k

    numpy = pytest.importorskip("numpy")
    want = ours.create_block_mask(mod, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    for block in (numpy.int64(4), [4, 4], (numpy.int32(4), 4), torch.Size([4, 4])):
        got = ours.create_block_mask(mod, 1, None, numpy.int64(8), 8, device="cpu", BLOCK_SIZE=block)
        assert got.BLOCK_SIZE == (4, 4) and torch.equal(got.to_dense(), want.to_dense())


def test_wrong_mods_are_refused():
    with pytest.raises(
        AssertionError,
        match="requires a mask_mod function! Got .*test_block_mask.py, line .*; a mask_mod takes \\(b, h",
    ):
        ours.create_block_mask(lambda s, b, h, q, k: s, 1, 1, 8, 8, device="cpu")
    with pytest.raises(
        AssertionError, match="mask.dtype must be torch.bool, got torch.int64: .*test_block_mask.py, line"
    ):
        ours.create_block_mask(lambda b, h, q, k: q - k, 1, 1, 8, 8, device="cpu")
    with pytest.raises(AssertionError, match="a mask_mod has 4 arguments.*test_block_mask.py, line .* has 2"):
        ours.create_mask(lambda q, k: q >= k, 1, 1, 8, 8, device="cpu")
    with pytest.raises(NotImplementedError, match='pass device="cpu" instead of "cuda"'):
        ours.create_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="cuda")
    with pytest.raises(NotImplementedError, match='pass device="cpu" instead of "meta"'):
        ours.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="meta")
    table = torch.ones(8, dtype=torch.bool, device="meta")
    with pytest.raises(RuntimeError, match="a mod's tensors must be on cpu, where it is computed; one is on meta"):
        ours.create_block_mask(lambda b, h, q, k: table[q], 1, 1, 8, 8, device="cpu")


# ---- on a GPU ---------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_cuda
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_lists_of_a_gpu_are_those_of_the_cpu(make, seed):
    rng = random.Random(f"{make.__name__}{seed}")
    shape = (rng.randint(1, 2), rng.randint(1, 2), rng.randint(2, 900), rng.randint(2, 900))
    block = [128, 64, (rng.choice([16, 96, 100, 256]), rng.choice([32, 96, 129, 256]))][seed]
    mod = make(rng, shape)
    want = ours.create_block_mask(mod, *shape, device="cpu", BLOCK_SIZE=block)
    got = ours.create_block_mask(moved(mod, "cuda"), *shape, device="cuda", BLOCK_SIZE=block)
    for name in LISTS:
        assert getattr(got, name).is_cuda and torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@on_cuda
def test_a_graph_finds_the_blocks_of_new_values():
    document = torch.zeros(512, dtype=torch.int32, device="cuda")

    def mod(b, h, q, k):
        return document[q] == document[k]

    def find():
        return ours.create_block_mask(mod, 1, 1, 512, 512, device="cuda")

    find()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = find()
    for step in (512, 128, 100):
        document.copy_(torch.arange(512, device="cuda") // step)
        graph.replay()
        want = find()
        assert all(torch.equal(getattr(mask, name), getattr(want, name)) for name in LISTS)


@on_cuda
def test_captures_of_another_device_are_refused():
    table = torch.ones(8, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="a mod's tensors must be on cuda:0, where it is computed; one is on cpu"):
        ours.create_block_mask(lambda b, h, q, k: table[q], 1, 1, 8, 8, device="cuda:0")


@pytest.mark.parametrize("make", [ours.create_block_mask, ours.create_mask], ids=lambda make: make.__name__)
def test_masks_are_made_outside_of_transforms(make):
    def loss(x):
        make(lambda b, h, q, k: q >= k, 1, 1, 9, 9, "cpu")
        return x.sum()

    with pytest.raises(NotImplementedError, match=f"{make.__name__} makes no mask within a function that torch.func"):
        torch.func.grad(loss)(torch.randn(3))
    assert torch.equal(torch.vmap(loss)(torch.ones(2, 3)), torch.full((2,), 3.0))


@pytest.mark.parametrize("block", [(64, 128), (128, 64)], ids=str)
def test_lists_count_blocks_of_the_size_that_the_mask_says_now(block):
    """The size is changed behind create_block_mask, which knows its own lists again."""
    q, found = torch.randn(1, 1, 256, 16, dtype=torch.float64), []
    for maker in (ours, theirs):
        mask = maker.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
        mask.BLOCK_SIZE = block
        found.append(ours.flex_attention(q, q, q, block_mask=mask))
    assert torch.equal(*found)
    assert not torch.equal(found[0], ours.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j))


def test_wrong_lists_are_refused():
    program, tensors, numbers = tracer.program_of(lambda b, h, q, k: q >= k)
    shapes = [(1, 1, 2), (1, 1, 2, 3), (1, 1, 3), (1, 1, 3, 2)]
    lists = [torch.empty(shape, dtype=torch.int32) for shape in shapes * 2]
    sizes = (1, 1, 256, 384, 128, 128)
    run = functools.partial(flash_attn_2_cuda.flex_classify, program.text, tensors, numbers)
    run(tuple(lists), *sizes)
    for i in range(8):
        for wrong in (lists[i].long(), lists[i][..., :-1], lists[i][None]):
            with pytest.raises(RuntimeError):
                run((*lists[:i], wrong, *lists[i + 1 :]), *sizes)
    with pytest.raises(RuntimeError, match="sizes must be 1 to"):
        run(tuple(lists), 1, 1, 256, 384, 128, 0)


MEMORY = """
import resource
import torch
from flash_attn.flex_attention import create_block_mask
length = 1 << 17
document = torch.arange(length) * 12 // length
def mod(b, h, q, k): return (document[q] == document[k]) & (q >= k)
create_block_mask(mod, 1, 1, 256, 256, device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mask = create_block_mask(mod, 1, 1, length, length, device="cpu")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
lists = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
print(grown * 1024 - sum(x.nbytes for x in lists))
"""


def test_memory_grows_with_the_number_of_blocks():
    done = fresh_python.python(MEMORY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50 << 20
