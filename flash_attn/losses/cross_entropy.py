"""Cross entropy as a module, reduced like ``torch.nn.CrossEntropyLoss``."""

from typing import Optional, Union

import torch.nn as nn
from torch import Tensor

from flash_attn._types import Group
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """Mean, sum or list of the row losses of ``cross_entropy_loss``. The module keeps the arguments.

    Args:
        reduction: "mean" over the rows that are not ignored, "sum" or "none". The mean of no rows is nan.
        return_z_loss: return (loss, z_loss); the z-loss is part of the loss and carries no gradient.
        The others: see ``ops.triton.cross_entropy.cross_entropy_loss``.
    Raises:
        NotImplementedError: the reduction is not one of these.
    Source: as of ``cross_entropy_loss``.

    >>> logits, labels = torch.randn(4, 10, requires_grad=True), torch.tensor([3, -100, 0, 9])
    >>> loss = CrossEntropyLoss(label_smoothing=0.1)(logits, labels)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))
    True
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Group = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"reduction is {reduction!r}, allowed are 'mean', 'none' and 'sum'")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group, self.return_z_loss = inplace_backward, process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Optional[Tensor] = None
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """``input`` ``[n, V]``, ``target`` ``[n]`` -> a scalar, or ``[n]`` with reduction "none".

        The loss is fp32 (fp64 for fp64). With return_z_loss the z-loss of this shape comes with it.

        Args:
            input, target, precomputed_lse: logits, labels and precomputed_lse of ``cross_entropy_loss``.
        Raises:
            ValueError: shapes that do not fit.
            IndexError: on CPU, a label outside the vocabulary.
        Gradients for input.
        """
        losses, z_losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        loss, z_loss = self._reduce(losses, target), self._reduce(z_losses, target)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduce(self, losses, target):
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / (target != self.ignore_index).sum() if self.reduction == "mean" else total
