"""``triton_op`` of torch.library with the two arguments that clients expect."""

from collections.abc import Iterable
from typing import Any, Callable, Optional, Union

from torch.library import custom_op
from torch.library import triton_op as torch_triton_op

__all__ = ["triton_op"]


def triton_op(
    name: str,
    fn: Optional[Callable[..., Any]] = None,
    /,
    *,
    mutates_args: Union[str, Iterable[str]],
    schema: Optional[str] = None,
    allow_decomposition: bool = True,
) -> Any:
    """Makes an operator of a function that launches Triton kernels. Without ``fn``, returns a decorator.

    Args:
        name: "namespace::operator". mutates_args: names of the arguments that ``fn`` writes.
        fn: the function. Its arguments and results are those of the operator.
        schema: the operator's schema, by default from the annotations of ``fn``. torch.library's own ``triton_op`` does
            not use it. So an operator with a schema is made as with ``allow_decomposition=False``.
        allow_decomposition: False hides the kernels from the compiler, as ``torch.library.custom_op`` does. Then ``fn``
            also serves as the operator's fake implementation.
    Returns:
        The operator, a ``CustomOpDef`` of torch.library.

    >>> def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> operator = triton_op("flash_attn_example::twice", twice, mutates_args=(), allow_decomposition=False)
    >>> operator(torch.ones(2))
    tensor([2., 2.])
    """

    def make(fn):
        if allow_decomposition and schema is None:
            return torch_triton_op(name, fn, mutates_args=mutates_args)
        operator = custom_op(name, fn, mutates_args=mutates_args, schema=schema)
        operator.register_fake(fn)
        return operator

    return make if fn is None else make(fn)
