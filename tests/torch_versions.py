"""What works with which PyTorch. Run by hand: it installs every PyTorch that is asked for, one after the other.

    python -m pip wheel --no-deps -w dist . ./hopper      # or: make wheel
    python tests/torch_versions.py --wheels dist --versions 2.4.1 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 \\
        --index-url https://download.pytorch.org/whl/cpu
    python tests/torch_versions.py --here                        # the checks alone, with the PyTorch that is installed

Each version gets an environment in a temporary folder, which is removed afterwards. A CPU build of PyTorch takes about
1 GB there, a build with CUDA about 6 GB. PyTorch has no wheels of old versions for new Pythons: 2.4 needs Python 3.12
or older (--python). The last lines are the table of docs/install.md. A check that fails shows its exception.

pytest does not collect this file.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import venv
from pathlib import Path

REQUIREMENTS = "einops", "numpy<2", "setuptools"


# ---- the checks, in the process with the PyTorch in question ----------------------------------------------------


def inputs(*shape, num=3):
    import torch

    torch.manual_seed(0)
    return [torch.randn(*shape, requires_grad=True) for _ in range(num)]


def exact(q, k, v, causal=False):
    """out of ``[b, s, h, d]`` in fp64, by the formula."""
    import torch

    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def assert_close(x, y, most=1e-5):
    error = (x.double() - y.double()).abs().max().item()
    assert error <= most, error


def assert_is_attention(function, causal=True):
    """The result and the gradients of ``function(q, k, v)``."""
    import torch

    q, k, v = inputs(2, 33, 4, 32)
    dout = torch.randn_like(q)
    out, wanted = function(q, k, v), exact(q, k, v, causal)
    assert_close(out, wanted)
    grads, exact_grads = (torch.autograd.grad(x, (q, k, v), dout.to(x.dtype)) for x in (out, wanted))
    for grad, exact_grad in zip(grads, exact_grads):
        assert_close(grad, exact_grad)


def dense():
    import flash_attn_2_cuda

    from flash_attn import flash_attn_func

    q, k, v = inputs(2, 33, 4, 32)
    direct = flash_attn_2_cuda.direct_attention(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False)
    assert direct is not None, "the direct function leaves the call to the dispatcher"
    assert_is_attention(lambda q, k, v: flash_attn_func(q, k, v, causal=True))


def dropout():
    import torch

    from flash_attn import flash_attn_func

    q, k, v = inputs(2, 33, 4, 32)
    (dout,) = inputs(2, 33, 4, 32, num=1)

    def draw(seed):
        torch.manual_seed(seed)
        out = flash_attn_func(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again)) and not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    out, _, dropped = flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
    assert torch.equal(out, first[0]) and 0.3 < (dropped[:, :, :33, :33] < 0).double().mean() < 0.7


def varlen():
    import torch

    from flash_attn import flash_attn_varlen_func

    cu_seqlens = torch.tensor([0, 7, 30, 42], dtype=torch.int32)
    q, k, v = inputs(42, 8, 64)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 23, 23)
    parts = [exact(*(x[None, begin:end] for x in (q, k, v)))[0] for begin, end in ((0, 7), (7, 30), (30, 42))]
    wanted = torch.cat(parts)
    assert_close(out, wanted)
    dout = torch.randn_like(out)
    grads, exact_grads = (torch.autograd.grad(x, (q, k, v), dout.to(x.dtype)) for x in (out, wanted))
    for grad, exact_grad in zip(grads, exact_grads):
        assert_close(grad, exact_grad)


def kvcache():
    import torch

    from flash_attn import flash_attn_with_kvcache

    k_cache, v_cache = torch.randn(2, 2, 64, 2, 32)
    lengths = torch.tensor([7, 23], dtype=torch.int32)
    q, k, v = torch.randn(3, 2, 1, 2, 32)
    with torch.no_grad():
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for i, length in enumerate(lengths.tolist()):
        assert torch.equal(k_cache[i, length], k[i, 0])
        one, seen = slice(i, i + 1), slice(length + 1)
        assert_close(out[one], exact(q[one], k_cache[one, seen], v_cache[one, seen]))


def operators():
    import flash_attn_2_cuda
    import torch

    from flash_attn import flash_attn_func

    op = torch.ops.flash_attn._flash_attn_forward
    scale = 32**-0.5
    assert_is_attention(lambda q, k, v: op(q, k, v, 0.0, scale, True, -1, -1, 0.0, None, False)[0])
    q, k, v = (x.detach() for x in inputs(2, 33, 4, 32))
    out, *_ = flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, scale, True, -1, -1, 0.0, False, None)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    try:
        flash_attn_func(q, k[:1], v)
    except RuntimeError as error:
        assert "k must have shape" in str(error)
    else:
        raise AssertionError("a wrong shape was taken")


def transforms():
    import torch

    from flash_attn import flash_attn_func

    q, k, v = (x.detach() for x in inputs(3, 2, 33, 4, 32))
    out = torch.vmap(flash_attn_func)(q, k, v)
    assert_close(out, torch.stack([exact(*parts) for parts in zip(q, k, v)]))
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_func(q[0], k[0], v[0]).dtype == torch.bfloat16


def merge():
    import torch

    from flash_attn import flash_attn_func, merge_attention

    q, k, v = (x.detach() for x in inputs(2, 33, 4, 32))
    parts = [flash_attn_func(q, k[:, cut], v[:, cut], return_attn_probs=True) for cut in (slice(9), slice(9, 33))]
    out, _ = merge_attention([part[0] for part in parts], [part[1] for part in parts])
    assert_close(out, exact(q, k, v))
    assert isinstance(out, torch.Tensor)


def modules():
    import torch

    from flash_attn.modules.mha import MHA

    torch.manual_seed(0)
    layer, x = MHA(64, 4, causal=True, use_flash_attn=True), torch.randn(2, 9, 64)
    layer(x).sum().backward()


def compiled(**options):
    import torch

    from flash_attn import flash_attn_func

    torch._dynamo.reset()  # otherwise the function of an earlier check, with its graph breaks, would serve this one
    function = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True), backend="aot_eager", **options)
    assert_is_attention(function)


def fullgraph():
    compiled(fullgraph=True)


def flex():
    import torch

    from flash_attn.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 33, 33, "cpu")

    def function(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2)

    assert_is_attention(function)
    slope = torch.tensor(0.5)
    q, k, v = inputs(1, 2, 9, 16)
    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slope * (j - i)).sum().backward()


def biased():
    import torch

    from flash_attn import flash_attn_func

    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    assert_is_attention(lambda q, k, v: flash_attn_func(q, k, v, attn_mask=mask))


def generation_3():
    import torch
    from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    assert_is_attention(lambda q, k, v: flash_attn_func(q, k, v, causal=True))
    q, k, v = torch.randn(3, 2, 9, 2, 32)
    assert_close(flash_attn_with_kvcache(q, k, v), exact(q, k, v))


CHECKS = {
    "`flash_attn_func`, forward and backward": dense,
    "dropout": dropout,
    "`flash_attn_varlen_func`": varlen,
    "`flash_attn_with_kvcache`": kvcache,
    "`torch.ops.flash_attn`, `flash_attn_2_cuda`": operators,
    "`torch.vmap`, autocast": transforms,
    "`merge_attention`": merge,
    "`flash_attn.modules`": modules,
    "`flash_attn_3`": generation_3,
    "`torch.compile`": compiled,
    "`torch.compile` with `fullgraph=True`": fullgraph,
    "`flex_attention`": flex,
    "`attn_mask`, `attn_bias`": biased,
}


def check_all():
    """{name: "" or why it does not work}."""
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except Exception as error:  # any failure is a result
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        print(f"{name}: {found[name] or 'works'}", file=sys.stderr, flush=True)
    return found


# ---- environments -------------------------------------------------------------------------------------------------


def run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, text=True, **options)


def check_version(version, options):
    with tempfile.TemporaryDirectory(prefix=f"torch-{version}-") as folder:
        if options.python:
            run(options.python, "-m", "venv", folder)
        else:
            venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        pip = python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-cache-dir"
        index = ["--index-url", options.index_url] if options.index_url else []
        run(*pip, *index, f"torch=={version}")
        run(*pip, *REQUIREMENTS)
        run(*pip, "--no-deps", *sorted(Path(options.wheels).glob("*.whl")))
        done = run(python, Path(__file__).resolve(), "--here", stdout=subprocess.PIPE, cwd=folder)
    return json.loads(done.stdout.splitlines()[-1])


def table(results):
    """Markdown, with a footnote for every reason."""
    versions, reasons, lines = list(results), [], []
    lines.append("| | " + " | ".join(versions) + " |")
    lines.append("|---|" + "---|" * len(versions))
    for name in CHECKS:
        cells = []
        for version in versions:
            reason = results[version][name]
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="check the PyTorch of this Python, and print JSON")
    parser.add_argument("--wheels", help="folder with the wheels of flash_attn and flash_attn_3")
    parser.add_argument("--versions", nargs="+", default=[], help="releases of PyTorch")
    parser.add_argument("--index-url", help="pip's index of PyTorch (default: pip's own)")
    parser.add_argument("--python", help="the interpreter of the environments (default: this one)")
    options = parser.parse_args()
    if options.here:
        with contextlib.redirect_stdout(sys.stderr):
            found = check_all()
        print(json.dumps(found))
        return
    if not options.wheels or not options.versions or not list(Path(options.wheels).glob("*.whl")):
        parser.error("--wheels must name a folder with wheels, and --versions at least one release")
    os.environ.pop("PYTHONPATH", None)  # the wheels are checked, not the source tree
    print(table({version: check_version(version, options) for version in options.versions}))


if __name__ == "__main__":
    main()
