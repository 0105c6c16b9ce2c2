"""Token, position and segment embeddings of GPT and BERT, whole or split over the ranks of a process group.

vocabulary parallel   weight [V / w, n]   a rank looks up its own tokens, zeros for others; the ranks are summed
column parallel       weight [V, n / w]   a rank looks up its columns of every token
"""

from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from flash_attn._types import Device, Group
from flash_attn.utils.distributed import all_reduce, reduce_scatter

__all__ = [
    "BertEmbeddings",
    "ColumnParallelEmbedding",
    "GPT2Embeddings",
    "ParallelGPT2Embeddings",
    "VocabParallelEmbedding",
]


class GPT2Embeddings(nn.Module):
    """word + position. ``max_position_embeddings`` 0 omits positions. ``word_embed_proj_dim`` is a narrower width.

    Args:
        embed_dim: width of the result.
        vocab_size, max_position_embeddings: rows of ``word_embeddings`` and of ``position_embeddings``.
        padding_idx: as of ``nn.Embedding``, for the words.
        word_embed_proj_dim: width of the words, which ``project_in``, without a bias, maps to embed_dim. None:
            embed_dim.
        device, dtype: of the parameters.

    >>> embeddings = GPT2Embeddings(embed_dim=16, vocab_size=100, max_position_embeddings=32)
    >>> embeddings(torch.tensor([[5, 1, 7]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: Optional[int] = None,
        word_embed_proj_dim: Optional[int] = None,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        layout = {"device": device, "dtype": dtype}
        word_dim = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, word_dim, padding_idx=padding_idx, **layout)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(word_dim, embed_dim, bias=False, **layout)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **layout)

    def forward(self, input_ids: Tensor, position_ids: Optional[Tensor] = None) -> Tensor:
        """``[b, s]`` -> ``[b, s, embed_dim]``; positions count from 0 unless given, ``[s]`` or ``[b, s]``.

        input_ids and position_ids are int32 or int64. The result has the dtype of the parameters.

        Raises:
            IndexError: on CPU, a token or position has no row.
        Gradients for the parameters.
        """
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        return embeddings


class BertEmbeddings(nn.Module):
    """word + position + token type. ``max_position_embeddings`` 0 and ``type_vocab_size`` 0 omit their part.

    Args:
        embed_dim: width of the result.
        vocab_size, max_position_embeddings, type_vocab_size: rows of ``word_embeddings``, ``position_embeddings`` and
            ``token_type_embeddings``.
        padding_idx: as of ``nn.Embedding``, for the words.
        device, dtype: of the parameters.

    >>> embeddings = BertEmbeddings(16, vocab_size=100, max_position_embeddings=32, type_vocab_size=2)
    >>> embeddings(torch.tensor([[5, 1, 7]]), token_type_ids=torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: Optional[int] = None,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        layout = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, **layout)
        self.max_position_embeddings, self.type_vocab_size = max_position_embeddings, type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **layout)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **layout)

    def forward(
        self, input_ids: Tensor, position_ids: Optional[Tensor] = None, token_type_ids: Optional[Tensor] = None
    ) -> Tensor:
        """``[b, s]`` -> ``[b, s, embed_dim]``; token types are 0 unless given.

        token_type_ids is ``[b, s]``; positions count from 0 unless given, ``[s]`` or ``[b, s]``. All are int32 or
        int64. The result has the dtype of the parameters.

        Raises:
            IndexError: on CPU, a token, position or type has no row.
        Gradients for the parameters.
        """
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            token_type_ids = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        return embeddings


