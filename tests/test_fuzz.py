"""Random problems (hypothesis) on every kernel. A failure prints one line that replays the failure:

python tests/test_fuzz.py "Case(len_q=65, len_kv=1, causal=True)"
"""

import sys

import flash_attn_2_cuda
import fuzz
import pytest
import torch
from harness import ISAS, verify
from harness_fuzz import EXAMPLES, SETTINGS, alibi, dtype, head_dim, length, problems, softcap, window
from harness_kvcache import Cache
from harness_kvcache import run as run_cache
from harness_varlen import Parts
from harness_varlen import run as run_parts
from hypothesis import given, note
from hypothesis import strategies as st


@st.composite
def caches(draw):
    len_q, len_new, capacity = draw(st.integers(0, 20)), draw(st.integers(0, 9)), draw(st.integers(0, 150))
    capacity = max(capacity, len_new)
    b, h_kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seqlens = tuple(draw(st.integers(0, capacity - len_new)) for _ in range(b))
    d = draw(head_dim)
    return Cache(
        len_q=len_q,
        seqlens=draw(st.sampled_from((seqlens, seqlens[0]))),
        capacity=capacity,
        len_new=len_new,
        h_kv=h_kv,
        h=h_kv * draw(st.integers(1, 4)),
        d=d,
        dtype=draw(dtype),
        page=draw(st.sampled_from((0, 0, 1, 3, 16, 256))),
        rotary=draw(st.sampled_from((0.0, 0.5, 1.0))) if d >= 32 and len_new else 0.0,
        interleaved=draw(st.booleans()),
        leftpad=draw(st.booleans()),
        batch_idx=draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(window),
        softcap=draw(softcap),
        alibi=draw(alibi),
        num_splits=draw(st.sampled_from((0, 1, 3))),
        b=b,
    )


@st.composite
def parts(draw):
    """Keys [pad, used) of each sequence, packed or in pages."""
    b, h_kv = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    len_kv = tuple(draw(length) for _ in range(b))
    used = tuple(draw(st.integers(0, n)) for n in len_kv)
    return Parts(
        len_q=tuple(draw(st.integers(0, 40)) for _ in range(b)),
        len_kv=len_kv,
        used=used,
        pad=tuple(draw(st.integers(0, n)) for n in used),
        page=draw(st.sampled_from((0, 1, 3, 16, 256))),
        h=h_kv * draw(st.integers(1, 4)),
        h_kv=h_kv,
        d=draw(head_dim),
        dtype=draw(dtype),
        causal=draw(st.booleans()),
        window=draw(window),
        softcap=draw(softcap),
    )


def replay(case):
    """Runs one case on every instruction set."""
    for isa in ISAS:
        flash_attn_2_cuda.set_cpu_isa(isa)
        try:
            if isinstance(case, Cache):
                run_cache(case)
            elif isinstance(case, Parts):
                run_parts(case)
            else:
                verify(case, backward=True)
        except Exception as error:
            note(f'replay: python tests/test_fuzz.py "{case}"   # {isa}: {error}')
            raise
        finally:
            flash_attn_2_cuda.set_cpu_isa(None)


@pytest.mark.parametrize("part", range(8))
def test_small_problems(part):
    """Infinities that rows see, sizes of zero, and memory of NaN (fuzz.py)."""
    num = (EXAMPLES or 1600) // 8
    assert fuzz.run_range(fuzz.run_on_cpu, part * num, (part + 1) * num, bytearray(8)), "the cases that are printed"


def test_small_problem_of_nothing_but_rounding():
    """Each row sees one key. dk is 0 except for the rounding of out, and AVX512-BF16 rounds ties the other way."""
    fuzz.run_on_cpu(63437, ISAS)


def test_small_problem_tells_outs_apart_that_differ_by_a_rounding():
    call = fuzz.Call(fuzz.draw(63437))
    want = fuzz.reference(call)
    other = {"out": want["out"] * (1 + 2.0**-7), "lse": want["lse"]}
    with pytest.raises(AssertionError, match="softmax_d|dq|dk"):
        fuzz.check(call.p, call, call.run(saved=other), want)


@SETTINGS
@given(problems())
def test_attention(case):
    replay(case)


@SETTINGS
@given(caches())
def test_kvcache(case):
    replay(case)


@SETTINGS
@given(parts())
def test_parts_of_packed_sequences(case):
    replay(case)


if __name__ == "__main__":
    torch.set_num_threads(2)
    for text in sys.argv[1:]:
        replay(eval(text))
        print("passed:", text)
