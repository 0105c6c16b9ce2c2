"""Random attention problems for hypothesis. FUZZ=1000 draws a thousand of each."""

import os

from cases import HEAD_DIMS, TILE_EDGES, Case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# `make test` is the same every time. FUZZ=1000 tests more cases, and other cases. 100000 small problems take ten
# minutes: FUZZ=100000 pytest tests/test_fuzz.py -k small, or python tests/fuzz.py 0 100000.
EXAMPLES = int(os.environ.get("FUZZ", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DENSE_LAYOUTS = (
    "plain",
    "padded",
    "gaps",
    "odd_base",
    "heads_first",
    "rows_first",
    "interleaved",
    "same_batch",
    "same_head",
)
PACKED_LAYOUTS = ("plain", "padded", "gaps", "odd_base", "heads_first", "interleaved", "same_head")


length = st.one_of(st.sampled_from((0, *TILE_EDGES)), st.integers(0, 80), st.integers(0, 400))
bound = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 210))
alibi = st.sampled_from(("", "", "h", "bh"))
window = st.tuples(bound, bound)
head_dim = st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, 256))
dtype = st.sampled_from(("fp32", "bf16", "fp16"))
softcap = st.sampled_from((0.0, 0.0, 3.0, 30.0))


@st.composite
def problems(draw):
    h_kv = draw(st.integers(1, 3))
    common = {
        "h_kv": h_kv,
        "h": h_kv * draw(st.integers(1, 4)),
        "d": draw(head_dim),
        "dtype": draw(dtype),
        "scale": draw(st.sampled_from((None, None, 0.3, -0.1))),
        "causal": draw(st.booleans()),
        "window": draw(window),
        "softcap": draw(softcap),
        "alibi": draw(alibi),
        "dropout": draw(st.sampled_from((0.0, 0.0, 0.17, 0.6))),
        "values": draw(st.sampled_from(("normal", "normal", "equal", "zero", "wide", "sparse"))),
        "seed": draw(st.integers(0, 1000)),
    }
    if draw(st.booleans()):
        return Case(
            draw(length), draw(length), b=draw(st.integers(0, 3)), layout=draw(st.sampled_from(DENSE_LAYOUTS)), **common
        )
    lengths = draw(st.lists(st.tuples(length, length), max_size=5))
    return Case(
        tuple(q for q, _ in lengths),
        tuple(kv for _, kv in lengths),
        layout=draw(st.sampled_from(PACKED_LAYOUTS)),
        **common,
    )
