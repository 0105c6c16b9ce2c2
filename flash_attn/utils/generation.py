"""Token by token generation with a KV cache.

A model called ``model(input_ids, position_ids=..., inference_params=..., num_last_tokens=1)`` returns an object with
``logits`` ``[b, 1, V]``. ``InferenceParams`` carries the caches of the layers and their number of tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import torch

__all__ = [
    "DecoderOutput",
    "GenerationMixin",
    "InferenceParams",
    "allocate_inference_cache",
    "decode",
    "modify_logit_for_repetition_penalty",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
]


@dataclass
class InferenceParams:
    """State of one generation, passed to every layer."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0  # tokens in the caches
    batch_size_offset: int = 0  # first row of the caches in use
    key_value_memory_dict: dict = field(default_factory=dict)  # layer_idx -> [max_batch_size, max_seqlen, 2, h_kv, d]
    lengths_per_sample: Optional[torch.Tensor] = None  # [max_batch_size] int32 if lengths differ, otherwise None

    def reset(self, max_seqlen, max_batch_size):
        """Start over with the same memory."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class DecoderOutput(NamedTuple):
    """The result of ``decode``."""

    sequences: torch.Tensor  # [b, length], prompt included
    scores: Optional[tuple]  # a tensor [b, V] for each new token, or None


def allocate_inference_cache(max_batch_size, max_seqlen, nheads, headdim, layers, device, dtype=torch.float16):
    """``{layer_idx: empty [max_batch_size, max_seqlen, 2, nheads, headdim]}``. ``layers``: a count or the indices."""
    sizes = max_batch_size, max_seqlen, 2, nheads, headdim
    return {
        i: torch.empty(sizes, device=device, dtype=dtype)
        for i in (range(layers) if isinstance(layers, int) else layers)
    }


def modify_logits_for_top_k_filtering(logits, top_k):
    """Set all but the ``top_k`` largest of each row to -inf, in place."""
    smallest_kept = logits.topk(top_k).values[..., -1:]
    logits.masked_fill_(logits < smallest_kept, float("-inf"))


def modify_logits_for_top_p_filtering(logits, top_p):
    """Keep the fewest largest logits of each row that reach ``top_p`` in (0, 1), and set others to -inf, in place."""
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, order = logits.sort(descending=False)
    below = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
    logits.masked_fill_(below.scatter(-1, order, below), float("-inf"))


def modify_logit_for_repetition_penalty(logits, prev_output_tokens, repetition_penalty=1.0):
    """Divide the positive and multiply the negative logits of tokens seen before, in place (arXiv 1909.05858)."""
    if repetition_penalty == 1.0:
        return logits
    seen = logits.gather(1, prev_output_tokens)
    seen = torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
    return logits.scatter_(1, prev_output_tokens, seen)


def sample(logits, top_k=1, top_p=0.0, temperature=1.0):
    """Draw a token for each row ``[b, V]`` -> ``[b]``: the largest if top_k is 1, or one of the filtered softmax."""
    if top_k == 1:
        return logits.argmax(dim=-1)
    assert top_p <= 1.0, f"top_p is {top_p}, at most 1 is allowed"
    logits = logits / temperature
    if top_k > 0:
        modify_logits_for_top_k_filtering(logits, min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    return torch.multinomial(logits.softmax(-1), num_samples=1).squeeze(-1)


@torch.inference_mode()
def decode(
    input_ids,
    model,
    max_length,
    top_k=1,
    top_p=0.0,
    temperature=1.0,
    repetition_penalty=1.0,
    eos_token_id=None,
    teacher_outputs=None,
    vocab_size=None,
    output_scores=False,
):
    """Extend ``input_ids`` ``[b, s]`` to ``max_length`` tokens, or until every sequence has drawn ``eos_token_id``.

    Args:
        teacher_outputs: ``[b, max_length]`` tokens to feed instead of the drawn ones, to compare scores.
        vocab_size: logits beyond it (padding of the vocabulary) are cut off.
        output_scores: also return the logits of each step.
    Returns:
        DecoderOutput.
    """
    batch, length = input_ids.shape
    params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    sequences, scores, step = input_ids, [], input_ids
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    while length < max_length:
        position_ids = None
        if params.seqlen_offset > 0:
            position_ids = torch.full((batch, 1), params.seqlen_offset, dtype=torch.long, device=input_ids.device)
        outputs = model(step, position_ids=position_ids, inference_params=params, num_last_tokens=1)
        logits = outputs.logits[:, -1, :vocab_size]
        params.seqlen_offset += step.shape[1]
        if repetition_penalty != 1.0:
            logits = modify_logit_for_repetition_penalty(logits.clone(), sequences, repetition_penalty)
        if output_scores:
            scores.append(logits.clone())
        if teacher_outputs is None or teacher_outputs.shape[1] <= length:
            tokens = sample(logits, top_k, top_p, temperature)
        else:
            tokens = teacher_outputs[:, length]
        step = tokens[:, None]
        sequences = torch.cat([sequences, step], dim=1)
        length += 1
        if eos_token_id is not None:
            finished |= tokens == eos_token_id
            if finished.all():
                break
    return DecoderOutput(sequences, tuple(scores) if output_scores else None)


class GenerationMixin:
    """Adds ``generate`` to a model."""

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} does not say how to allocate its caches")

    def generate(
        self,
        input_ids,
        max_length,
        top_k=1,
        top_p=0.0,
        temperature=1.0,
        return_dict_in_generate=False,
        output_scores=False,
        **kwargs,
    ):
        """Runs ``decode`` with this model. Returns the tokens, or DecoderOutput if ``return_dict_in_generate``."""
        output = decode(
            input_ids,
            self,
            max_length,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            output_scores=output_scores,
            **kwargs,
        )
        return output if return_dict_in_generate else output.sequences
