"""Types of arguments that several functions share."""

from collections.abc import Sequence
from typing import Callable, Optional, Union

import torch
from torch import Tensor

Window = Union[Sequence[int], Tensor]  # (left, right)
Length = Union[int, Tensor]  # a tensor has one element
Offset = Union[int, Tensor]  # one for all sequences, or one for each
Device = Union[torch.device, str, int, None]
Group = Optional["torch.distributed.ProcessGroup"]  # not every PyTorch has torch.distributed
Activation = Callable[[Tensor], Tensor]
MakesModule = Callable[..., torch.nn.Module]  # a class, or a function of the same arguments
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of the score and these four
