"""What the tests of distributed tensors share: placing tensors, and comparing with plain ones."""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

NCCL = os.environ.get("FLASH_ATTN_TEST_NCCL") == "1"
DEVICE, BACKEND = ("cuda", "nccl") if NCCL else ("cpu", "gloo")
DTYPE = torch.bfloat16 if NCCL else torch.float32
TOLERANCE = 3e-2 if NCCL else 2e-5

R, P = Replicate(), Partial()

needs_two_gpus = pytest.mark.skipif(NCCL and torch.cuda.device_count() < 2, reason="needs two GPUs")


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape).to(DEVICE, dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def placed(x, mesh, placements):
    """The same tensor distributed. An addend of Partial is a rank's share."""
    if P not in placements:
        return distribute_tensor(x, mesh, placements)
    part = distribute_tensor(x, mesh, [R if place == P else place for place in placements]).to_local()
    for i, place in enumerate(placements):
        part = part / mesh.size(i) if place == P else part
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(ours, expected, what):
    ours, expected = whole(ours).detach().float(), expected.detach().float()
    assert ours.shape == expected.shape, (what, ours.shape, expected.shape)
    same = torch.where(ours == expected, 0, ours - expected).abs()  # infinities are equal
    limit = TOLERANCE * max(1.0, expected[expected.isfinite()].abs().max().item() if expected.numel() else 0.0)
    assert (same <= limit).all(), f"{what}: off by {same.max()}"


def leaf(x):
    return x.detach().clone().requires_grad_(x.is_floating_point())


def results_and_gradients(function, tensors, spread):
    """The results of a function, and the gradients of its tensors. ``spread`` distributes a gradient of a result."""
    found = function(**tensors)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(1)
    outs = [x for x in found if x.requires_grad]
    douts = [spread(randn(*x.shape, dtype=x.dtype)) for x in outs]
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    grads = torch.autograd.grad(outs, list(wanted.values()), douts, allow_unused=True)
    return found, dict(zip(wanted, grads))


def check(what, mesh, function, tensors, placements, expected_out=None):
    """Compares ``function`` of distributed tensors with that of plain ones. A tensor without placements stays plain."""
    function_of = getattr(function, "plain", function)
    expected, expected_grads = results_and_gradients(
        function_of, {name: leaf(x) for name, x in tensors.items()}, lambda x: x
    )
    given = {name: leaf(placed(x, mesh, placements[name]) if name in placements else x) for name, x in tensors.items()}
    found, grads = results_and_gradients(function, given, lambda x: placed(x, mesh, [R] * mesh.ndim))
    assert len(found) == len(expected)
    for i, (ours, plain) in enumerate(zip(found, expected)):
        close(ours, plain, f"{what}, result {i}")
        assert ours.stride() == plain.stride(), what
    for name, grad in grads.items():
        if expected_grads[name] is None:
            assert grad is None, (what, name)
        else:
            close(grad, expected_grads[name], f"{what}, gradient of {name}")
    if expected_out is not None:
        assert found[0].placements == tuple(expected_out), (what, found[0].placements)


def qkv_of(b, len_q, len_k, h, g, d=16):
    torch.manual_seed(0)
    return {"q": randn(b, len_q, h, d), "k": randn(b, len_k, g, d), "v": randn(b, len_k, g, d)}


def everywhere(names, places):
    return {name: list(places) for name in names}
