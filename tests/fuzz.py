"""Small random problems by the thousand, each made from one number. Every form of call is compared with
cpu/reference.c.

    python tests/fuzz.py 0 100000         cases 0 .. 99999 on the CPU, each on a random instruction set
    python tests/fuzz.py --cuda 0 10000   on a GPU, on the kernels that the plan chooses
    ... --seconds 100                     stops after 100 seconds and prints the number of cases
    python tests/fuzz.py 4711             case 4711 again, on every instruction set

Any size may be zero. Values include infinities and NaN that rows see, scores that overflow, and values whose sums fp32
can just represent. Outputs lie in memory of NaN between guards that must not change, and inputs lie between NaN.
Results are compared with the reference in the same dtype, including NaN and infinities. Every fourth reference is
compared with the definition (oracle.py). A backward gets the reference's out and lse. Where dS cancels, only the
rounding of out is left. A value halfway between two numbers may then be rounded up or down.

A range runs in fresh processes. A crash counts as a wrong case.
"""

import math
import mmap
import os
import random
import struct
import sys
import time
import traceback
from dataclasses import dataclass, fields

import flash_attn_2_cuda
import torch
from compare import DTYPES, ROUNDING
from harness import ISAS, NAN, offsets
from oracle import by_pairs, dropout_keep

GUARD = 7.0
FORMS = ("dense", "dense", "packed", "packed", "cache", "cache", "parts")
VALUES = ("normal", "normal", "normal", "equal", "wide", "huge v", "scores", "scores", "inf", "nan")
CPU_DTYPES = ("fp32", "bf16", "bf16", "fp16")
CPU_DIMS = (1, 3, 8, 16, 17, 24, 32, 33, 40, 64, 65, 72, 96, 128, 130)
# Each kind needs kernels of its own to compile.
CUDA_KINDS = [("bf16", d) for d in (24, 64, 64, 64, 128, 128)] + [
    ("fp16", 64),
    ("fp16", 17),
    ("fp32", 17),
    ("fp32", 64),
]


@dataclass(frozen=True)
class Problem:
    form: (
        str  # dense, packed, cache: with everything that flash_attn_with_kvcache takes, parts: of packed keys, or pages
    )
    dtype: str
    values: str
    len_q: tuple
    len_kv: tuple  # cache and parts: without seqused and padding
    h: int
    h_kv: int
    d: int
    scale: float
    causal: bool
    window: tuple
    softcap: float
    alibi: str
    dropout: float
    pad: int  # number of elements between rows
    page: int = 0
    len_new: int = 0
    used: tuple = ()
    leftpad: tuple = ()
    batch_idx: tuple = ()
    rotary: int = 0
    spare_columns: int = 0  # spare columns of the block table
    num_splits: int = 0
    deterministic: bool = False
    seed: int = 0

    def __repr__(self):
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


