"""What kind of value each argument of the attention functions takes, in one sentence for who gave another kind.

The ops check everything about right kinds: shapes, dtypes and values. They name an argument of a wrong kind as torch's
parser does. So after a failure this file looks at the arguments, in the caller's names. A call that succeeds pays
nothing. hopper/flash_attn_3/_kinds.py is a link to this file, so that both packages have it.
"""

import numbers
import re
from collections.abc import Sequence

import torch


def came(x):
    """What came instead, in words."""
    if isinstance(x, torch.Tensor):
        return f"it is a tensor of shape {tuple(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"
    if _is_long(x):
        return f"it is an int of {x.bit_length()} bits"
    if isinstance(x, (tuple, list)) and any(map(_is_long, x)):
        return "it has an integer of more than 64 bits"
    text = repr(x) if isinstance(x, (str, bytes, numbers.Number, tuple, list)) else ""
    return f"it is {text}, of type {_type(x)}" if 0 < len(text) <= 60 else f"it is of type {_type(x)}"


def _type(x):
    return type(x).__name__


def _is_scalar(x, kinds, dtypes):
    if isinstance(x, torch.Tensor):
        return x.numel() == 1 and dtypes(x.dtype)
    return isinstance(x, kinds)


def _is_integer_dtype(dtype):
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _is_long(x):
    """The ops have integers of 64 bits."""
    return isinstance(x, int) and not -(2**63) <= x < 2**63


def _is_int(x):
    is_int = _is_scalar(x, (numbers.Integral, torch.SymInt), _is_integer_dtype)
    return is_int and not isinstance(x, bool) and not _is_long(x)


def _is_length(x):
    """The number of elements of a tensor was checked before."""
    return _is_integer_dtype(x.dtype) if isinstance(x, torch.Tensor) else _is_int(x)


def _is_float(x):
    """The ops have floats of 64 bits."""
    if isinstance(x, numbers.Real):
        try:
            float(x)
        except OverflowError:
            return False
    return _is_scalar(x, (numbers.Real, torch.SymFloat, torch.SymInt), lambda dtype: not dtype.is_complex)


def _is_flag(x):
    if _is_scalar(x, (bool, torch.SymBool), lambda dtype: True) or x is None or type(x).__name__ in ("bool_", "bool"):
        return True
    return isinstance(x, numbers.Integral) and x in (0, 1)


def _is_window(x):
    if isinstance(x, torch.Tensor):
        return x.dim() == 1 and x.numel() == 2 and _is_integer_dtype(x.dtype)
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(map(_is_int, x))


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def _is_function(x):
    return x is None or callable(x)


def _is_block_size(x):
    return _is_int(x) or (isinstance(x, Sequence) and len(x) == 2 and all(map(_is_int, x)))


# kind: (test, what is allowed, in words)
_TENSOR = _is_tensor, "a tensor"
_FLAG = _is_flag, "True or False"
_INT = _is_int, "an integer"
_INT_OR_NONE = (lambda x: x is None or _is_int(x)), "an integer or None"
_KINDS = {
    "dropout_p": (_is_float, "a number from 0 to less than 1"),
    "softmax_scale": (lambda x: x is None or _is_float(x), "a number or None"),
    "scale": (lambda x: x is None or _is_float(x), "a number or None"),
    "softcap": (_is_float, "a number, 0 for none"),
    "causal": _FLAG,
    "deterministic": _FLAG,
    "return_attn_probs": _FLAG,
    "return_lse": _FLAG,
    "return_max_logits": _FLAG,
    "return_softmax_lse": _FLAG,
    "rotary_interleaved": _FLAG,
    "window_size": (_is_window, "(left, right), two integers"),
    "num_splits": _INT,
    "max_seqlen": (_is_length, "an integer, or a tensor of one"),
    "max_seqlen_q": (_is_length, "an integer, or a tensor of one"),
    "max_seqlen_k": (_is_length, "an integer, or a tensor of one"),
    "cache_seqlens": (
        lambda x: x is None or _is_tensor(x) or _is_int(x) or _is_long(x),  # another sentence tells the largest number
        "a tensor, an integer or None",
    ),
    # of flex_attention
    "score_mod": (_is_function, "a function or None"),
    "mask_mod": (_is_function, "a function or None"),
    "block_mask": (lambda x: x is None or hasattr(x, "kv_num_blocks"), "a BlockMask or None"),
    "kernel_options": (lambda x: x is None or isinstance(x, dict), "a dict or None"),
    "return_aux": (lambda x: x is None or hasattr(x, "max_scores"), "an AuxRequest or None"),
    "B": _INT_OR_NONE,
    "H": _INT_OR_NONE,
    "Q_LEN": _INT,
    "KV_LEN": _INT,
    "BLOCK_SIZE": (_is_block_size, "an integer or a pair of integers"),
    # of flash_attn_3
    "pack_gqa": (_is_flag, "True, False or None"),
    "has_softcap": _FLAG,
    "hadamard": _FLAG,
    "attention_chunk": _INT,
    "sm_margin": _INT,
    "batch_size": _INT,
    "num_heads_q": _INT,
    "num_heads_kv": _INT,
    "headdim": _INT,
    "headdim_v": _INT_OR_NONE,
    "page_size": _INT_OR_NONE,
    "max_seqlen_k_new": _INT,
    "qkv_dtype": (lambda x: isinstance(x, torch.dtype), "a torch.dtype"),
    "out_dtype": (lambda x: x is None or isinstance(x, torch.dtype), "a torch.dtype or None"),
}
_REQUIRED = {"q", "k", "v", "kv", "qkv", "k_cache", "v_cache", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"} | {
    "out_partial", "lse_partial", "query", "key", "value",
}  # fmt: skip


def check_kinds(arguments, optional=()):
    """Raises TypeError for the first argument of a wrong kind.

    ``arguments`` maps names to values. Those that are named in ``optional`` may be None.
    """
    for name, x in arguments.items():
        is_right, allowed = _KINDS.get(name, _TENSOR)
        is_optional = name in optional or (name not in _KINDS and name not in _REQUIRED)
        if is_optional:
            if x is None:
                continue
            allowed += ", or None" if "," in allowed else " or None"
        if not is_right(x):
            of_tensor = allowed.startswith("a tensor") and not isinstance(x, torch.Tensor)
            text = f"{name} must be {allowed}; {f'it is of type {_type(x)}' if of_tensor else came(x)}"
            raise ValueError(text) if name == "window_size" else TypeError(text)  # ValueError: as it always was
        if isinstance(x, torch.Tensor):
            check_layout_of_memory(name, x)


def check_layout_of_memory(name, x):
    """Raises for tensors without plain memory. Jagged q, k and v have been taken apart before."""
    if x.is_nested:
        raise TypeError(
            f"{name} must be a plain tensor; it is nested (flash_attn.flash_attn_func and its packed forms take "
            "jagged q, k and v)"
        )
    if x.is_quantized:
        raise TypeError(f"{name} must be a plain tensor; it is quantized, of dtype {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; it has layout {x.layout}")


def in_names_of_the_caller(error, names):
    """Returns the error, with the op's names of arguments replaced. ``names`` maps them to the caller's names."""
    text = str(error)
    renamed = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], text)
    return error if renamed == text else type(error)(renamed)
