"""The specification of flex_attention: plain arithmetic in fp64, with torch's gradients."""

import functools
import types

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from flash_attn.flex_attention import AuxRequest, flex_attention

INF = float("inf")


def scores_of(mod, scores):
    """A score_mod over all scores, by torch."""
    with TransformGetItemToIndex():
        mod = _vmap_for_bhqkv(getattr(mod, "for_torch", mod), prefix=(0,))
        return mod(scores, *(torch.arange(n) for n in scores.shape))


def attention(q, k, v, score_mod=None, mask=None, scale=None):
    """Returns out, lse and max_scores. mask: bool, of a shape that broadcasts to the scores; None allows everything."""
    g = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(g, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = scores_of(score_mod, scores).to(scores.dtype).expand(scores.shape)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    seen = scores.detach() > -INF
    if scores.shape[-1] == 0:
        return scores.sum(-1, keepdim=True) * v.new_zeros(v.shape[-1]), scores.sum(-1) - INF, scores.sum(-1) - INF
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.where(seen, torch.exp(torch.where(seen, scores - highest, 0.0)), 0.0)
    total = weights.sum(-1, keepdim=True)
    is_empty = ~seen.any(-1, keepdim=True)
    total = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, -INF, torch.where(is_empty, 0.0, highest) + total.log()).squeeze(-1)
    return weights @ v / total, lse, highest.squeeze(-1)


def gradients(outputs, inputs, upstream):
    """Gradients of inputs, 0 where an input has none."""
    pairs = [(x, g) for x, g in zip(outputs, upstream) if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(q, k, v, score_mod=None, block_mask=None, mask=None, leaves=(), tolerance=None, backward=True, **kwargs):
    """Compares flex_attention with the specification, its gradients too. Returns out."""
    tolerance = tolerance or TOLERANCES[q.dtype]
    q, k, v = (x.detach().requires_grad_(backward) for x in (q, k, v))
    wide = [x.detach().double().requires_grad_(backward) for x in (q, k, v)]
    kwargs.setdefault("enable_gqa", True)
    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True, max_scores=True), **kwargs
    )
    want = attention(*wide, score_mod, mask, kwargs.get("scale"))
    assert out.dtype == q.dtype and aux.lse.dtype == torch.float32
    for has, wants in zip((out, aux.lse, aux.max_scores), want, strict=True):
        assert has.shape == wants.shape
        close(has, wants, tolerance)
    if not backward:
        return out
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, aux.lse))
    dlse = torch.where(aux.lse == -INF, 0.0, dlse)
    got = gradients((out, aux.lse), [q, k, v, *leaves], (dout, dlse))
    wants = gradients(want[:2], [*wide, *leaves], (dout.double(), dlse.double()))
    for has, want in zip(got, wants, strict=True):
        close(has, want, 4 * max(tolerance, TOLERANCES[has.dtype] if has.dtype == torch.bfloat16 else 0))
    return out


def close(has, wants, tolerance):
    """Within the tolerance of the largest finite number, and of the same infinities."""
    wants, has = wants.detach().double(), has.detach().double()
    finite = wants.isfinite()
    assert torch.equal(finite, has.isfinite())
    assert torch.equal(wants[~finite].nan_to_num(7), has[~finite].nan_to_num(7))
    size = max(1.0, float(wants[finite].abs().max())) if finite.any() else 1.0
    torch.testing.assert_close(has[finite], wants[finite], rtol=tolerance, atol=tolerance * size)


def moved(value, device, seen=None):
    """A mod with its captured tensors on a device. ``seen`` maps the id of each value to what it became."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        result = value.detach().to(device).requires_grad_(value.requires_grad)
    elif isinstance(value, functools.partial):
        words = {name: moved(x, device, seen) for name, x in value.keywords.items()}
        result = functools.partial(
            moved(value.func, device, seen), *(moved(x, device, seen) for x in value.args), **words
        )
    elif isinstance(value, types.FunctionType):
        cells = tuple(types.CellType(moved(x.cell_contents, device, seen)) for x in value.__closure__ or ())
        defaults = value.__defaults__ and tuple(moved(x, device, seen) for x in value.__defaults__)
        result = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    else:
        result = value
    seen[id(value)] = result
    return result
