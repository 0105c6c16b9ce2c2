"""The one table of cases. The tests check these cases, and the benchmarks time them.

A case is one attention problem by its sizes and options. The repr of a case names only the values that differ from the
defaults. `python tests/test_fuzz.py "Case(len_q=65, len_kv=1, causal=True)"` runs such a repr on every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product


@dataclass(frozen=True, repr=False)
class Case:
    len_q: int | tuple[int, ...] = 64  # int: dense; tuple: packed, one length per sequence
    len_kv: int | tuple[int, ...] = 64
    b: int = 2  # dense only; packed: as many as lengths
    h: int = 2
    h_kv: int | None = None  # None: h
    d: int = 32
    dtype: str = "fp32"  # fp16, bf16, fp32, fp64
    scale: float | None = None  # None: d ** -0.5
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "", "h" or "bh": the shape of the slopes
    dropout: float = 0.0
    values: str = "normal"  # see harness.VALUES
    layout: str = "padded"  # see harness.LAYOUTS
    seed: int = 0

    @property
    def packed(self):
        return isinstance(self.len_q, tuple)

    @property
    def lengths(self):
        """(len_q, len_kv) of each sequence."""
        return list(zip(self.len_q, self.len_kv)) if self.packed else [(self.len_q, self.len_kv)] * self.b

    @property
    def heads_kv(self):
        return self.h if self.h_kv is None else self.h_kv

    def __repr__(self):
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


def each(case, **options):
    """Every combination of the options: each(Case(), d=(8, 16), causal=(False, True)) gives four cases."""
    return [replace(case, **dict(zip(options, choice))) for choice in product(*options.values())]


BOTH = (False, True)
TILE_EDGES = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
HEAD_DIMS = (1, 3, 8, 16, 33, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)

LENGTHS = [
    case
    for n in TILE_EDGES
    for case in (
        Case(n, n, b=1, h=3, d=16, causal=True),
        Case(n, 70, b=1, d=24),
        Case(70, n, b=1, d=24, causal=True),
        Case(n, 260, b=1, d=20, causal=True),
        Case(260, n, b=1, d=20, causal=True),
    )
]

# Lengths around multiples of the kernels' tiles: 16, 32, 48, 64 rows, several tiles a task, and 64 or 128 keys.
TILES = [
    Case(len_q, len_kv, b=1, h=2, h_kv=1, d=24, causal=(len_q + len_kv) % 4 == 0)
    for len_q in (31, 33, 47, 49, 97, 191, 193, 257, 385)
    for len_kv in (95, 97, 191, 193, 255, 257, 385)
]

DIMS = [Case(70, 90, b=1, h=2, h_kv=1, d=d, causal=d % 3 == 0) for d in HEAD_DIMS]

HEADS = each(Case(33, 50, causal=True), h=(6,), h_kv=(6, 3, 2, 1)) + [Case(1, 90, b=3, h=8, h_kv=2), Case(17, 65, h=5)]

# Every corner of i + shift - left <= j <= i + shift + right, at len_q below, at and above len_kv.
WINDOWS = [
    Case(len_q, len_kv, b=1, h=1, d=16, window=window, causal=causal)
    for len_q, len_kv in ((64, 64), (5, 70), (70, 5), (33, 129), (129, 33), (1, 9), (9, 1))
    for window in (
        (0, 0), (0, -1), (-1, 0), (3, 0), (0, 3), (16, 16), (17, 5), (-1, 7), (7, -1), (63, 64), (200, 0), (0, 200),
        (200, 200), (-1, 200), (32, 33),
    )
    for causal in BOTH
]  # fmt: skip

ZEROS = [
    *each(Case(d=16), len_q=(0, 5), len_kv=(0,), causal=BOTH),
    *each(Case(d=16), len_q=(0,), len_kv=(5,), causal=BOTH),
    *each(Case(5, 7, b=0, d=16), causal=BOTH),
    Case(5, 0, d=16, window=(2, 2), alibi="h", softcap=3.0),
]

VALUES = [
    *each(Case(65, 129, d=64), values=("equal", "zero", "huge", "ones", "sparse"), causal=BOTH),
    Case(40, 300, b=1, values="rising"),  # every key block raises the maximum
    Case(40, 300, b=1, values="falling"),
    Case(64, 64, values="sentinel"),  # one score 1e4 above the others
]

OPTIONS = [
    Case(65, 80, softcap=15.0, values="wide"),
    Case(65, 80, softcap=2.0, causal=True),
    Case(65, 80, alibi="h"),
    Case(80, 65, alibi="bh", causal=True),
    Case(65, 80, alibi="bh", window=(20, 3), softcap=5.0, h=4, h_kv=2),
    Case(65, 80, scale=0.5),
    Case(65, 80, scale=-0.3, causal=True),
    Case(65, 80, scale=0.0),
    Case(65, 80, dropout=0.17),
    Case(65, 80, dropout=0.5, causal=True, h=4, h_kv=1),
    Case(129, 150, dropout=0.17, window=(40, 10), alibi="bh", softcap=5.0, h=4, h_kv=2, d=40),
    Case(33, 33, dropout=1e-30),
    Case(33, 33, dropout=0.99),
    Case(17, 300, b=3, alibi="h", causal=True, window=(100, 0), softcap=30.0, d=59),
]

LAYOUTS = [
    *each(
        Case(33, 49, h=4, h_kv=2, d=40, causal=True),
        layout=("plain", "heads_first", "interleaved", "same_batch", "same_head", "gaps", "odd_base", "rows_first"),
    ),
    Case(1, 49, b=1, h=1, d=24, layout="size_one"),
    Case(33, 1, b=1, h=1, d=24, layout="size_one"),
    Case(17, 17, d=1, layout="gaps"),
]

# Short sequences with large values have gradients that nearly cancel. The square cases are upstream's.
SQUARE = [Case(n, n, b=5, h=8, d=d, values="large") for n in (1, 2, 5, 17, 128) for d in (16, 32, 64)]
TINY = SQUARE + each(Case(b=2, h=8, values="large"), len_q=(1, 2, 17), len_kv=(1, 5, 17), d=(16, 40))

DENSE = LENGTHS + DIMS + HEADS + ZEROS + VALUES + OPTIONS + LAYOUTS

PACKED = [
    Case((5,), (7,)),
    Case((1, 1, 1), (1, 64, 65)),
    Case((0, 17, 64, 0, 65, 1, 0), (5, 0, 64, 0, 63, 129, 7), d=16),
    Case((0, 17, 64, 0, 65, 1, 0), (5, 0, 64, 0, 63, 129, 7), d=16, causal=True),
    Case((0, 0), (0, 0), d=16),
    Case((0, 0), (3, 0), d=16),
    Case((4, 3), (0, 0), d=16),
    Case((), (), d=16),
    Case((76, 34, 146), (1, 1, 1), d=64, values="large"),
    Case((1, 1, 1), (76, 34, 146), h=8, d=64, values="large", causal=True),
    Case((113, 20, 97), (203, 64, 1), h=6, h_kv=2, d=59, causal=True),
    Case((113, 20, 97), (20, 164, 97), h=4, h_kv=1, d=40, window=(15, 0)),
    Case((113, 20, 97), (20, 164, 97), h=4, d=40, window=(5, 30), alibi="bh", softcap=8.0),
    Case((33, 1, 128), (20, 64, 97), d=33, alibi="h", causal=True),
    Case((33, 1, 128), (20, 64, 97), d=128, dropout=0.17, causal=True),
    Case((33, 0, 70), (65, 9, 0), h=4, h_kv=2, dropout=0.4, softcap=4.0, window=(-1, 6)),
    Case((1,) * 9, (3, 0, 70, 1, 16, 128, 17, 0, 33), h=8, h_kv=2, d=64, causal=True),
    Case((1, 0, 1, 1), (30, 4, 0, 129), h=8, h_kv=2),
    *each(Case((33, 17), (33, 17), h=4, h_kv=4, d=24), layout=("heads_first", "interleaved", "same_head", "gaps")),
    Case((300, 2, 259), (2, 300, 259), d=80, causal=True),
    Case(tuple(i * 7 % 23 for i in range(60)), tuple(i * 5 % 31 for i in range(60)), h=3, d=20, causal=True),
]

DTYPES = ("fp32", "bf16", "fp16")


def in_dtypes(cases, dtypes=DTYPES):
    """Every case in every dtype."""
    return [replace(case, dtype=dtype) for case in cases for dtype in dtypes]


def in_turns(cases, dtypes=DTYPES):
    """The first case in the first dtype, the second in the second, and so on, for families of many similar cases."""
    return [replace(case, dtype=dtypes[i % len(dtypes)]) for i, case in enumerate(cases)]


# ---- what the benchmarks time ----------------------------------------------------------------------------------------

TWO = ("fp32", "bf16")
SHORT = Case(1024, 1024, b=1, h=8, d=64, layout="plain")

# bench_cpu.py, by the name of the rows. A plain case has as many heads as threads at least.
BENCH_CPU = {
    "plain": [
        Case(n, n, b=1, h=h, d=d, dtype=dtype, causal=causal, layout="plain")
        for dtype, (n, h), d, causal in product(
            ("fp32", "bf16", "fp16"), ((512, 8), (2048, 2), (8192, 1)), (64, 128), BOTH
        )
    ],
    "avx2": each(Case(2048, 2048, b=1, layout="plain"), dtype=TWO, d=(64, 128), causal=BOTH),
    "gqa": each(Case(1024, 1024, b=1, h=32, h_kv=8, d=128, causal=True, layout="plain"), dtype=TWO),
    "window 256": each(SHORT, dtype=TWO, causal=(True,), window=((255, 0),)),
    "dropout 0.1": each(SHORT, dtype=TWO, dropout=(0.1,)),
    "alibi": each(SHORT, dtype=TWO, alibi=("h",)),
    "softcap 30": each(SHORT, dtype=TWO, softcap=(30.0,)),
    "logits spread by 200": each(SHORT, dtype=TWO),
    "denormal values": each(SHORT, dtype=TWO),
    "256 sequences of 32 to 128": each(Case(128, 128, b=256, h=12, d=64), dtype=TWO),
    "batch": [
        Case(n, n, b=16384 // n, h=12, d=64, dtype=dtype, layout="plain")
        for dtype, n in product(TWO, (16, 32, 64, 128, 256))
    ],
    "bias of pairs": each(Case(1024, 1024, b=1, h=4, d=64, layout="plain"), dtype=TWO),
    "bias of pairs of all heads": each(Case(1024, 1024, b=1, h=4, d=64, layout="plain"), dtype=TWO),
    "bias of keys": each(Case(1024, 1024, b=1, h=4, d=64, layout="plain"), dtype=TWO),
    "bias of windows": each(Case(49, 49, b=64, h=4, d=32, layout="plain"), dtype=TWO),
    "decode": each(Case(1, b=1, h=32, h_kv=8, d=128), dtype=("fp32", "bf16", "fp16"), len_kv=(8192, 16384)),
    "decode, huge pages": each(Case(1, 16384, b=1, h=32, h_kv=8, d=128), dtype=TWO),
}

# bench_fwd.py and bench_bwd.py: a hidden size of 2048 and 16384 tokens.
BENCH_GPU = [
    Case(n, n, b=16384 // n, h=2048 // d, d=d, dtype="bf16", causal=causal, layout="plain")
    for d, causal, n in product((64, 128, 256), BOTH, (1024, 4096, 16384))
]

# bench_decode.py: one new query for each sequence, and the layouts of its cache. A number is the size of a page.
BENCH_DECODE = [
    (Case(1, n, b=b, h=h, h_kv=h_kv, d=d, dtype="bf16"), layouts)
    for b, n, h, h_kv, d, layouts in (
        (64, 8192, 32, 8, 128, ("dense", "appends", 1, 16, 64, 256)),
        (1, 131072, 32, 8, 128, ("dense", 16)),
        (4, 16384, 64, 8, 128, ("dense", 16)),
        (64, 8192, 16, 1, 128, ("dense", 16)),
        (16, 2048, 32, 32, 128, ("dense", 16)),
        (8, 1024, 32, 8, 128, ("dense", "warm", "appends", 16)),
        (1, 1024, 32, 8, 128, ("dense", "appends")),
        (64, 8192, 32, 8, 64, ("dense", 16)),
        (64, 4096, 16, 8, 96, ("dense",)),
        (32, 4096, 16, 8, 192, ("dense",)),
        (32, 4096, 16, 8, 256, ("dense", 16)),
        (1, 8192, 8, 1, 128, ("dense", "appends", 16)),
        (4, 8192, 8, 1, 128, ("dense", 16)),
        (1, 16384, 32, 8, 128, ("dense", 16)),
    )
]


def _square(*shapes):
    """Cases of (b, h, length, d)."""
    return [Case(length, length, b=b, h=h, d=d, dtype="bf16") for b, h, length, d in shapes]


# bench_masks.py
BENCH_MASKS = _square((4, 16, 512, 64), (2, 24, 4096, 64), (4, 16, 2048, 128), (1, 16, 8192, 128))

# bench_masks.py --short: thousands of short sequences. BENCH_SHORT_MASKS: with --masks.
BENCH_SHORT_MASKS = _square(
    (4096, 8, 16, 64), (2048, 16, 32, 64), (2048, 12, 49, 32), (1024, 16, 64, 64), (512, 16, 64, 128)
)
BENCH_SHORT = _square(
    (8192, 8, 8, 64), (4096, 8, 16, 40), (4096, 16, 16, 64), (4096, 8, 16, 80), (1024, 16, 16, 128),
    (1024, 8, 16, 160), (2048, 16, 32, 64), (2048, 8, 32, 128), (2048, 12, 49, 32), (1024, 16, 64, 64),
    (512, 16, 64, 128),
)  # fmt: skip

# bench_packed.py: thousands of packed sequences. Lengths (bench_packed.lengths_of), sequences, heads, columns.
BENCH_PACKED = [
    ("1 to 16", 8000, 8, 64),
    ("4 to 32", 4000, 12, 64),
    ("8 to 32", 2000, 8, 128),
    ("20 to 64", 1000, 16, 64),
    ("20 to 64", 1000, 8, 128),
    ("spread", 2000, 12, 64),
    ("spread", 8000, 8, 64),
    ("65 to 128", 300, 8, 64),
    ("65 to 128", 1000, 8, 64),
    ("65 to 128", 8000, 8, 64),
    ("65 to 200", 1000, 8, 128),
]

# bench_prompts.py: many queries over a cache of len_kv keys.
BENCH_PROMPTS = [
    Case(len_q, len_kv, b=b, h=h, h_kv=h_kv, d=d, dtype="bf16", causal=True)
    for d in (64, 128, 256)
    for b, len_q, len_kv, h, h_kv in (
        (1, 4096, 4096, 16, 16),
        (2, 2048, 8192, 32, 8),
        (16, 512, 8192, 32, 8),
        (16, 64, 8192, 32, 8),
        (4, 32, 8192, 32, 8),
    )
]

# bench_prompts.py --few: calls that do not fill a GPU with work tiles, and calls whose tiles heads share.
BENCH_FEW = [
    Case(len_q, len_kv, b=b, h=32, h_kv=8, d=d, dtype="bf16", causal=True)
    for d in (64, 128, 256)
    for b, lengths, len_kv in (
        (1, (8, 16, 32, 64, 128, 256, 512), 8192),
        (2, (8, 16, 32, 64, 128, 256), 8192),
        (4, (8, 16, 32, 64, 128, 256), 8192),
        (1, (16, 32, 64, 128, 256, 512), 65536),
        (2, (16, 64, 256), 65536),
        (4, (16, 64, 256), 65536),
        (1, (16, 64, 256), 2048),
        (4, (16, 64), 2048),
        (16, (8, 16, 32, 64), 8192),
        (64, (8, 16, 32, 64), 2048),
    )
    for len_q in lengths
]

# bench_peers.py: (problem, case). All heads have 2048 columns together, fewer where heads do not fill them. A problem
# has 16k tokens, 32k of length 32768. bench_peers.py draws the lengths of the packed problems.
FULL = (-1, -1)
COLUMNS = 32, 40, 64, 72, 80, 88, 96, 104, 112, 128, 160, 192, 256
BENCH_PEERS = [
    (problem, Case(len_q, len_kv, b, h, max(1, h // group), d, dtype, causal=causal, window=window))
    for problem, len_q, len_kv, b, group, dims, dtype, window in (
        *((f"{n} tokens", n, n, 16384 // n, 1, (64, 128, 256), "bf16", FULL) for n in (128, 256, 512, 1024)),
        ("2048 tokens", 2048, 2048, 8, 1, (64,), "bf16", FULL),
        ("4096 tokens", 4096, 4096, 4, 1, COLUMNS, "bf16", FULL),
        ("8192 tokens", 8192, 8192, 2, 1, (64,), "bf16", FULL),
        ("16384 tokens", 16384, 16384, 1, 1, (64, 128, 256), "bf16", FULL),
        ("32768 tokens", 32768, 32768, 1, 1, (64,), "bf16", FULL),
        ("fp16, 4096 tokens", 4096, 4096, 4, 1, (64, 128, 256), "fp16", FULL),
        ("8 heads to 1, 4096 tokens", 4096, 4096, 4, 8, (64, 128, 256), "bf16", FULL),
        ("one key head, 4096 tokens", 4096, 4096, 4, 2048, (64, 128, 256), "bf16", FULL),
        ("window of 512, 8192 tokens", 8192, 8192, 2, 1, (64, 128, 256), "bf16", (512, 0)),
        ("512 queries, 8192 keys", 512, 8192, 32, 1, (64, 128, 256), "bf16", FULL),
        ("packed, 24 of 64 to 4096 tokens", (), (), 24, 1, (64, 128, 256), "bf16", FULL),
        ("packed, 256 of 1 to 128 tokens", (), (), 256, 1, (64, 128, 256), "bf16", FULL),
    )
    for d in dims
    for h in [2048 // d]
    for causal in (BOTH if window == FULL and len_q == len_kv else (False,))
]

# Dense problems whose work tiles leave multiprocessors idle: sequences, queries, keys, heads, columns, causal.
BENCH_FEW_TILES = [
    (f"{b} x {len_q} on {len_kv}, {h}/{h_kv} heads", Case(len_q, len_kv, b, h, h_kv, d, "bf16", causal=causal))
    for b, len_q, len_kv, h, h_kv, d, causal in (
        (1, 1024, 1024, 8, 8, 128, True),
        (1, 2048, 2048, 4, 4, 128, False),
        (2, 256, 4096, 16, 16, 128, False),
        (1, 16, 8192, 32, 8, 128, True),
        (1, 64, 8192, 16, 16, 128, True),
        (1, 100, 6000, 16, 2, 128, False),
        (1, 1500, 1500, 20, 20, 64, False),
        (1, 300, 4096, 12, 12, 64, False),
        (1, 512, 50000, 8, 8, 64, False),
        (1, 512, 8192, 8, 8, 96, False),
        (2, 256, 4096, 4, 4, 192, False),
        (1, 100, 1000, 8, 8, 256, False),
        (1, 1024, 1024, 8, 8, 256, True),
    )
]

# bench_shapes.py, by the name of the rows: shapes that are in no other table.
BENCH_SHAPES = {
    name: Case(len_q, len_kv, b=b, h=h, h_kv=h_kv, d=d, causal=causal, dtype=dtype)
    for name, (b, len_q, len_kv, h, h_kv, d), causal, dtype in (
        ("len 17", (64, 17, 17, 16, 16, 64), False, "bf16"),
        ("len 128", (64, 128, 128, 16, 16, 64), True, "bf16"),
        ("len 512", (32, 512, 512, 16, 16, 128), True, "bf16"),
        ("len 1000", (16, 1000, 1000, 16, 16, 128), False, "bf16"),
        ("len 1000, causal", (16, 1000, 1000, 16, 16, 128), True, "bf16"),
        ("len 4095, causal", (4, 4095, 4095, 16, 16, 128), True, "bf16"),
        ("1000 queries, 3000 keys", (8, 1000, 3000, 16, 16, 128), False, "bf16"),
        ("4096 queries, 77 keys", (8, 4096, 77, 16, 16, 64), False, "bf16"),
        ("one sequence, 2 heads", (1, 4096, 4096, 2, 2, 128), True, "bf16"),
        ("32 heads to 8", (4, 4096, 4096, 32, 8, 128), True, "bf16"),
        ("32 heads to 1", (4, 4096, 4096, 32, 1, 128), True, "bf16"),
        ("d = 32", (4, 4096, 4096, 32, 32, 32), False, "bf16"),
        ("d = 40", (4, 4096, 4096, 32, 32, 40), False, "bf16"),
        ("d = 72", (4, 4096, 4096, 16, 16, 72), False, "bf16"),
        ("d = 80", (4, 4096, 4096, 16, 16, 80), False, "bf16"),
        ("d = 96", (4, 4096, 4096, 16, 16, 96), False, "bf16"),
        ("d = 160", (4, 4096, 4096, 8, 8, 160), False, "bf16"),
        ("d = 192", (4, 4096, 4096, 8, 8, 192), False, "bf16"),
        ("d = 192, causal", (4, 4096, 4096, 8, 8, 192), True, "bf16"),
        ("d = 128, fp16", (4, 4096, 4096, 16, 16, 128), True, "fp16"),
        ("d = 36", (4, 2048, 2048, 16, 16, 36), False, "bf16"),
        ("d = 64, fp32: generic", (4, 2048, 2048, 16, 16, 64), False, "fp32"),
        ("d = 128, fp32: generic", (4, 2048, 2048, 16, 16, 128), True, "fp32"),
    )
}

# bench_quantize.py
BENCH_QUANTIZE = [
    Case(n, n, b=b, h=h, h_kv=h_kv, d=d, dtype="bf16")
    for b, n, h, h_kv, d in (
        (2, 8192, 16, 16, 128),
        (2, 8192, 32, 8, 128),
        (16, 1024, 16, 16, 128),
        (2, 8192, 32, 32, 64),
        (2, 8192, 8, 8, 256),
        (2, 8192, 12, 12, 192),
    )
]
