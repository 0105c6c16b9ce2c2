"""Images to tokens: cut ``[b, c, H, W]`` into patches and project each by one linear layer.

The result equals a convolution whose stride is its kernel size. The weight reshapes to ``[embed_dim, c, p, p]``.
Source: arXiv 2010.11929.
"""

from collections.abc import Sequence
from typing import Optional, Union

import torch.nn as nn
from torch import Tensor

from flash_attn._types import MakesModule

__all__ = ["PatchEmbed"]


class PatchEmbed(nn.Module):
    """``[b, c, H, W]`` -> ``[b, H / p * W / p, embed_dim]``; without ``flatten``, ``[b, H / p, W / p, embed_dim]``.

    Args:
        img_size, patch_size: pixels of the image and of a patch, one int or (rows, columns).
        in_chans: c, the image's channels.
        embed_dim: numbers of each token.
        norm_layer: called with embed_dim; the module normalises the tokens. None is no norm.
        flatten: one dimension of tokens instead of rows and columns.
        bias: whether the projection ``proj`` has a bias.
        fused_bias_fc: without effect.

    >>> embed = PatchEmbed(img_size=32, patch_size=8, in_chans=3, embed_dim=48)
    >>> embed(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 16, 48])
    """

    def __init__(
        self,
        img_size: Union[int, Sequence[int]] = 224,
        patch_size: Union[int, Sequence[int]] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Optional[MakesModule] = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        self.img_size, self.patch_size = _pair(img_size), _pair(patch_size)
        self.grid_size = (self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        self.proj = nn.Linear(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x ``[b, c, H, W]`` in the dtype of ``proj`` -> tokens, from left to right and from top to bottom.

        Raises:
            AssertionError: the image's size is not img_size.
            RuntimeError: the image's size is not a multiple of the patch's.
        Gradients for x and the parameters.
        """
        assert tuple(x.shape[-2:]) == self.img_size, f"image is {tuple(x.shape[-2:])}, the model's is {self.img_size}"
        rows, columns = self.patch_size
        patches = x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))  # [b, c, H / p, p, W / p, p]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [b, H / p, W / p, c p p]
        x = self.proj(patches)
        return self.norm(x.flatten(1, 2) if self.flatten else x)


def _pair(size):
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)
