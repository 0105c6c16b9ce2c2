"""Transformer blocks that keep the residual stream beside the hidden states.

    prenorm    r += dropout(x);  x = mixer(norm1(r));  r += dropout(x);  x = mlp(norm2(r))        returns (x, r)
    postnorm   x = norm1(x + dropout(mixer(x)));  x = norm2(x + dropout(mlp(x)))                  returns x
    parallel   r += dropout(x1) + dropout(x2);  x1 = mixer(norm1(r));  x2 = mlp(norm2(r))         returns (x1, x2, r)

In the prenorm and parallel forms, the next block does the last dropout and addition at its start.
"""

from functools import partial
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn._types import MakesModule
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp

__all__ = ["Block", "ParallelBlock", "StochasticDepth"]


class StochasticDepth(nn.Module):
    """In training, zero whole samples ``x[i]`` with probability p and scale the others by 1 / (1 - p).

    Source: arXiv 1603.09382.

    >>> dropped = StochasticDepth(0.5)(torch.ones(4, 2))
    >>> bool(((dropped == 0) | (dropped == 2)).all())
    True
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x ``[b, ...]`` -> the same shape and dtype. In evaluation or with p 0, x itself. Gradient for x."""
        if not self.training or self.p == 0.0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= self.p
        return torch.where(kept, x / (1.0 - self.p), 0.0) if self.p < 1.0 else torch.zeros_like(x)


