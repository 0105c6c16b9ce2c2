"""Attention of one sequence as the formula says it, and the rule by which results are accepted.

The result in fp64 is the truth. ``E(ours) <= m E(torch) + a``: our error is at most m times the error of plain PyTorch
in the tensors' own dtype, plus the rounding noise of the result's dtype.
"""

import torch

INF = float("inf")


def visible(len_q, len_kv, causal=False, window=(-1, -1), chunk=0):
    """bool [len_q, len_kv]: which row sees which key."""
    at = torch.arange(len_q)[:, None] + len_kv - len_q
    key = torch.arange(len_kv)[None]
    sees = torch.ones(len_q, len_kv, dtype=torch.bool)
    if window[0] >= 0:
        sees &= key >= at - window[0]
    if causal or window[1] >= 0:
        sees &= key <= at + (0 if causal else window[1])
    if chunk > 0:
        sees &= key.div(chunk, rounding_mode="floor") == at.div(chunk, rounding_mode="floor")
    return sees


def attention(q, k, v, qv=None, scale=None, softcap=0.0, dtype=torch.float64, rounds_p=None, **mask):
    """(out, lse) of q [len_q, h, d], k [len_kv, h_kv, d], v [len_kv, h_kv, d_v], computed in ``dtype``."""
    terms = q.shape[-1] + (0 if qv is None else v.shape[-1])
    scale = terms**-0.5 if scale is None else scale
    g = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k * scale)
    if qv is not None:
        scores = scores + torch.einsum("ihd,jhd->hij", qv.to(dtype), v * scale)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    sees = visible(q.shape[0], k.shape[0], **mask)
    scores = scores.masked_fill(~sees, -INF)
    lse = torch.logsumexp(scores, -1) if k.shape[0] else scores.new_full(scores.shape[:2], -INF)
    dead = ~sees.any(-1)
    p = torch.softmax(scores.masked_fill(dead[:, None], 0), -1).masked_fill(dead[:, None], 0)
    if rounds_p is not None:
        p = p.to(rounds_p).to(dtype)
    return torch.einsum("hij,jhd->ihd", p, v), lse.masked_fill(dead, -INF)


def assert_close(ours, truth, plain, m=2.0, a=None):
    """``plain`` is plain PyTorch's result in the dtype of the inputs."""
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    if ours.numel() == 0:
        return
    rounded = truth.to(ours.dtype)
    noise = 2 * ((rounded + 0.3) - 0.3 - rounded).abs().max().double() if a is None else a
    error, largest = (ours.double() - truth).abs().max(), truth.abs().max()
    allowed = m * (plain.double() - truth).abs().max() + noise + 1e-6 * max(1, largest)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    assert not ours.isnan().any()


def assert_lse(ours, truth):
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=2e-5 if ours.numel() else 0)
