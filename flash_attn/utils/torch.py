"""``custom_fwd`` and ``custom_bwd`` of torch.amp for CUDA, under the names that older code imports."""

from functools import partial

import torch

__all__ = ["custom_bwd", "custom_fwd"]

custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")