class Block(nn.Module):
    """Mixer and MLP one after the other.

    Args:
        dim: n, the width of the hidden states.
        mixer_cls, mlp_cls, norm_cls: called with ``dim``. The defaults are MHA with heads of 64, Mlp with 4 dim hidden
            features, and nn.LayerNorm. ``mlp_cls=nn.Identity`` leaves out the MLP with its norm.
        dropout_cls: called with a dropout probability.
        prenorm: the form of the block, as above; otherwise postnorm.
        resid_dropout1, drop_path1: dropout of single values and of whole samples before the first norm.
        resid_dropout2, drop_path2: the same before the second norm.
        fused_dropout_add_ln: without effect.
        return_residual: mixer and MLP return (output, input). This works for postnorm only.
        residual_in_fp32: keep the residual in fp32; prenorm only.
        sequence_parallel, mark_shared_params: mark the norms' parameters for ``utils.distributed``.
    Raises:
        AssertionError: residual_in_fp32 without prenorm.

    >>> first, second = Block(128), Block(128)
    >>> x, residual = second(*first(torch.randn(2, 5, 128)))
    >>> x.shape, residual.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 5, 128]))
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Optional[MakesModule] = None,
        mlp_cls: Optional[MakesModule] = None,
        norm_cls: MakesModule = nn.LayerNorm,
        dropout_cls: MakesModule = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        assert prenorm or not residual_in_fp32, "residual_in_fp32 needs prenorm"
        self.prenorm, self.return_residual, self.residual_in_fp32 = prenorm, return_residual, residual_in_fp32
        self.mixer, self.mlp = _mixer_and_mlp(dim, mixer_cls, mlp_cls)
        self.dropout1, self.drop_path1, self.norm1 = (
            dropout_cls(resid_dropout1),
            StochasticDepth(drop_path1),
            norm_cls(dim),
        )
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2, self.drop_path2 = dropout_cls(resid_dropout2), StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Optional[torch.dtype] = None, **kwargs: Any
    ) -> Any:
        """The mixer's cache for ``batch_size`` sequences of ``max_seqlen`` tokens.

        Returns what the mixer's method of this name returns. dtype and kwargs are its arguments.
        """
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Optional[Tensor] = None,
        mixer_subset: Any = None,
        mixer_kwargs: Optional[dict[str, Any]] = None,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """``[b, s, n]`` (or ``[t, n]``), prenorm with the residual or None.

        Args:
            mixer_subset: the tokens whose outputs are needed. After the mixer the residual keeps only these tokens.
            mixer_kwargs: further arguments of the mixer.
        Returns:
            prenorm (hidden states, residual), postnorm the hidden states; each has the shape of the input, or the
            tokens of mixer_subset. The residual is fp32 with residual_in_fp32.
        Raises:
            AssertionError: a postnorm block gets a residual.
        Gradients for hidden_states, the residual and the parameters.
        """
        kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        if not self.prenorm:
            return self._forward_postnorm(hidden_states, residual, kwargs)
        x, residual = self._add_norm(hidden_states, residual, self.dropout1, self.drop_path1, self.norm1)
        x = self.mixer(x, **kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            x, residual = self._add_norm(x, residual, self.dropout2, self.drop_path2, self.norm2)
            x = self.mlp(x)
        return x, residual

    def _forward_postnorm(self, x, residual, kwargs):
        assert residual is None, "a postnorm block takes no residual"
        y, x = self.mixer(x, **kwargs) if self.return_residual else (self.mixer(x, **kwargs), x)
        if "mixer_subset" in kwargs and x.shape != y.shape:
            x = x[:, kwargs["mixer_subset"]]
        x = self.norm1((self.drop_path1(self.dropout1(y)) + x).to(self.norm1.weight.dtype))
        if isinstance(self.mlp, nn.Identity):
            return x
        y, x = self.mlp(x) if self.return_residual else (self.mlp(x), x)
        return self.norm2((self.drop_path2(self.dropout2(y)) + x).to(self.norm2.weight.dtype))

    def _add_norm(self, x, residual, dropout, drop_path, norm):
        x = drop_path(dropout(x))
        residual = x if residual is None else x + residual
        y = norm(residual.to(norm.weight.dtype))
        return y, residual.float() if self.residual_in_fp32 else residual


class ParallelBlock(nn.Module):
    """Mixer and MLP side by side on the same residual. ``tied_norm``: one norm for both. See ``Block``.

    Args:
        resid_dropout1, resid_dropout2: dropout of the last block's mixer and of its MLP.
        tied_norm: ``norm1`` for mixer and MLP. Otherwise the MLP has ``norm2``.
        residual_in_fp32: return the residual in fp32.
        The others: see ``Block``.

    >>> first, second = ParallelBlock(128), ParallelBlock(128)
    >>> x1, x2, residual = second(*first(torch.randn(2, 5, 128)))
    >>> x1.shape, x2.shape, residual.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 5, 128]), torch.Size([2, 5, 128]))
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Optional[MakesModule] = None,
        mlp_cls: Optional[MakesModule] = None,
        norm_cls: MakesModule = nn.LayerNorm,
        dropout_cls: MakesModule = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm, self.residual_in_fp32 = tied_norm, residual_in_fp32
        self.mixer, self.mlp = _mixer_and_mlp(dim, mixer_cls, mlp_cls)
        self.dropout1, self.dropout2 = dropout_cls(resid_dropout1), dropout_cls(resid_dropout2)
        self.norm1 = norm_cls(dim)
        if not tied_norm:
            self.norm2 = norm_cls(dim)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Optional[torch.dtype] = None, **kwargs: Any
    ) -> Any:
        """The mixer's cache for ``batch_size`` sequences of ``max_seqlen`` tokens.

        Returns what the mixer's method of this name returns. dtype and kwargs are its arguments.
        """
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        mixer_kwargs: Optional[dict[str, Any]] = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the last block's mixer and MLP (None for the first) and the residual, ``[b, s, n]`` each.

        Args:
            hidden_states1, hidden_states2, residual: as above. The first block gets the embeddings as hidden_states1.
            mixer_kwargs: further arguments of the mixer.
        Returns:
            (output of the mixer, output of the MLP, residual), ``[b, s, n]`` each.
        Gradients for the three inputs and the parameters.
        """
        x = self.dropout1(hidden_states1)
        if hidden_states2 is not None:
            x = x + self.dropout2(hidden_states2)
        residual = x if residual is None else x + residual
        y1 = self.norm1(residual.to(self.norm1.weight.dtype))
        y2 = y1 if self.tied_norm else self.norm2(residual.to(self.norm2.weight.dtype))
        residual = residual.float() if self.residual_in_fp32 else residual
        return self.mixer(y1, **(mixer_kwargs or {})), self.mlp(y2), residual


def _mixer_and_mlp(dim, mixer_cls, mlp_cls):
    mixer_cls = partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls
    mlp_cls = partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls
    return mixer_cls(dim), mlp_cls(dim)


def _mark_norms(block, sequence_parallel, shared):
    """Sets flags for ``utils.distributed``: gradients to sum, and parameters to keep equal on the ranks."""
    for norm in (block.norm1, getattr(block, "norm2", None)):
        for param in () if norm is None else norm.parameters():
            if sequence_parallel:
                param._sequence_parallel = True
            if shared:
                param._shared_params = True
