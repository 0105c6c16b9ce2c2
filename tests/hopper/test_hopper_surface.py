"""Names, signatures and versions of flash_attn_3 that clients read, and the example of its README."""

import doctest
import inspect
import re
import shutil

import flash_attn_3.flash_attn_config
import flash_attn_3.flash_attn_interface as fa3
import flash_attn_config
import flash_attn_interface
import fresh_python
import pytest
import torch
from build_hopper import HOPPER

TAIL = (
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {TAIL}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALES}, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
    "kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
    f"{DESCALES}, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, "
    "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
    "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
}
# Schemas as torch prints them: 0.0 without its last zero.
SCHEMAS = [
    "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "flash_attn_3::fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
    "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)",
    "flash_attn_3::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor",
]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(fa3, name))
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"
    assert getattr(flash_attn_interface, name) is getattr(fa3, name)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda text: text.split("(")[0])
def test_schema(schema):
    op = getattr(torch.ops.flash_attn_3, schema.split("(")[0].split("::")[1]).default
    assert str(op._schema) == schema


def test_ops_take_positional_arguments():
    """PyTorch's own FA3 provider calls fwd with 34 arguments and bwd with 22."""
    q = torch.randn(1, 5, 2, 32)
    none = [None] * 20
    results = torch.ops.flash_attn_3.fwd(
        q, q, q, *none, None, True, -1, -1, 0, 0.0, False, None, 1, None, 0
    )  # fmt: skip
    assert [tuple(x.shape) for x in results] == [(1, 5, 2, 32), (1, 2, 5), (0,), (0,)]
    grads = [torch.empty_like(q) for _ in range(3)]
    results = torch.ops.flash_attn_3.bwd(
        q, q, q, q, *results[:2], *grads, *[None] * 6, None, True, -1, -1, 0.0, False, 0
    )
    assert len(results) == 5 and all((x != 0).any() for x in grads)


def test_out_of_the_op_is_the_given_out():
    q, out = torch.randn(1, 5, 2, 32), torch.empty(1, 5, 2, 32)
    result = torch.ops.flash_attn_3.fwd(q, q, q, out=out)[0]
    assert result.data_ptr() == out.data_ptr() and torch.equal(out, fa3.flash_attn_func(q, q, q))


def test_diffusers_call():
    q = torch.randn(1, 5, 2, 32)
    out, lse, *_ = flash_attn_interface.flash_attn_func(
        q=q, k=q, v=q, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=True,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (1, 2, 5)


def test_config_tells_the_truth(capsys):
    assert flash_attn_config.CONFIG is flash_attn_3.flash_attn_config.CONFIG
    flags = flash_attn_config.CONFIG["build_flags"]
    assert len(flags) == 20 and not any(flags.values())
    flash_attn_config.show()
    assert "FLASHATTENTION_DISABLE_FP8 = False" in capsys.readouterr().out


def test_version():
    assert flash_attn_3.__version__ == "3.0.0"


@pytest.mark.parametrize("module, name", [(fa3, name) for name in fa3.__all__] + [(flash_attn_config, "show")])
def test_example_of_a_docstring_runs(module, name):
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    names = {"torch": torch, **{n: getattr(module, n) for n in module.__all__}}
    said, tests = [], finder.find(getattr(module, name), name, module=False, globs=names)
    for test in tests:
        runner.run(test, out=said.append)
    assert sum(len(test.examples) for test in tests) > 0 and runner.failures == 0, "".join(said)


def test_examples_of_the_readme_run():
    text = (HOPPER / "README.md").read_text(encoding="utf-8")
    fp8, quantising = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for example, printed in (
        (fp8, "torch.bfloat16\n"),
        (quantising + "print(out.shape)", "torch.Size([2, 1024, 8, 128])\n"),
    ):
        code = f"import sys; sys.path.insert(0, {str(HOPPER)!r})\n{example}"
        done = fresh_python.python(code)
        assert done.stdout == printed, done.stderr


def test_no_memory_for_an_object_of_python():
    """PyTorch throws a C++ exception if there is no memory for a torch.Tensor."""
    pytest.importorskip("_testcapi")
    done = fresh_python.python(f"""
import sys; sys.path.insert(0, {str(HOPPER)!r})
import _testcapi, torch
from flash_attn_interface import flash_attn_func
q, refused = torch.randn(1, 5, 2, 16), 0
flash_attn_func(q, q, q), flash_attn_func(q, q, q)
for allocation in range(1, 60):
    _testcapi.set_nomemory(allocation, allocation + 1)
    try:
        result = flash_attn_func(q, q, q)
    except MemoryError:
        refused += 1
    _testcapi.remove_mem_hooks()
print(refused > 0)
""")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_without_the_compiled_module_one_sentence(tmp_path):
    """As in a checkout that was not built."""
    shutil.copytree(HOPPER / "flash_attn_3", tmp_path / "flash_attn_3", ignore=shutil.ignore_patterns("_C.*"))
    done = fresh_python.python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport flash_attn_3.flash_attn_interface"
    )
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(
        "ImportError: flash_attn_3 needs its compiled module flash_attn_3._C, which is not installed"
    )


def test_host_time_of_a_call():
    """The direct function serves an eager call, and the dispatcher is not entered."""
    from flash_attn_3 import _C

    q = torch.randn(1, 1, 2, 32)
    options = None, None, None, None, None, False, (-1, -1), 0, 0.0, 1, None, 0
    assert torch.equal(_C.direct_attention(q, q, q, *[None] * 6, *options), fa3.flash_attn_func(q, q, q))
