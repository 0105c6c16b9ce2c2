# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Any, Callable, Literal, NamedTuple, overload
from collections.abc import Iterable
from dataclasses import dataclass
import torch
from torch import Tensor
from flash_attn._types import Device

__all__ = [
    "DecoderOutput",
    "DecodingCGCache",
    "GenerationMixin",
    "InferenceParams",
    "allocate_inference_cache",
    "capture_graph",
    "decode",
    "decode_speculative",
    "modify_logit_for_repetition_penalty",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
    "sample_speculative",
    "update_graph_cache",
]
Step = Callable[[Tensor, Tensor, int], Tensor]
@dataclass
class InferenceParams:
    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = ...
    batch_size_offset: int = ...
    key_value_memory_dict: dict[int, Any] = ...
    lengths_per_sample: Tensor | None = ...
    def reset(self, max_seqlen: int, max_batch_size: int) -> None: ...
class DecoderOutput(NamedTuple):
    sequences: Tensor
    scores: tuple[Tensor, ...] | Tensor | None
def allocate_inference_cache(
    max_batch_size: int, max_seqlen: int, nheads: int, headdim: int, layers: int | Iterable[int], device: Device,
    dtype: torch.dtype = ...,
) -> dict[int, Tensor]: ...
def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None: ...
def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None: ...
def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = ...,
) -> Tensor: ...
def sample(logits: Tensor, top_k: int = ..., top_p: float = ..., temperature: float = ...) -> Tensor: ...
def decode(
    input_ids: Tensor, model: Any, max_length: int, top_k: int = ..., top_p: float = ..., temperature: float = ...,
    eos_token_id: int | None = ..., teacher_outputs: Tensor | None = ..., vocab_size: int | None = ...,
    tensor_parallel: int = ..., cg: bool = ..., enable_timing: bool = ..., *, repetition_penalty: float = ...,
) -> DecoderOutput: ...
def sample_speculative(
    logits: Tensor, logits_draft: Tensor, tokens_draft: Tensor, top_k: int = ..., top_p: float = ...,
    temperature: float = ...,
) -> tuple[Tensor, Tensor]: ...
def decode_speculative(
    input_ids: Tensor, model: Any, model_draft: Any, max_length: int, speculative_lookahead: int = ...,
    top_k: int = ..., top_p: float = ..., temperature: float = ..., eos_token_id: int | None = ...,
    vocab_size: int | None = ..., tensor_parallel: int = ..., cg: bool = ..., enable_timing: bool = ...,
    debug: bool = ...,
) -> DecoderOutput: ...
@dataclass
class DecodingCGCache:
    max_batch_size: int = ...
    max_seqlen: int = ...
    device: torch.device | None = ...
    dtype: torch.dtype | None = ...
    callables: dict[tuple[int, int], Step] = ...
    mempool: tuple[int, int] | None = ...
    inference_params: InferenceParams | None = ...
    run: Step | None = ...
    def __reduce__(self) -> tuple[Any, ...]: ...
def update_graph_cache(
    model: Any, cache: DecodingCGCache | None, batch_size: int, seqlen_og: int, max_seqlen: int,
    decoding_seqlens: Iterable[int] = ..., tensor_parallel: int = ..., dtype: torch.dtype | None = ...,
    n_warmups: int = ...,
) -> DecodingCGCache: ...
def capture_graph(
    model: Any, inference_params: InferenceParams, batch_size: int, max_seqlen: int, decoding_seqlen: int = ...,
    mempool: Any = ..., n_warmups: int = ...,
) -> Step: ...
class GenerationMixin:
    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = ..., **kwargs: Any,
    ) -> Any: ...
    @overload
    def generate(
        self, input_ids: Tensor, max_length: int, top_k: int = ..., top_p: float = ..., temperature: float = ...,
        return_dict_in_generate: Literal[False] = ..., output_scores: bool = ..., **kwargs: Any,
    ) -> Tensor: ...
    @overload
    def generate(
        self, input_ids: Tensor, max_length: int, top_k: int = ..., top_p: float = ..., temperature: float = ..., *,
        return_dict_in_generate: Literal[True], output_scores: bool = ..., **kwargs: Any,
    ) -> DecoderOutput: ...
    @overload
    def generate(
        self, input_ids: Tensor, max_length: int, top_k: int = ..., top_p: float = ..., temperature: float = ...,
        return_dict_in_generate: bool = ..., output_scores: bool = ..., **kwargs: Any,
    ) -> Tensor | DecoderOutput: ...
