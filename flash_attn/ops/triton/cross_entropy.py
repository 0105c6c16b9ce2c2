"""Cross entropy of each row, with label smoothing e, z-loss w and a logit scale c, one loss per row:

    lse  = log sum_j exp(c x_j)
    loss = lse - (1 - e) c x_label - e / V sum_j c x_j + w lse^2
    dx_j = dloss c (exp(c x_j - lse) (1 + 2 w lse) - (1 - e) [j = label] - e / V)

Only lse is kept between the two passes. Sums are fp32 (fp64 for fp64), over a few rows at a time. So no fp32 copy of
all logits is made. With a process group, each rank holds V / world_size neighbouring columns of the logits, in the
order of the ranks. Then lse, the label's logit and the smoothing sum are combined over the ranks.
"""

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._ops import without_second_derivative
from flash_attn._types import Group

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]

CHUNK_ELEMENTS = 1 << 22  # logits in flight, 16 MiB in fp32


class CrossEntropyLoss(torch.autograd.Function):
    """The two passes. The public form is ``cross_entropy_loss``.

    ``apply(logits, labels, precomputed_lse=None, smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
    ignore_index=-100, inplace_backward=False, process_group=None)``. smoothing is label_smoothing.

    >>> losses, z_losses = CrossEntropyLoss.apply(torch.zeros(2, 4), torch.tensor([3, -100]))
    >>> losses  # log(4), and nothing for a row that is ignored
    tensor([1.3863, 0.0000])
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Optional[Tensor] = None,
        smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        ignore_index: int = -100,
        inplace_backward: bool = False,
        process_group: Group = None,
    ) -> tuple[Tensor, Tensor]:
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise ValueError(
                f"logits must be [n, V] and labels [n], got {tuple(logits.shape)} and {tuple(labels.shape)}"
            )
        num_columns = logits.shape[1]
        world_size, rank = _size_and_rank(process_group)
        num_classes = num_columns * world_size
        kept = labels != ignore_index
        _check_labels(labels, kept, num_classes)
        columns = labels.long() - rank * num_columns
        here = kept & (columns >= 0) & (columns < num_columns)  # the label's logit is on this rank
        columns = torch.where(here, columns, 0)

        dtype = torch.promote_types(logits.dtype, torch.float32)
        given_lse = precomputed_lse is not None and logit_scale == 1.0 and smoothing == 0.0
        lse = precomputed_lse.to(dtype, copy=True) if given_lse else logits.new_empty(logits.shape[0], dtype=dtype)
        target = logits.new_empty(logits.shape[0], dtype=dtype)  # (1 - e) c x_label + e / V sum_j c x_j
        for rows in _row_chunks(logits):
            x = logits[rows].to(dtype) * logit_scale
            if not given_lse:
                lse[rows] = x.logsumexp(-1)
            x_label = x.gather(1, columns[rows, None]).squeeze(1)
            target[rows] = torch.where(here[rows], (1 - smoothing) * x_label, 0.0)
            if smoothing:
                target[rows] += smoothing / num_classes * x.sum(-1)
        if world_size > 1:
            lse_of_ranks = [torch.empty_like(lse) for _ in range(world_size)]
            dist.all_gather(lse_of_ranks, lse, group=process_group)
            lse = torch.stack(lse_of_ranks).logsumexp(0)
            dist.all_reduce(target, group=process_group)

        # lse^2 overflows beyond 1.8e19 in fp32. Without a z-loss 0 * inf would be NaN.
        z_losses = torch.where(kept, lse_square_scale * lse * lse, 0.0) if lse_square_scale else torch.zeros_like(lse)
        losses = torch.where(kept, lse - target, 0.0) + z_losses
        ctx.save_for_backward(logits, lse, columns, kept, here)
        ctx.smoothing, ctx.logit_scale, ctx.lse_square_scale = smoothing, logit_scale, lse_square_scale
        ctx.num_classes, ctx.inplace_backward = num_classes, inplace_backward
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor, dz_losses: Tensor) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            dlogits = CrossEntropyLoss._gradient(ctx, dlosses, *saved)
        return (*without_second_derivative([dlogits], dlosses, *saved), *[None] * 8)

    @staticmethod
    def _gradient(ctx, dlosses, logits, lse, columns, kept, here):
        dlogits = logits if ctx.inplace_backward else torch.empty_like(logits)
        scale = torch.where(kept, dlosses * ctx.logit_scale, 0.0)  # ignored rows get zeros
        label_weight = torch.where(here, scale * (1 - ctx.smoothing), 0.0)
        for rows in _row_chunks(logits):
            p = torch.exp(logits[rows].to(lse.dtype) * ctx.logit_scale - lse[rows, None])
            if ctx.lse_square_scale:
                p *= 1 + 2 * ctx.lse_square_scale * lse[rows, None]
            if ctx.smoothing:
                p -= ctx.smoothing / ctx.num_classes
            p = torch.where(kept[rows, None], p * scale[rows, None], 0.0)
            dlogits[rows] = p.scatter_add_(1, columns[rows, None], -label_weight[rows, None])
        return dlogits


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Optional[Tensor] = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row of logits.

    Args:
        logits: ``[n, V]``, any floating dtype; this rank's columns with a process group.
        labels: ``[n]`` integers in ``[0, V)`` (over all ranks) or ``ignore_index``, whose rows cost 0.
        precomputed_lse: ``[n]`` log-sum-exp of the rows (of this rank's columns), used only with scale 1 and no
            smoothing.
        label_smoothing: share of the label's probability that is spread over all classes.
        logit_scale: c, multiplies the logits.
        lse_square_scale: w, weight of lse^2 (z-loss).
        ignore_index: label of the rows that do not count.
        inplace_backward: write the gradient over the logits' memory.
        process_group: ranks that share the vocabulary.
    Returns:
        (losses, z_losses), fp32 (fp64 for fp64) ``[n]`` each. losses contain z_losses. z_losses are for display and
        carry no gradient.
    Raises:
        ValueError: shapes that do not fit.
        IndexError: on CPU, a label outside the vocabulary. On other devices, such a row's loss lacks its label's term.
    Gradients for logits, in the dtype of logits. Second derivatives raise RuntimeError.
    Source: label smoothing, arXiv 1512.00567; z-loss, arXiv 2204.02311; vocabulary over ranks, arXiv 1909.08053.

    >>> logits, labels = torch.randn(4, 10), torch.tensor([3, -100, 0, 9])
    >>> losses, z_losses = cross_entropy_loss(logits, labels, logit_scale=2.0)
    >>> torch.allclose(losses, torch.nn.functional.cross_entropy(2 * logits, labels, reduction="none"))
    True
    """
    return CrossEntropyLoss.apply(
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )


def _size_and_rank(process_group):
    return (1, 0) if process_group is None else (dist.get_world_size(process_group), dist.get_rank(process_group))


def _row_chunks(logits):
    """Returns slices of rows. A slice has at most CHUNK_ELEMENTS logits, but at least one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(row, row + step) for row in range(0, logits.shape[0], step)]


def _check_labels(labels, kept, num_classes):
    """Refuses labels outside the vocabulary on the CPU, because reading values costs no synchronisation there."""
    if labels.device.type == "cpu":
        wrong = kept & ((labels < 0) | (labels >= num_classes))
        if wrong.any():
            raise IndexError(f"labels has {int(labels[wrong][0])}, allowed are 0 to {num_classes - 1} and ignore_index")