def draw(seed, on_cuda=False):
    r = random.Random(seed)
    form = r.choice(FORMS)
    b = r.choice((0, 1, 1, 2, 2, 3))
    longest = r.choice((3, 20, 20, 70, 70, 140, 300)) if not on_cuda else r.choice((3, 70, 140, 300, 600))

    def length(most=longest):
        return r.choice((0, 1, r.randint(0, most), r.randint(0, most), r.randint(0, most)))

    def lengths(most=longest):
        return tuple(length(most) for _ in range(b))

    h_kv = r.choice((1, 1, 2, 3))
    dtype, d = r.choice(CUDA_KINDS) if on_cuda else (r.choice(CPU_DTYPES), r.choice(CPU_DIMS))
    len_q = lengths(r.choice((1, 4, longest)))
    len_kv = len_q if form in ("dense", "packed") and r.random() < 0.3 else lengths()
    used = leftpad = batch_idx = ()
    page = len_new = rotary = 0
    if form in ("dense", "cache"):
        len_q, len_kv = ((x[0],) * b if b else () for x in (len_q, len_kv))
    if form in ("cache", "parts"):
        page = r.choice((0, 0, 1, 3, 16, 64))
        leftpad = b and r.random() < 0.3
    if form == "cache":
        most = len_kv[0] if b else 5
        len_new = r.choice((0, 0, 1, min(4, most)))
        len_new = min(len_new, most)
        used = tuple(r.randint(0, most - len_new) for _ in range(b))
        batch_idx = tuple(r.sample(range(b + 2), b)) if r.random() < 0.3 else ()
        rotary = r.choice((0, 16, d // 16 * 16)) if len_new and d >= 16 else 0
    if form == "parts":
        used = tuple(r.randint(0, n) for n in len_kv)
    leftpad = tuple(r.randint(0, n) for n in used) if leftpad else ()
    h = h_kv * r.choice((0, 1, 1, 2, 4, 4)) if r.random() < 0.1 else h_kv * r.choice((1, 1, 2, 4))
    if on_cuda:  # q must have a head on a GPU; the CPU's part takes time
        h = max(h, h_kv)
        while len_q and sum(map(math.prod, zip(len_q, len_kv))) * h * d > 1e7:
            len_q = tuple(n // 2 for n in len_q)
    values = r.choice(VALUES)
    moderate = values in ("inf", "scores")  # P that underflows times infinity is NaN in fp32 only
    window = (r.choice((-1, -1, 0, r.randint(0, 90))), r.choice((-1, -1, 0, r.randint(0, 90))))
    return Problem(
        form=form,
        dtype=dtype,
        values=values,
        len_q=len_q,
        len_kv=len_kv,
        h=h,
        h_kv=h_kv,
        d=d,
        scale=d**-0.5 if moderate else r.choice((d**-0.5, d**-0.5, 0.2, -0.1, 0.0)),
        causal=r.random() < 0.4,
        window=window if r.random() < 0.6 else (-1, -1),
        softcap=r.choice((0.0, 0.0, 0.0, 4.0)),
        alibi="" if moderate else r.choice(("", "", "h", "bh")),
        dropout=0.0 if form == "cache" or on_cuda else r.choice((0.0, 0.0, 0.17, 0.6)),
        pad=r.choice((0, 0, 8)) if on_cuda else r.choice((0, 0, 3)),
        page=page,
        len_new=len_new,
        used=used,
        leftpad=leftpad,
        batch_idx=batch_idx,
        rotary=rotary,
        spare_columns=r.choice((0, 0, 2)),
        num_splits=r.choice((0, 0, 1, 3)) if form == "cache" else 0,
        deterministic=r.random() < 0.3,
        seed=seed,
    )


# ---- tensors ---------------------------------------------------------------------------------------------------------


class Guarded:
    """A tensor [.., h, d] whose rows lie `pad` elements apart, in memory of `fill` between guards of 64 elements."""

    def __init__(self, shape, dtype, pad, outside, device):
        *lead, h, d = shape
        strides = [d, 1]
        step = h * d + pad
        for n in reversed(lead):
            strides.insert(0, step)
            step *= max(n, 1)
        size = step if lead else h * d
        self.memory = torch.full((size + 128,), outside, dtype=dtype, device=device)
        self.view = self.memory.as_strided(shape, strides, 64)

    def is_intact(self):
        """Destroys the tensor."""
        self.view.fill_(GUARD)
        return bool((self.memory == GUARD).all())


def fill_scores(p, q, k, r):
    """Plants scores of -inf at some keys and of +inf in some rows. One column of k is too large to multiply by 4, or is
    0."""
    column, huge = r.randrange(p.d), math.inf if p.dtype == "fp16" else 0.99 * torch.finfo(DTYPES[p.dtype]).max
    tile, kind = r.choice((1, 16, 64, 128)), r.randrange(5)
    for x, y in zip(q, k):
        x[..., column] = 4
        if r.random() < 0.2:
            x[::7, :, column] = -4
        n = len(y)
        at, edge = torch.arange(n), r.randint(0, n)
        chosen = (at >= 0, at < edge, at >= edge, at // tile % 2 == 0, torch.rand(n) < 0.5)[kind]
        y[..., column] = torch.where(chosen, -huge, 0.0)[:, None].to(y.dtype)


def fill(p, q, k, v, dout):
    """Fills the sequences. The arguments are lists of [rows, h, d], which are views of the call's tensors."""
    r = random.Random(p.seed + 1)
    for x in (*q, *k, *v, *dout):
        x.normal_()
    if p.values == "equal":
        for x in k:
            x.copy_(x[:1].clone().expand_as(x)) if len(x) else None
    elif p.values == "wide":
        for x in q:
            x.mul_(8)
    elif p.values == "huge v":
        for x in v:
            x.mul_(2.0**8 if p.dtype == "fp16" else 2.0**100)
    elif p.values == "scores":
        fill_scores(p, q, k, r)
    elif p.values in ("inf", "nan"):
        for x in r.choices((q, k, v, v, dout), k=2):
            for y in x:
                if y.numel():
                    bad = r.choice((math.inf, -math.inf)) if p.values == "inf" else NAN
                    y[r.randrange(len(y)), r.randrange(y.shape[1]), r.randrange(p.d)] = bad


def int32(x, device):
    return torch.tensor(x, dtype=torch.int32, device=device) if x else torch.empty(0, dtype=torch.int32, device=device)


def pages_of(p, rows, r):
    """A table [sequences or cache entries, columns] and the number of pages. Entries that no sequence needs are -1."""
    need = [-(-n // p.page) for n in rows]
    columns = max(need, default=0) + p.spare_columns
    num = sum(need) + r.choice((0, 2))
    order = list(range(num))
    r.shuffle(order)
    table = torch.full((len(rows), columns), -1, dtype=torch.int32)
    for n, count in enumerate(need):
        for column in range(count):
            table[n, column] = order.pop()
    return table, num


class Call:
    """Inputs on the CPU, and functions that run the call on any device."""

    def __init__(self, p):
        self.p, dtype, b = p, DTYPES[p.dtype], len(p.len_q)
        r = random.Random(p.seed + 2)
        torch.manual_seed(p.seed)
        packed = p.form in ("packed", "parts")
        self.inputs = {}
        self.slopes = torch.rand((b, p.h) if p.alibi == "bh" else (p.h,)) * 0.3 if p.alibi else None
        self.table = self.cos = self.sin = None
        shape_q = (sum(p.len_q) + 2, p.h, p.d) if packed else (b, p.len_q[0] if b else 4, p.h, p.d)
        capacity = p.len_kv[0] if b else 5
        entries = b + 2 if p.batch_idx else b
        if p.page:
            rows = p.len_kv if packed else [0] * entries
            for n in range(0 if packed else b):
                rows[p.batch_idx[n] if p.batch_idx else n] = p.used[n] + p.len_new
            self.table, num_pages = pages_of(p, rows, r)
            if p.form == "cache" and p.len_new > self.table.shape[1] * p.page:  # an empty batch also has a table
                self.table = torch.full((entries, -(-p.len_new // p.page)), -1, dtype=torch.int32)
            capacity = self.table.shape[1] * p.page
            shape_kv = (num_pages, p.page, p.h_kv, p.d)
        elif packed:
            shape_kv = (sum(p.len_kv) + 2, p.h_kv, p.d)
        else:
            shape_kv = (entries, capacity, p.h_kv, p.d)
        for name, shape in (("q", shape_q), ("k", shape_kv), ("v", shape_kv), ("dout", shape_q)):
            self.inputs[name] = Guarded(shape, dtype, p.pad, NAN, "cpu")
            self.inputs[name].view.fill_(NAN)
        for name in ("k_new", "v_new"):
            if p.form == "cache" and p.len_new:
                self.inputs[name] = Guarded((b, p.len_new, p.h_kv, p.d), dtype, p.pad, NAN, "cpu")
        if p.rotary:
            angle = torch.rand(max(capacity, 1), p.rotary // 2) * 6
            self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

        view = {name: x.view for name, x in self.inputs.items()}
        q, dout = ([*x[: sum(p.len_q)].split(list(p.len_q))] if packed and b else [] if packed else [*x]
                   for x in (view["q"], view["dout"]))  # fmt: skip
        keys = {name: [self.keys(view[name], n) for n in range(b)] for name in ("k", "v")}
        values = {name: [x.clone() for x in parts] for name, parts in keys.items()}
        fill(p, q, values["k"], values["v"], dout)
        for name in ("k", "v"):
            for n in range(b):
                self.keys(view[name], n, values[name][n])
        for name in ("k_new", "v_new"):
            if name in view:
                view[name].normal_()

    def keys(self, x, n, values=None):
        """k or v of sequence n before an append, [keys, h_kv, d]. `values`, if given, are written there."""
        p = self.p
        length = p.used[n] if p.used else p.len_kv[n]
        first = min(p.leftpad[n], length) if p.leftpad else 0
        if not p.page:
            if p.form in ("packed", "parts"):
                rows = x[sum(p.len_kv[:n]) :]
            else:
                rows = x[p.batch_idx[n] if p.batch_idx else n]
            if values is not None:
                rows[first:length] = values
            return rows[first:length]
        at = torch.arange(first, length)
        pages = self.table[p.batch_idx[n] if p.batch_idx else n][at // p.page].long()
        if values is not None:
            x[pages, at % p.page] = values
        return x[pages, at % p.page]

    def run(self, device="cpu", backward=True, saved=None):
        """{name: tensor on the CPU} of all results and written tensors. Raises if the call wrote to other memory.

        saved: results of another run. The backward then gets their out and lse instead of this run's.
        """
        p, dtype = self.p, DTYPES[self.p.dtype]
        x = {}
        for name, given in self.inputs.items():
            memory = given.memory.to(device, copy=True)
            x[name] = memory.as_strided(given.view.shape, given.view.stride(), 64)
        slopes, table, cos, sin = (
            t if t is None else t.to(device) for t in (self.slopes, self.table, self.cos, self.sin)
        )
        cu_q, cu_k = (offsets(lengths).to(device) for lengths in (p.len_q, p.len_kv))
        max_q, max_k = max(p.len_q, default=0), max(p.len_kv, default=0)
        used = int32(p.used, device) if p.form in ("cache", "parts") else None
        leftpad = int32(p.leftpad, device) if p.leftpad else None
        batch_idx = int32(p.batch_idx, device) if p.batch_idx else None
        right = 0 if p.causal else p.window[1]
        mask = (p.causal, p.window[0], right, p.softcap)
        out = Guarded(x["q"].shape, dtype, p.pad, GUARD, device)
        out.view.fill_(NAN)
        torch.manual_seed(p.seed)
        before = {name: x[name].clone() for name in x}
        lse_of = rng = None
        if p.form == "dense":
            o, lse, _, rng = flash_attn_2_cuda.fwd(
                x["q"], x["k"], x["v"], out.view, slopes, p.dropout, p.scale, *mask, False, None
            )
        elif p.form == "cache":
            o, lse = flash_attn_2_cuda.fwd_kvcache(
                x["q"], x["k"], x["v"], x.get("k_new"), x.get("v_new"), used, cos, sin, batch_idx, leftpad, table,
                slopes, out.view, p.scale, *mask, p.seed % 2 == 0, p.num_splits,
            )  # fmt: skip
        else:
            o, lse, _, rng = flash_attn_2_cuda.varlen_fwd(
                x["q"], x["k"], x["v"], out.view, cu_q, cu_k, used, leftpad, table, slopes, max_q, max_k, p.dropout,
                p.scale, False, *mask, False, None,
            )  # fmt: skip
            lse_of = sum(p.len_q)
        results = {"out": o[:lse_of], "lse": lse[:, :lse_of] if lse_of is not None else lse}
        guarded = {"out": out}
        for name in ("out", "lse") if saved and backward else ():
            forward, results[name] = results[name], results[name].clone()
            forward.copy_(saved[name])
        if p.form in ("dense", "packed") and backward:
            for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
                guarded[name] = Guarded(x[like].shape, dtype, p.pad, GUARD, device)
                guarded[name].view.fill_(NAN)
            grads = [guarded[name].view for name in ("dq", "dk", "dv")]
            saved = (x["dout"], x["q"], x["k"], x["v"], o, lse, *grads)
            options = (*mask, p.deterministic, None, rng)
            if p.form == "dense":
                d = flash_attn_2_cuda.bwd(*saved, slopes, p.dropout, p.scale, *options)[3]
                results["softmax_d"] = d[..., : x["q"].shape[1]]
            else:
                flash_attn_2_cuda.varlen_bwd(
                    *saved, cu_q, cu_k, slopes, max_q, max_k, p.dropout, p.scale, False, *options
                )
            for name, rows in (("dq", sum(p.len_q)), ("dk", sum(p.len_kv)), ("dv", sum(p.len_kv))):
                results[name] = guarded[name].view[: rows if p.form == "packed" else None]
        self.rng = rng
        writes = ("k", "v") if p.len_new else ()
        for name in x:
            if name in writes:
                results["cache " + name] = x[name]
            else:
                assert same_bits(x[name], before[name]), f"{name} was modified"
        results = {name: t.detach().cpu().clone() for name, t in results.items()}
        for name, t in guarded.items():
            if p.form == "packed" and name != "out" or p.form == "parts":  # rows that belong to no sequence
                rows = results[name].shape[0]
                if name != "out" or device == "cpu":
                    assert t.view[rows:].isnan().all(), f"{name}: a row that belongs to nobody was written"
            assert t.is_intact(), f"{name}: its guards were overwritten"
        return results


def same_bits(x, y):
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(bits), y.contiguous().view(bits))


# ---- comparison ------------------------------------------------------------------------------------------------------


def cancelled(p, call, name):
    """The size of the terms of out, dq, dk, dv, which may cancel to zero. Each weight is rounded on its own."""

    def size(name):
        x = call.inputs[name].view.double()
        x = x[x.isfinite() & (x.abs() < 1e37)]
        return x.abs().mean().item() if x.numel() else 0.0

    if name == "out":
        return size("v") / max(1, min((*p.len_kv, *p.used), default=1)) ** 0.5
    if name == "softmax_d":
        return p.d**0.5 * size("v") * size("dout") * 2
    if name not in ("dq", "dk"):
        return 0.0
    rows = sum(p.len_q) * p.h / p.h_kv / max(sum(p.len_kv), 1) if name == "dk" else 0
    return (
        max(1, rows**0.5 / 4)
        * abs(p.scale)
        * p.d**0.5
        / (1 - p.dropout)
        * size("v")
        * size("dout")
        * max(size("k"), size("q"))
        * 2
    )


def check(p, call, got, want, exact=True, roundings=4):
    """roundings: how many roundings of the largest value, or of the cancelled terms, are allowed. softmax_d is a sum in
    fp32."""
    for name, ref in want.items():
        x, dtype = got[name], ref.dtype
        assert x.shape == ref.shape and x.dtype == dtype, f"{name}: {tuple(x.shape)}, should be {tuple(ref.shape)}"
        if not ref.numel():
            continue
        if name.startswith("cache") and not (p.rotary and name == "cache k"):
            assert same_bits(x, ref), f"{name}: other bits"
            continue
        x, ref = x.double(), ref.double()
        finite = ref.isfinite()
        kinds = (x == ref) | (x.isnan() & ref.isnan())
        if not exact:
            kinds = kinds | ~finite
        wrong = ~(kinds | finite) | (finite & ~x.isfinite())
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of another kind, first at {at}: {x[at]}, should be {ref[at]}"
            )
        x, ref = x[finite], ref[finite]
        if not len(x):
            continue
        error, largest = (x - ref).abs(), ref.abs().max().item()
        if name == "lse":
            allowed = (1e-4 if p.dtype != "fp32" else 2e-5) * (1 + ref.abs())
        else:
            unit = 1e-5 if name == "softmax_d" else max(1e-4, roundings * ROUNDING[DTYPES[p.dtype]])
            allowed = torch.tensor(unit * (largest + cancelled(p, call, name) + 0.05))
        if not (error <= allowed).all():
            at = (error - allowed).argmax()
            raise AssertionError(f"{name}: {x[at]:.9g} should be {ref[at]:.9g}, of {largest:.3g}")


def check_reference(p, call, want):
    """Compares the reference itself with the definition, which is written in another language."""
    if p.form not in ("dense", "packed") or p.h == 0 or sum(map(math.prod, zip(p.len_q, p.len_kv))) * p.h * p.d > 4e5:
        return
    sequences = {}
    for name, x in call.inputs.items():
        lengths = p.len_q if name in ("q", "dout") else p.len_kv
        sequences[name] = x.view[: sum(lengths)].split(list(lengths)) if p.form == "packed" else list(x.view)
    results = []
    for n in range(len(p.len_q)):
        keep = None
        if p.dropout:
            keep = dropout_keep(int(call.rng[0]), 0, n, p.h, p.len_q[n], p.len_kv[n], p.dropout)
        slopes = call.slopes if call.slopes is None or p.alibi == "h" else call.slopes[n]
        one = [sequences[name][n] for name in ("q", "k", "v", "dout")]
        out = want["out"].split(list(p.len_q))[n] if p.form == "packed" else want["out"][n]
        results.append(by_pairs(*one, p.scale, p.causal, p.window, p.softcap, slopes, keep, p.dropout, saved=out))
    for name, parts in zip(("out", "lse", "dq", "dk", "dv"), zip(*results)):
        if p.form == "dense":
            exact = torch.stack(parts)
        else:
            exact = torch.cat(parts, dim=1 if name == "lse" else 0)
        check(p, call, want, {name: exact.to(want[name].dtype)})


def reference(call, backward=True):
    flash_attn_2_cuda.set_cpu_isa("reference")
    try:
        return call.run(backward=backward)
    finally:
        flash_attn_2_cuda.set_cpu_isa(None)


def run_on_cpu(seed, isas=None):
    p = draw(seed)
    call = Call(p)
    want = reference(call)
    if seed % 4 == 0:
        check_reference(p, call, want)
    fast = [isa for isa in ISAS if isa != "reference"]
    for isa in isas or (random.Random(seed + 3).choice(fast),):
        flash_attn_2_cuda.set_cpu_isa(isa)
        try:
            check(p, call, call.run(saved=want), want)
        except Exception as error:
            raise AssertionError(f"{isa}: {error}") from error
        finally:
            flash_attn_2_cuda.set_cpu_isa(None)


def run_on_cuda(seed):
    p = draw(seed, on_cuda=True)
    call = Call(p)
    generic = seed % 4 == 0
    flash_attn_2_cuda.set_cuda_kernels(("any", "any,sm80")[seed // 4 % 2] if generic else None)
    # Hopper's backward multiplies masked elements by zero, so NaN can reach the rest of a tile there.
    calm = p.values in ("normal", "equal", "wide")
    # P in 16 bits underflows early, and then its product with infinity is NaN.
    exact = p.values != "inf" or p.dtype != "fp16"
    backward = calm or (generic and exact)
    want = call.run("cpu", backward)  # fifty times as fast as the reference, but with rounding
    got = call.run("cuda", backward, want)
    try:
        check(p, call, got, want, exact, roundings=8)
    except AssertionError:
        want = reference(call, backward)
        check(p, call, call.run("cuda", backward, want), want, exact, roundings=8)


# ---- many ------------------------------------------------------------------------------------------------------------


stop_at = math.inf  # in units of time.monotonic()


def run_range(run, first, end, at):
    """Returns False if some cases were wrong. `at` is shared memory with the current case, which a parent reads after a
    crash."""
    good = True
    for seed in range(first, end):
        if time.monotonic() > stop_at:
            print(seed - first, "cases in time,", "none wrong" if good else "some wrong", flush=True)
            return good
        if run is run_on_cuda and seed % 50 == 0 and seed > first:
            print(seed - first, "cases", flush=True)
        at[:8] = struct.pack("q", seed)
        try:
            run(seed)
        except Exception as error:
            good = False
            print(f"case {seed}: {error or repr(error)}\n    {draw(seed, run is run_on_cuda)}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-2)
    if run is run_on_cuda:
        print(end - first, "cases,", "none wrong" if good else "some wrong", flush=True)
    return good


def run_apart(run, first, end):
    """Runs the range in a child process. Returns the number of wrong cases, in which a crash counts as one."""
    num_wrong, at = 0, mmap.mmap(-1, 16)
    while first < end:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if run_range(run, first, end, at) else 1)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            return num_wrong + os.WEXITSTATUS(status)
        first = struct.unpack("q", at[:8])[0] + 1
        num_wrong += 1
        print(f"case {first - 1}: signal {os.WTERMSIG(status)}\n    {draw(first - 1, run is run_on_cuda)}", flush=True)
    return num_wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.exit(__doc__)
    on_cuda = "--cuda" in arguments
    if "--seconds" in arguments:
        at = arguments.index("--seconds")
        stop_at = time.monotonic() + float(arguments[at + 1])
        del arguments[at : at + 2]
    numbers = [int(x) for x in arguments if x != "--cuda"]
    if len(numbers) == 1:
        print(draw(numbers[0], on_cuda))
        run_on_cuda(numbers[0]) if on_cuda else run_on_cpu(numbers[0], ISAS)
        print("passed")
        sys.exit()
    first, end = numbers
    wrong = 0
    if on_cuda:
        wrong = not run_range(run_on_cuda, first, end, bytearray(8))
    else:
        for chunk in range(first, end, 1000):
            if time.monotonic() > stop_at:
                break
            wrong += run_apart(run_on_cpu, chunk, min(chunk + 1000, end))
            print(f"{min(chunk + 1000, end) - first} cases, {wrong} chunks or crashes with wrong ones", flush=True)
    sys.exit(bool(wrong))
