"""The tolerance of results. Our error may be m times the error of plain PyTorch in the same dtype, plus a.

    E(x) = max |x - ref|,  ref in float64;   pass iff E(ours) <= m E(plain) + a

a is the rounding of the number format itself. In 16 bit a is half a unit in the last place of the largest value. In
fp32 a is 1e-6 of the largest value, and in fp64 1e-12.
"""

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-12}


def largest(*tensors):
    return max((x.abs().max().item() for x in tensors if x.numel()), default=0.0)


def error(x, ref):
    return largest(x.double() - ref.double())


def size_of_values(*v):
    """The mean |v|. out = sum of P v may cancel, and then its error is relative to the terms that cancelled."""
    v = torch.cat([x.reshape(-1) for x in v]) if v else torch.empty(0)
    v = v[v.isfinite()].double()
    return v.abs().mean().item() if v.numel() else 0.0


def check(name, ours, ref, plain, m=2.0, a=None, scale=None):
    """Compares ours and plain with ref. scale: the largest value for the rounding allowance (default: that of ref)."""
    assert ours.shape == ref.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(ref.shape)}"
    if not ref.numel():
        return
    bad = ~torch.isfinite(ours.double())
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} not finite, first at {bad.nonzero()[0].tolist()}"
    if a is None:
        a = ROUNDING[ours.dtype] * (largest(ref) if scale is None else scale)
    ours_error, plain_error = error(ours, ref), error(plain, ref)
    at = (ours.double() - ref.double()).abs().argmax()
    where = [int(x) for x in torch.unravel_index(at, ref.shape)]
    assert ours_error <= m * plain_error + a, (
        f"{name}: error {ours_error:.3e} > {m:g} * {plain_error:.3e} + {a:.1e} at {where}: "
        f"{ours.reshape(-1)[at].item():.9g} should be {ref.reshape(-1)[at].item():.9g}"
    )


def check_lse(ours, ref, plain_fp32, dtype):
    """Checks lse: natural log, float32 always, +inf exactly on rows that see no key. plain_fp32: the same maths in
    fp32."""
    assert ours.dtype == torch.float32
    assert ours.shape == ref.shape, f"lse: shape {tuple(ours.shape)}, expected {tuple(ref.shape)}"
    blind = ref == float("inf")
    assert torch.equal(ours == float("inf"), blind), "lse: +inf belongs to rows that see no key, and only there"
    ours, ref, plain = (x[~blind] for x in (ours, ref, plain_fp32))
    if not ours.numel():
        return
    # 16-bit kernels may use an exp2 with an error of 1e-5. fp32 rounds the sum of a large maximum and a logarithm.
    a = 1e-6 * max(largest(ref), 1.0) + (2e-5 if dtype in (torch.float16, torch.bfloat16) else 0.0)
    check("lse", ours, ref, plain, a=a)
