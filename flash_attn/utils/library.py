"""``triton_op`` of torch.library under the name that clients import."""

from torch.library import triton_op

__all__ = ["triton_op"]
