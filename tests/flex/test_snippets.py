"""Mods written in C: against a C compiler, against Python mods, in flex_attention, and their errors."""

import ctypes
import random
import re
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_flex import evaluated, vmapped

from flash_attn.flex import tracer
from flash_attn.flex_attention import c_mod, create_block_mask, create_mask, flex_attention

SHAPE = (2, 3, 9, 11)
COMPILER = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


# ---- against a C compiler -------------------------------------------------------------------------------------------

BINARY = "+ - * & | ^ && || == != < <= > >=".split()
LEAVES = ["q_idx", "kv_idx", "b", "h", "number", "true", "7", "0x1F", "3L", "table[h][kv_idx]", "flags[q_idx]"]
REFUSED = re.compile("binds stronger|0 or 1 of the comparison|~ takes")


def random_text(rng, depth):
    """Operators and operands in a row, with few parentheses. What belongs together is C's question."""
    if depth == 0:
        return rng.choice(LEAVES)

    def sub():
        return random_text(rng, depth - 1)

    kind = rng.randrange(12)
    if kind < 6:
        return f"{sub()} {rng.choice(BINARY)} {sub()}"
    if kind == 6:
        return f"{sub()} {rng.choice('/%')} (({sub()}) | 1)"
    if kind == 7:
        return f"({sub()} {rng.choice(['<<', '>>'])} (({sub()}) & 7))"
    if kind == 8:
        return f"{rng.choice(['-', '+', '!', '~', '(bool)', '(int)'])} {sub()}"
    if kind == 9:
        return f"{sub()} ? {sub()} : {sub()}"
    return f"({sub()})"


PROGRAM = """
#include <stdbool.h>
#define int long long
#define FUNCTION(N, TEXT)                                                                                   \\
    void f##N(long long *out, const long long (*table)[11], const bool *flags, long long number) {          \\
        for (long long b = 0; b < 2; b++)                                                                   \\
            for (long long h = 0; h < 3; h++)                                                               \\
                for (long long q_idx = 0; q_idx < 9; q_idx++)                                               \\
                    for (long long kv_idx = 0; kv_idx < 11; kv_idx++) *out++ = (TEXT);                      \\
    }
"""


