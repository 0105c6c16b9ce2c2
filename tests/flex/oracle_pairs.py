"""Mods of calls with q_offset, kv_len and block_table on a GPU, and all their pairs in fp64."""

import torch

LONGEST = 1400
MODS = {
    "alibi": (lambda t: lambda s, b, h, q, k: s - t["slopes"][h] * (q - k), None),
    "alibi, causal": (
        lambda t: lambda s, b, h, q, k: s - t["slopes"][h] * (q - k),
        lambda t: lambda b, h, q, k: q >= k,
    ),
    "window": (None, lambda t: lambda b, h, q, k: (q >= k) & (q - k <= 100 + 10 * h)),
    "documents": (None, lambda t: lambda b, h, q, k: (t["document"][q] == t["document"][k]) | (k == b)),
    "table, softcap": (lambda t: lambda s, b, h, q, k: 5 * torch.tanh((s + t["table"][b, h, k]) / 5), None),
    "rows that see nothing": (
        lambda t: lambda s, b, h, q, k: s + t["pairs"][h % 4, q, k],
        lambda t: lambda b, h, q, k: (q % 7 != 3) & (k <= q),
    ),
    "hidden by a score": (lambda t: lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, -float("inf"), s), None),
}


def captured(generator):
    return {
        "slopes": torch.rand(32, generator=generator) / 20,
        "document": torch.randint(0, 3, (LONGEST,), generator=generator).sort().values,
        "table": torch.randn(8, 32, LONGEST, generator=generator),
        "pairs": torch.randn(4, LONGEST, LONGEST, generator=generator),
    }


def all_pairs(q, k, v, kv_len, offset, score_mod, mask_mod, scale):
    """out and lse in fp64. q, k and v have heads first, and each sequence its keys side by side."""
    b, h, len_q, _ = q.shape
    k, v = (x.double().repeat_interleave(h // x.size(1), 1) for x in (k, v))
    at = [torch.arange(n, device=q.device).view([-1 if i == n_dim else 1 for i in range(4)])
          for n_dim, n in enumerate((b, h, len_q, k.size(2)))]  # fmt: skip
    at[2] = at[2] + offset.view(-1, 1, 1, 1)
    scores = scale * q.double() @ k.transpose(2, 3)
    if score_mod:
        scores = score_mod(scores, *at)
    hidden = at[3] >= kv_len.view(-1, 1, 1, 1)
    if mask_mod:
        hidden = hidden | ~mask_mod(*at)
    scores = scores.masked_fill(hidden, -float("inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -float("inf"), 0, lse)[..., None])
    return weights @ v, lse
