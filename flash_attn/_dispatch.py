"""One way from Python into the extension: the direct function, or else the op.

A direct function (csrc/torch/direct.c) does the same as its op without torch's dispatcher, which takes longer than all
the rest of a small call. A direct function that cannot serve a call returns None and has done nothing. So it is when
something watches the ops, or an argument is wrong. Then the op is called, which also reports errors.
"""

import warnings

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn._arguments import has_distributed, maybe_contiguous
from flash_attn._ops import flash_attn_2_cuda

# Does torch.export trace? Older torches do not say.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def _warn_of_order(_):
    warnings.warn(
        "torch.export forgets deterministic=True of flash_attn: where the exported program is trained, call "
        "torch.use_deterministic_algorithms(True)",
        stacklevel=2,
    )


def warn_of_order():
    """Says that an exported program forgets ``deterministic=True``, for which its op has no argument.

    Dynamo, which traces strict exports, ignores warnings of the text that it traces.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_warn_of_order)
    else:
        _warn_of_order(None)


class _NoContext:
    def save_for_backward(self, *_):
        pass


def recorded(function, *arguments):
    """Returns ``function.apply(*arguments)`` of an autograd.Function whose forward has only torch's own operators.

    torch.export drops the backward of such a function, and the exported program would lose gradients in silence. So it
    gets the operators, which have gradients of their own. They give gradients to the tables of a rotary embedding, too,
    and add up those of a row that is taken twice.
    """
    return function.forward(_NoContext(), *arguments) if is_exporting() else function.apply(*arguments)


def call_op(op, *arguments):
    """Returns ``op(*arguments)``. The dispatcher makes exceptions RuntimeErrors; here they are restored."""
    if is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        exception = flash_attn_2_cuda.mended_exception(error)
        if exception is error:
            raise
        raise exception from None


def directly(function, *arguments):
    """Returns the results of a direct function, or None. A tracer of torch.compile must not see these functions."""
    return None if is_compiling() else function(*arguments)


def call(function, op, num_inputs, *arguments):
    """Returns the results of a direct function, or else of its op, which takes the same arguments.

    The op gets contiguous copies of the first num_inputs tensors if their last dimensions are not contiguous.
    """
    results = directly(function, *arguments)
    if results is None and has_distributed(arguments):
        from flash_attn import _distributed_ops  # noqa: F401  the ops take DTensors from now on
    if results is None:
        results = call_op(op, *map(maybe_contiguous, arguments[:num_inputs]), *arguments[num_inputs:])
    return results


# Does a transform of torch.func, such as grad or vmap, run at the moment?
transforms_are_active = torch._C._are_functorch_transforms_active


def is_unseen():
    """May C compute here what is written with torch's functions? No tracer, transform or mode looks at them.

    No tensor has a tangent.
    """
    return not (
        is_compiling()
        or transforms_are_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


_NOT_TRACED = (
    "flash_attn cannot be compiled inside grad, vmap and the like of torch.func: wrap the transformed function in "
    "torch.compiler.disable"
)


def _refuse_gradients(_):
    """Dynamo calls this function while it traces. The exception ends the compilation, and is no graph break.

    NOTE: after a graph break torch 2.13 resumes inside of grad, where Dynamo takes no tensor that grad has seen
    (AssertionError: False != True). Inside of vmap alone it continues without compilation.
    """
    from torch._dynamo.exc import UncapturedHigherOrderOpError
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    if not all(isinstance(x, VmapInterpreter) for x in retrieve_all_functorch_interpreters()):
        raise UncapturedHigherOrderOpError(_NOT_TRACED)


def _is_functionalized():
    from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_all_functorch_interpreters

    return any(isinstance(x, FunctionalizeInterpreter) for x in retrieve_all_functorch_interpreters())


def check_not_traced():
    """Raises inside torch.func.functionalize, and while Dynamo traces a function of torch.func.

    NOTE: with torch 2.13 the gradients of a compiled ``torch.func.grad`` are wrong if an op writes into its results,
    and nothing says so.
    """
    if is_compiling() and transforms_are_active():
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_refuse_gradients)
        raise NotImplementedError(_NOT_TRACED)
    if transforms_are_active() and _is_functionalized():
        raise NotImplementedError(
            "flash_attn cannot be called inside torch.func.functionalize: torch.compile, torch.export and make_fx take "
            "its functions without it"
        )