@pytest.mark.skipif(COMPILER is None, reason="a C compiler is the oracle")
def test_integers_are_those_of_c(tmp_path):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    table, flags = torch.randint(-9, 9, (3, 11), generator=generator), torch.rand(9, generator=generator) < 0.5
    texts, mods = [], []
    while len(texts) < 300:
        text = random_text(rng, rng.randint(1, 4))
        given = {"table": table, "flags": flags, "number": -5}
        try:
            for form in ("{} ? 0 : 1", "score * 0 + (({}) % 1000)"):
                mods.append(c_mod(form.format(text), **{name: x for name, x in given.items() if name in text}))
        except ValueError as error:
            assert REFUSED.search(str(error)), error
            del mods[2 * len(texts) :]
            continue
        texts.append(text)
    rows = [f"FUNCTION({2 * i}, {x} ? 0 : 1) FUNCTION({2 * i + 1}, ({x}) % 1000)" for i, x in enumerate(texts)]
    (tmp_path / "f.c").write_text(PROGRAM + "\n".join(rows))
    library = tmp_path / "f.so"
    subprocess.run([COMPILER, "-w", "-O0", "-fwrapv", "-shared", "-fPIC", tmp_path / "f.c", "-o", library], check=True)
    loaded, zeros = ctypes.CDLL(str(library)), torch.zeros(SHAPE)
    places = [ctypes.c_void_p(x.data_ptr()) for x in (table, flags)]
    for i, mod in enumerate(mods):
        want = torch.empty(SHAPE, dtype=torch.int64)
        getattr(loaded, f"f{i}")(ctypes.c_void_p(want.data_ptr()), *places, ctypes.c_longlong(-5))
        got = evaluated(mod, SHAPE, zeros if i % 2 else None)
        assert torch.equal(got.long(), want if i % 2 else want.bool().long()), texts[i // 2]


# ---- against Python mods --------------------------------------------------------------------------------------------

SLOPES, BIAS, CAP = torch.tensor([0.5, -0.25, 3.0]), torch.randn(3, 11), torch.tensor(2.5)
HALF = torch.randn(3).to(torch.bfloat16)
SCORES = [
    ("score + slope[h] * (kv_idx - q_idx)", {"slope": SLOPES}, lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    ("cap * tanhf(score / cap)", {"cap": CAP}, lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)),
    ("cap * tanh(score / cap)", {"cap": 2.5}, lambda s, b, h, q, k: 2.5 * torch.tanh(s / 2.5)),
    ("q_idx >= kv_idx ? score : -INFINITY", {}, lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    ("score * half[h] + bias[h][kv_idx]", {"half": HALF, "bias": BIAS}, lambda s, b, h, q, k: s * HALF[h] + BIAS[h, k]),
    ("score + q_idx / 2 + q_idx / 2.0f", {}, lambda s, b, h, q, k: s + q // 2 + q / 2),
    ("score + (float)(q_idx - kv_idx) / 3", {}, lambda s, b, h, q, k: s + (q - k) / 3),
    ("score + fmod(-1.5 * q_idx, 1)", {}, lambda s, b, h, q, k: s + torch.fmod(-1.5 * q, 1)),
    ("fmax(score, bias[h][kv_idx])", {"bias": BIAS}, lambda s, b, h, q, k: torch.maximum(s, BIAS[h, k])),
    ("min(score, 0.25) + max(q_idx, 3)", {}, lambda s, b, h, q, k: s.clamp(max=0.25) + q.clamp(min=3)),
    ("clamp(score, -1, n)", {"n": 0.5}, lambda s, b, h, q, k: s.clamp(-1, 0.5)),
    ("score + (double)0.1 * (double)q_idx", {}, lambda s, b, h, q, k: s + 0.1 * q.double()),
    ("pow(score, 2) + powf(2, -h)", {}, lambda s, b, h, q, k: s * s + torch.exp2(-h.float())),
    ("score + exp(n)", {"n": 1.5}, lambda s, b, h, q, k: s + torch.exp(torch.tensor(1.5))),
    ("score + (int)score + abs(-q_idx) + fabs(score)", {}, lambda s, b, h, q, k: s + s.trunc() + q + s.abs()),
    ("score + n / 2 + n % 3", {"n": -7}, lambda s, b, h, q, k: s - 3 - 1),
    ("score + 7 / 2 * 1.0 + fmin(1, 2) / 4", {}, lambda s, b, h, q, k: s + 3 + 0.25),
    ("flag ? score : 0", {"flag": True}, lambda s, b, h, q, k: s),
    ("score + (q_idx > 3) + (kv_idx > 3)", {}, lambda s, b, h, q, k: s + (q > 3).int() + (k > 3).int()),
    ("isinf(score / 0) ? 1 : sigmoid(score)", {}, lambda s, b, h, q, k: torch.ones_like(s)),
    ("/* a\n comment */ return score // half\n * .5;", {}, lambda s, b, h, q, k: s * 0.5),
    ("score + b * M_PI - (1 / 0.0 > 3 ? 1e-1 : NAN)", {}, lambda s, b, h, q, k: s + b * torch.pi - 0.1),
]


@pytest.mark.parametrize("text, captures, mod", SCORES, ids=[row[0] for row in SCORES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_score_mods(text, captures, mod, dtype):
    scores = torch.randn(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(1))
    want = evaluated(mod, SHAPE, scores)
    torch.testing.assert_close(evaluated(c_mod(text, **captures), SHAPE, scores), want, rtol=3e-7, atol=3e-7)


def test_torch_itself_computes_the_same():
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    mask = c_mod("document[q_idx] == document[kv_idx] && q_idx >= kv_idx && !(kv_idx % 3 == n)", document=document, n=1)
    want = create_mask(lambda b, h, q, k: (document[q] == document[k]) & (q >= k) & (k % 3 != 1), *SHAPE, "cpu")
    assert torch.equal(vmapped(mask, SHAPE), want)
    assert torch.equal(create_mask(mask, *SHAPE, "cpu"), want)


def test_attention_and_gradients():
    slope = torch.rand(4, requires_grad=True)
    query, key, value = torch.randn(3, 2, 4, 40, 16).requires_grad_()
    mask = create_block_mask(c_mod("q_idx >= kv_idx && q_idx - kv_idx < width", width=9), None, None, 40, 40, "cpu")
    plain = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 9), None, None, 40, 40, "cpu")
    out = flex_attention(query, key, value, c_mod("score + slope[h] * (kv_idx - q_idx)", slope=slope), mask)
    want = flex_attention(query, key, value, lambda s, b, h, i, j: s + slope[h] * (j - i), plain)
    assert torch.equal(mask.kv_num_blocks, plain.kv_num_blocks) and torch.equal(out, want)
    for got, expected in zip(*(torch.autograd.grad(x.sum(), (query, slope)) for x in (out, want))):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_graph(dynamic):
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 1, 2, 33, 16)
    table = torch.randn(2, 66)
    score = c_mod("score + table[h][q_idx - kv_idx + n] / 2 + q_idx / 4", table=table, n=33)
    mask = c_mod("kv_idx % 5 != 3 || q_idx == kv_idx")

    def function(query, key, value):
        return flex_attention(query, key, value, score, mask_mod=mask)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(query, key, value), function(query, key, value))


def test_a_snippet_is_read_and_traced_once():
    mods = [c_mod("q_idx - kv_idx < width && table[h] > 0", width=i, table=torch.ones(i)) for i in range(1, 4)]
    assert len({mod.__code__ for mod in mods}) == 1
    before = tracer.num_traces
    assert [int(create_mask(mod, 1, 1, 1, 5, "cpu").sum()) for mod in mods] == [5, 5, 5]
    assert tracer.num_traces <= before + 1
    both = c_mod("q_idx > kv_idx / n", n=2), c_mod("q_idx > kv_idx / n", n=2.0)
    assert [int(create_mask(mod, 1, 1, 1, 5, "cpu").sum()) for mod in both] == [0, 0]
    assert [int(create_mask(mod, 1, 1, 2, 5, "cpu").sum()) for mod in both] == [2, 2]


# ---- errors ---------------------------------------------------------------------------------------------------------

T = {"t": torch.zeros(3, 4)}
ERRORS = [
    ("score + slope[g]", {"slope": SLOPES}, "column 15: there is no g: write one of score, b, h, q_idx, kv_idx, slope"),
    ("i >= kv_idx", {}, "column 1: there is no i: write q_idx"),
    ("q_idx = kv_idx", {}, "column 7: an operator or the end must follow, not =: write =="),
    ("q_idx ** 2 > 3", {}, r"column 7: .* \*\*: write pow\(x, y\)"),
    ("q_idx and kv_idx", {}, "column 7: .* and: write &&"),
    ("q_idx += 1", {}, r"column 7: .* \+=: write x \+ y"),
    ("q_idx > 1; b", {}, "column 12: the end must follow, not b: a snippet is one expression, without statements"),
    ("0 <= q_idx < 3", {}, "column 12: C compares the 0 or 1 .* write x <= y && y < z"),
    ("q_idx & 3 == 1", {}, "column 7: in C == binds stronger than &: write parentheses"),
    ("~(q_idx > 3)", {}, "column 1: ~ takes an integer, not a comparison: write !"),
    ("score % 2", {}, r"column 7: % takes integers, .* write fmod\(x, y\)"),
    ("score | 2", {}, r"column 7: \| takes integers, .* \(int\)x"),
    ("q_idx > 010", {}, "column 9: 010 is an octal number in C: write 10"),
    ("q_idx > 3u", {}, "column 9: 3u is no number here, .* write 3"),
    ("q_idx > 3f", {}, r"column 9: 3f is no number here, .* write 3\."),
    ("score * 1.5x", {}, r"column 9: 1.5x is no number: write 1.5"),
    ("score * 99999999999999999999", {}, "column 9: .* does not fit 64 bits"),
    ("t[h, q_idx] > 0", T, r"column 4: C has one index in each bracket: write t\[..\]\[..\]"),
    ("t[h] > 0", T, r"column 1: t has 2 dimensions and 1 indices: write t\[..\]\[..\]"),
    ("t[h][b][0] > 0", T, "column 8: t is a tensor of 2 dimensions, and this is index 3"),
    ("t[h][1.5] > 0", T, r"column 6: an index of t is a float: write \(int\)x"),
    ("n[h] > 0", {"n": 3}, "column 2: n is a number"),
    ("score[h] > 0", {}, "column 6: score is one number"),
    ("where(q_idx > 1, 2, 3)", {}, r"column 1: there is no function where: write condition \? x : y"),
    ("score + round(score)", {}, r"column 9: .* write rint\(x\)"),
    ("fmod(score)", {}, "column 1: fmod takes 2 arguments, not 1"),
    ("score + tanh", {}, r"column 9: tanh is a function: write tanh\(..\)"),
    ("q_idx ? 1", {}, "column 10: : must follow the second part"),
    ("(q_idx > 1", {}, r"column 11: \) must follow .*, not the end"),
    ("(q_idx, 1)", {}, "column 7: a snippet has no comma operator"),
    ("q_idx > @", {}, "column 9: '@' is no part"),
    ("", {}, "column 1: an operand must stand here, not the end"),
    ("q_idx >\n  * 2", {}, "line 2, column 3: an operand must stand here"),
    ("score > 1", {}, r"a comparison is a mask_mod, which has no score: write condition \? score : -INFINITY"),
    ("slope[h] * q_idx", {"slope": SLOPES}, r"the result is a float without score: write score \+ .."),
    ("q_idx > 1", {"n": 3}, "n is passed, and the snippet does not use it"),
    ("q_idx > tanh", {"tanh": 3}, "tanh is no name for a capture"),
    ("q_idx > lambda", {"lambda": 3}, "lambda is no name for a capture"),
]


@pytest.mark.parametrize("text, captures, message", ERRORS, ids=[row[0] for row in ERRORS])
def test_errors_have_a_column_and_a_replacement(text, captures, message):
    with pytest.raises(ValueError, match=message):
        c_mod(text, **captures)


def test_errors_of_captures():
    with pytest.raises(TypeError, match="n must be a tensor, an int, a float or a bool; it is a list"):
        c_mod("q_idx > n", n=[3])
    with pytest.raises(TypeError, match="n must be bool, an integer, fp16, bf16, fp32 or fp64; it is torch.complex64"):
        c_mod("q_idx > n", n=torch.zeros((), dtype=torch.complex64))
    with pytest.raises(TypeError, match="the snippet must be a string; it is a function"):
        c_mod(lambda: 3)


PIECES = ["q_idx", "score", "t[h]", "(", ")", "[", "]", "?", ":", "1", "2.5f", "-", "+", "!", "~", "<", "==", "&&", "%"]
PIECES += ["tanh(", ",", "min(", "(int)", "/", "<<", "&", ";", "return ", "\n", "//", "é", "0x", "'", "#", "e5", "."]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_any_text_is_a_mod_or_has_an_error_with_a_column(pieces):
    text = " ".join(pieces)
    captures = {"t": SLOPES} if "t[" in text else {}
    try:
        mod = c_mod(text, **captures)
    except ValueError as error:
        assert "column" in str(error) or "does not use it" in str(error)
        return
    evaluated(mod, SHAPE, torch.zeros(SHAPE) if "score" in text else None)