class VocabParallelEmbedding(nn.Embedding):
    """This rank's part of the vocabulary. The caller sums the outputs over the ranks.

    Args:
        num_embeddings: V, tokens of the whole vocabulary. The weight is ``[V / w, n]`` on w ranks.
        process_group: ranks that share the vocabulary; None: this rank has all.
        padding_idx: as of ``nn.Embedding``; needs w = 1.
        The others: see ``nn.Embedding``.
    Raises:
        AssertionError: V is not a multiple of w, or padding_idx is given and w is not 1.
    Source: arXiv 1909.08053.

    >>> VocabParallelEmbedding(100, 16)(torch.tensor([[5, 1, 7]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        num_embeddings: int,
        *args: Any,
        process_group: Group = None,
        padding_idx: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        self.process_group = process_group
        if process_group is not None:
            world_size = dist.get_world_size(process_group)
            assert num_embeddings % world_size == 0, f"{num_embeddings} tokens do not divide over {world_size} ranks"
            assert world_size == 1 or padding_idx is None, "padding_idx is not supported over several ranks"
            num_embeddings //= world_size
        super().__init__(num_embeddings, *args, padding_idx=padding_idx, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """input ``[...]``, integers -> ``[..., n]``, 0 for the tokens of other ranks. Gradient for the weight."""
        if self.process_group is None:
            return super().forward(input)
        local = input - dist.get_rank(self.process_group) * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        return super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """This rank's columns of every embedding.

    Args:
        num_embeddings, embedding_dim: V and n of the whole layer. The weight is ``[V, n / w]`` on w ranks.
        process_group: ranks that share the columns; None: this rank has all.
        The others: see ``nn.Embedding``.
    Raises:
        AssertionError: n is not a multiple of w.

    >>> ColumnParallelEmbedding(100, 16)(torch.tensor([[5, 1, 7]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, process_group: Group = None, **kwargs: Any
    ) -> None:
        self.process_group = process_group
        if process_group is not None:
            world_size = dist.get_world_size(process_group)
            assert embedding_dim % world_size == 0, f"{embedding_dim} columns do not divide over {world_size} ranks"
            embedding_dim //= world_size
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)


class ParallelGPT2Embeddings(nn.Module):
    """``GPT2Embeddings`` with vocabulary parallel words and column parallel positions.

    Every rank adds its columns of the positions to its words. The sum over ranks is the embedding.

    Args:
        process_group: ranks that share words and positions.
        sequence_parallel: each rank gets its own rows of the first dimension. Otherwise every rank gets all rows.
        The others: see ``GPT2Embeddings``.
    Raises:
        AssertionError: vocab_size, or embed_dim if there are positions, is not a multiple of the number of ranks; or
            several ranks get a padding_idx.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> embeddings = ParallelGPT2Embeddings(16, 100, 32, torch.distributed.group.WORLD)
    >>> embeddings(torch.tensor([[5, 1, 7]]), combine_batch_seqlen_dim=True).shape
    torch.Size([3, 16])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: Group,
        padding_idx: Optional[int] = None,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        parallel = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, **parallel)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(max_position_embeddings, embed_dim, **parallel)

    def forward(
        self, input_ids: Tensor, position_ids: Optional[Tensor] = None, combine_batch_seqlen_dim: bool = False
    ) -> Tensor:
        """``[b, s]`` -> ``[b, s, n]``, or ``[b s, n]`` if combined. If sequence parallel, this rank's rows.

        The arguments are those of ``GPT2Embeddings.forward``. combine_batch_seqlen_dim joins the first two dimensions.

        Raises:
            AssertionError: sequence parallel, and the rows of the first dimension do not divide over the ranks.
            IndexError: on CPU, a position has no row.
        Gradients for the parameters.
        """
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            positions = self.position_embeddings(_positions(input_ids, position_ids))
            rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
            width = positions.shape[-1]
            left = rank * width
            embeddings = embeddings + F.pad(positions, (left, embeddings.shape[-1] - left - width))
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        if self.process_group is None or dist.get_world_size(self.process_group) == 1:
            return embeddings
        reduce = reduce_scatter if self.sequence_parallel else all_reduce
        return reduce(embeddings, self.process_group)


def _positions(input_ids, position_ids):
    return torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
