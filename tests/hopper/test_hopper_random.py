"""Random calls of flash_attn_func and flash_attn_varlen_func against the formula in fp64, sequence by sequence, with
gradients. Options are drawn together: widths, masks, packing, used lengths, softcap and descales."""

import random
from itertools import accumulate

import pytest
import torch
from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from oracle3 import INF, assert_close, attention
from tensors3 import DEVICES, E4M3

WIDTHS = [(192, 128), (168, 104), (64, 256), (64, 128), (40, 96), (64, 248), (192, 64), (64, 512)]
WIDTHS += [(x, x) for x in (16, 64, 80, 128, 192, 256)]


def draw_length(r, most):
    return r.choice([0, 1, 17, 64, 127, 128, 129, most]) if r.random() < 0.6 else r.randrange(most)


def draw_mask(r, most):
    mask = {"causal": r.random() < 0.5}
    if r.random() < 0.4:
        mask["window"] = (r.randrange(-1, most), r.randrange(-1, most))
    if r.random() < 0.4:
        mask["chunk"] = r.randrange(1, 2 * most)
    return mask


class Sequences:
    """The rows of each sequence in q and in k, packed or in a dense batch."""

    def __init__(self, r, most):
        self.is_packed = r.random() < 0.6
        n = r.randrange(1, 4)
        self.has_used = self.is_packed and r.random() < 0.5
        if self.is_packed:
            self.allocated = [[draw_length(r, most) for _ in range(n)] for _ in "qk"]
        else:
            self.allocated = [[max(1, draw_length(r, most))] * n, [draw_length(r, most)] * n]
        self.used = [[r.randrange(x + 1) if self.has_used else x for x in lengths] for lengths in self.allocated]

    def make(self, which, heads, d, dtype):
        lengths = self.allocated[which]
        shape = (sum(lengths), heads, d) if self.is_packed else (len(lengths), lengths[0], heads, d)
        return torch.randn(shape).to(dtype)

    def split(self, which, x):
        """The used rows of each sequence."""
        if not self.is_packed:
            return list(x)
        starts = accumulate(self.allocated[which], initial=0)
        return [x[start : start + used] for start, used in zip(starts, self.used[which])]

    def lengths(self, device):
        def tensor(x):
            return torch.tensor(x, dtype=torch.int32, device=device)

        cu = [tensor([0, *accumulate(lengths)]) for lengths in self.allocated]
        given = {"seqused_q": tensor(self.used[0]), "seqused_k": tensor(self.used[1])} if self.has_used else {}
        return [*cu, *map(max, self.allocated)], given


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_random_call(seed, device):
    r = random.Random(seed)
    torch.manual_seed(seed)
    most = 300 if device == "cpu" else 700
    d, d_v = r.choice(WIDTHS)
    dtype = r.choice([torch.bfloat16, torch.float16])
    is_fp8 = d == d_v and r.random() < 0.4
    h_kv = r.choice([1, 2])
    h = h_kv * r.choice([1, 3])
    mask, softcap, sequences = draw_mask(r, most), r.choice([0.0, 0.0, 0.0, 15.0]), Sequences(r, most)
    inputs = [sequences.make(which, *shape, dtype) for which, shape in enumerate([(h, d), (h_kv, d)])]
    inputs.append(sequences.make(1, h_kv, d_v, dtype))
    descales, b = {}, len(sequences.used[0])
    if is_fp8:
        inputs = [x.to(E4M3) for x in inputs]
        descales = {f"{name}_descale": torch.rand(b, h_kv) + 0.5 for name in "qkv"}
    has_gradients = not is_fp8 and "chunk" not in mask and d_v <= 256

    given = [x.clone().to(device).requires_grad_(has_gradients) for x in inputs]
    options = {"causal": mask["causal"], "window_size": mask.get("window", (-1, -1)), "softcap": softcap}
    options |= {"attention_chunk": mask.get("chunk", 0), "return_attn_probs": True}
    options |= {name: x.to(device) for name, x in descales.items()}
    if sequences.is_packed:
        lengths, used = sequences.lengths(device)
        out, lse = flash_attn_varlen_func(*given, *lengths, **used, **options)
    else:
        out, lse = flash_attn_func(*given, **options)
    assert out.dtype == (torch.bfloat16 if is_fp8 else dtype)
    dout = sequences.make(0, h, d_v, dtype)
    if has_gradients:
        out.backward(dout.to(device))

    empty = INF if inputs[1].numel() == 0 else -INF  # a tensor without keys
    outs, douts = sequences.split(0, out.detach().cpu()), sequences.split(0, dout)
    lses = sequences.split(0, lse.detach().cpu().T) if sequences.is_packed else lse.detach().cpu().mT
    for i, rows in enumerate(zip(*(sequences.split(w, x) for w, x in zip((0, 1, 1), inputs)))):
        factors = [
            descales[f"{name}_descale"][i][None, :, None] if is_fp8 else torch.ones(1, h_kv, 1) for name in "qkv"
        ]
        factors[0] = factors[0].repeat_interleave(h // h_kv, 1)
        wide = [(x.double() * factor).requires_grad_() for x, factor in zip(rows, factors)]
        plain = [x.detach().to(dtype if not is_fp8 else torch.bfloat16).requires_grad_() for x in wide]
        truth, true_lse = attention(*wide, softcap=softcap, **mask)
        rounded, _ = attention(*plain, softcap=softcap, dtype=plain[0].dtype, rounds_p=E4M3 if is_fp8 else None, **mask)
        assert_close(outs[i], truth.detach(), rounded.detach(), m=3)
        is_dead = true_lse == -INF
        assert (lses[i].T[is_dead] == empty).all()
        tolerance = 1e-3 if device == "cuda" else 1e-4
        torch.testing.assert_close(lses[i].T[~is_dead].double(), true_lse[~is_dead].detach(), rtol=1e-4, atol=tolerance)
        if has_gradients and all(x.numel() for x in rows):
            (truth * douts[i].double()).sum().backward()
            (rounded * douts[i]).sum().backward()
            for which, x, exact, approximate in zip((0, 1, 1), given, wide, plain):
                ours = sequences.split(which, x.grad.cpu())[i]
                assert_close(ours, exact.grad, approximate.grad, m=3, a=4e-3)
