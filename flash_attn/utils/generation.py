"""Token by token generation with a KV cache.

A model called ``model(input_ids, position_ids=..., inference_params=..., num_last_tokens=1)`` returns an object with
``logits`` ``[b, 1, V]``. ``InferenceParams`` carries the caches of the layers and their number of tokens.
"""

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional, Union

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

# Of a step: (input_ids, position_ids, tokens in the caches) -> logits.
Step = Callable[[Tensor, Tensor, int], Tensor]


@dataclass
class InferenceParams:
    """State of one generation, passed to every layer.

    Args:
        max_seqlen, max_batch_size: tokens and sequences for which the caches have room.
        seqlen_offset: tokens in the caches.
        batch_size_offset: first row of the caches in use.
        key_value_memory_dict: for each layer_idx its cache ``[max_batch_size, max_seqlen, 2, h_kv, d]``.
        lengths_per_sample: int32 ``[max_batch_size]``, tokens in the caches, if the sequences differ; otherwise None.

    >>> params = InferenceParams(max_seqlen=128, max_batch_size=2, seqlen_offset=7)
    >>> params.reset(256, 2)
    >>> params.max_seqlen, params.seqlen_offset
    (256, 0)
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0  # tokens in the caches
    batch_size_offset: int = 0  # first row of the caches in use
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)  # [max_batch_size, max_seqlen, 2, h_kv, d]
    lengths_per_sample: Optional[Tensor] = None  # [max_batch_size] int32 if lengths differ, otherwise None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start over with the same memory.

        max_seqlen and max_batch_size are set. seqlen_offset and lengths_per_sample become 0. The caches stay as they
        are.
        """
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class DecoderOutput(NamedTuple):
    """The result of ``decode``.

    Args:
        sequences: tokens ``[b, length]``, prompt included.
        scores: a tensor ``[b, V]`` for each new token. ``decode_speculative`` returns one tensor
            ``[1, new tokens, V]``. A ``generate`` without output_scores returns None.

    >>> sequences, scores = DecoderOutput(torch.tensor([[1, 2, 3]]), None)
    >>> sequences.shape
    torch.Size([1, 3])
    """

    sequences: Tensor  # [b, length], prompt included
    # a tensor [b, V] for each new token; None from a ``generate`` without output_scores
    scores: Union[tuple[Tensor, ...], Tensor, None]


def allocate_inference_cache(
    max_batch_size: int,
    max_seqlen: int,
    nheads: int,
    headdim: int,
    layers: Union[int, Iterable[int]],
    device: Device,
    dtype: torch.dtype = torch.float16,
) -> dict[int, Tensor]:
    """``{layer_idx: empty [max_batch_size, max_seqlen, 2, nheads, headdim]}``. ``layers``: a count or the indices.

    nheads is the number of heads of k and v. The memory is not initialised.

    >>> caches = allocate_inference_cache(2, 128, nheads=4, headdim=64, layers=3, device="cpu")
    >>> list(caches), caches[0].shape
    ([0, 1, 2], torch.Size([2, 128, 2, 4, 64]))
    """
    sizes = max_batch_size, max_seqlen, 2, nheads, headdim
    return {
        i: torch.empty(sizes, device=device, dtype=dtype)
        for i in (range(layers) if isinstance(layers, int) else layers)
    }


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the ``top_k`` largest of each row to -inf, in place.

    logits is ``[..., V]``. Logits equal to the smallest of these are kept, too.

    Raises:
        RuntimeError: top_k exceeds V.

    >>> logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    >>> modify_logits_for_top_k_filtering(logits, 2)
    >>> logits
    tensor([[-inf, 4., -inf, 3.]])
    """
    smallest_kept = logits.topk(top_k).values[..., -1:]
    logits.masked_fill_(logits < smallest_kept, float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Keep the fewest largest logits of each row that reach ``top_p`` in (0, 1), and set others to -inf, in place.

    logits is ``[..., V]``. With other values of top_p nothing changes.
    Source: arXiv 1904.09751.

    >>> logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    >>> modify_logits_for_top_p_filtering(logits, 0.8)
    >>> logits.exp()
    tensor([[0.0000, 0.6000, 0.3000]])
    """
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, order = logits.sort(descending=False)
    below = ascending.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).cumsum(-1) <= 1.0 - top_p
    below[..., -1] = False  # the largest logit stays, also where the sum before it rounds to 1
    logits.masked_fill_(below.scatter(-1, order, below), float("-inf"))


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """Divide the positive and multiply the negative logits of tokens seen before, in place (arXiv 1909.05858).

    Args:
        logits: ``[b, V]``.
        prev_output_tokens: ``[b, s]`` tokens, int64.
        repetition_penalty: the factor; 1 changes nothing.
    Returns:
        logits.

    >>> logits = torch.tensor([[2.0, -2.0, 1.0]])
    >>> modify_logit_for_repetition_penalty(logits, torch.tensor([[0, 1]]), 2.0)
    tensor([[ 1., -4.,  1.]])
    """
    if repetition_penalty == 1.0:
        return logits
    seen = logits.gather(1, prev_output_tokens)
    seen = torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
    return logits.scatter_(1, prev_output_tokens, seen)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Draw a token for each row ``[b, V]`` -> ``[b]``: the largest if top_k is 1, or one of the filtered softmax.

    Args:
        logits: ``[b, V]``, any floating dtype. They are not changed.
        top_k: number of the largest logits to draw from; 0: all.
        top_p: draw from the fewest tokens whose probabilities reach top_p together; 0 and 1: from all.
        temperature: divides the logits.
    Returns:
        int64 ``[b]``. Tokens are drawn with torch's default generator of the device.
    Raises:
        AssertionError: top_p exceeds 1 and top_k is not 1.

    >>> sample(torch.tensor([[1.0, 4.0, 2.0]]))
    tensor([1])
    >>> int(sample(torch.tensor([[1.0, 4.0, 2.0]]), top_k=2, temperature=0.7)) in (1, 2)
    True
    """
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
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: Optional[int] = None,
    teacher_outputs: Optional[Tensor] = None,
    vocab_size: Optional[int] = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    *,
    repetition_penalty: float = 1.0,
) -> DecoderOutput:
    """Extend ``input_ids`` ``[b, s]`` to ``max_length`` tokens, or until every sequence has drawn ``eos_token_id``.

    Args:
        input_ids: tokens ``[b, s]``, the prompt.
        model: called as the first lines of ``utils.generation`` say.
        max_length: tokens of the result, prompt included.
        top_k, top_p, temperature: as of ``sample``.
        eos_token_id: ends a sequence. A sequence that has ended draws on until all have ended. None: no token ends a
            sequence.
        teacher_outputs: ``[b, max_length]`` tokens to feed instead of the drawn ones, to compare scores.
        vocab_size: logits beyond it (padding of the vocabulary) are cut off.
        tensor_parallel: ranks that share the model's heads. They wait for each other around the timing.
        cg: take the steps from a CUDA graph, see ``update_graph_cache``. The model keeps it for the next call.
        enable_timing: print the time of prompt and decoding.
        repetition_penalty: as of ``modify_logit_for_repetition_penalty``.
    Returns:
        DecoderOutput. Its sequences are ``[b, length]``, prompt included. Its scores are the logits ``[b, V]`` of each
        step, after vocab_size and repetition_penalty.
    Raises:
        AssertionError: as of ``sample``.
    There are no gradients.

    >>> from types import SimpleNamespace
    >>> def model(tokens, **_):  # the next token is the last one plus 1
    ...     return SimpleNamespace(logits=torch.eye(5)[(tokens + 1) % 5])
    >>> decode(torch.tensor([[0, 1]]), model, max_length=6).sequences
    tensor([[0, 1, 2, 3, 4, 0]])
    """
    batch, length = input_ids.shape
    _, logits_of = _stepper(model, batch, length, max_length, cg, (1,), tensor_parallel)
    started = _now(input_ids.device, tensor_parallel) if enable_timing else 0.0
    sequences, scores, step = input_ids, [], input_ids
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    while length < max_length:
        logits = logits_of(step)[:, -1, :vocab_size]
        if repetition_penalty != 1.0:
            logits = modify_logit_for_repetition_penalty(logits.clone(), sequences, repetition_penalty)
        scores.append(logits)
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
    if enable_timing:
        milliseconds = 1000 * (_now(input_ids.device, tensor_parallel) - started)
        print(f"Prompt processing + decoding time: {milliseconds:.0f}ms")
    return DecoderOutput(sequences, tuple(scores))


def sample_speculative(
    logits: Tensor,
    logits_draft: Tensor,
    tokens_draft: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Accept or replace drafted tokens, so that tokens are distributed as those of the model (arXiv 2211.17192).

    Args:
        logits: ``[b, s + 1, V]`` of the model. logits_draft: ``[b, s, V]`` of the draft. tokens_draft: ``[b, s]``.
        top_k, top_p, temperature: as of ``sample``; the draft was drawn with them, too.
    Returns:
        (tokens ``[b, s + 1]``, their number ``[b]``, 1 to s + 1): the accepted tokens, and one drawn behind them. The
        entries after this number have no meaning. tokens has the dtype of tokens_draft, and the number is int64.
    Raises:
        AssertionError: the shapes do not fit.

    >>> logits, drafted = torch.eye(5)[torch.tensor([[1, 2, 4]])], torch.tensor([[1, 3]])
    >>> sample_speculative(logits, torch.eye(5)[drafted], drafted)[1] <= 3
    tensor([True])
    """
    batch, drafted = tokens_draft.shape
    assert logits.shape == (batch, drafted + 1, logits_draft.shape[-1]), (
        f"logits is {tuple(logits.shape)}, logits_draft {tuple(logits_draft.shape)}, tokens_draft {batch, drafted}"
    )
    p, p_draft = (_probabilities(x, top_k, top_p, temperature) for x in (logits, logits_draft))
    index = tokens_draft.long().unsqueeze(-1)
    chance, chance_draft = p[:, :-1].gather(-1, index).squeeze(-1), p_draft.gather(-1, index).squeeze(-1)
    accepted = torch.rand_like(chance) * chance_draft <= chance
    count = accepted.int().cumprod(1).sum(1)
    # Behind the accepted tokens: what the draft lacks of the model's distribution, or the model's own at the end.
    lacking = torch.cat([(p[:, :-1] - p_draft).clamp(min=0), p[:, -1:]], dim=1)
    rows = torch.arange(batch, device=logits.device)
    drawn = torch.multinomial(lacking[rows, count], num_samples=1).squeeze(-1)
    tokens = torch.cat([tokens_draft, torch.zeros_like(tokens_draft[:, :1])], dim=1)
    tokens[rows, count] = drawn.to(tokens.dtype)
    return tokens, count + 1


@torch.inference_mode()
def decode_speculative(
    input_ids: Tensor,
    model: Any,
    model_draft: Any,
    max_length: int,
    speculative_lookahead: int = 3,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: Optional[int] = None,
    vocab_size: Optional[int] = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    debug: bool = False,
) -> DecoderOutput:
    """``decode`` of one sequence, whose tokens a smaller model drafts, ``speculative_lookahead`` at a time.

    Args:
        input_ids: ``[1, s]``. eos_token_id: must be None. debug: print the tokens of each step.
        model, model_draft: the model, and the smaller model with the same vocabulary.
        The others are those of ``decode``.
    Returns:
        DecoderOutput. Its scores are one tensor ``[1, new tokens, V]``, the model's logits. Without new tokens they are
        ().
    Raises:
        AssertionError: input_ids has several sequences, eos_token_id is given, or as of ``sample``.
    There are no gradients.
    Source: arXiv 2211.17192.

    >>> from types import SimpleNamespace
    >>> def model(tokens, **_):  # the next token is the last one plus 1
    ...     return SimpleNamespace(logits=torch.eye(5)[(tokens + 1) % 5])
    >>> decode_speculative(torch.tensor([[0, 1]]), model, model, max_length=6).sequences
    tensor([[0, 1, 2, 3, 4, 0]])
    """
    assert input_ids.shape[0] == 1, f"input_ids has {input_ids.shape[0]} sequences, 1 is allowed"
    assert eos_token_id is None, "decode_speculative does not take an eos_token_id"
    length, sampling = input_ids.shape[1], (top_k, top_p, temperature)
    params, logits_of = _stepper(model, 1, length, max_length, cg, range(1, speculative_lookahead + 2), tensor_parallel)
    params_draft, draft_logits_of = _stepper(model_draft, 1, length, max_length, cg, (1, 2), tensor_parallel)
    started = _now(input_ids.device, tensor_parallel) if enable_timing else 0.0
    sequences, scores, calls = input_ids, [], 0
    while sequences.shape[1] < max_length:
        length, drafted, drafts = sequences.shape[1], sequences, []
        for _ in range(min(speculative_lookahead, max_length - length - 1)):
            drafts.append(draft_logits_of(drafted[:, params_draft.seqlen_offset :])[..., :vocab_size])
            drafted = torch.cat([drafted, sample(drafts[-1][:, -1], *sampling)[:, None]], dim=1)
        logits = logits_of(drafted[:, params.seqlen_offset :], len(drafts) + 1)[..., :vocab_size]
        calls += 1
        if drafts:
            tokens, count = sample_speculative(logits, torch.cat(drafts, 1), drafted[:, length:], *sampling)
            tokens = tokens[:, : int(count)]
        else:
            tokens = sample(logits[:, -1], *sampling)[:, None]
        if debug:
            print(tokens)
        scores.append(logits[:, : tokens.shape[1]])
        sequences = torch.cat([sequences, tokens], dim=1)
        # The caches keep what both agree on. The last token has not been in a model yet.
        params.seqlen_offset = sequences.shape[1] - 1
        params_draft.seqlen_offset = min(params_draft.seqlen_offset, sequences.shape[1] - 1)
    if enable_timing:
        milliseconds = 1000 * (_now(input_ids.device, tensor_parallel) - started)
        print(f"Prompt processing + decoding time: {milliseconds:.0f}ms")
        print(f"Number of calls to main model: {calls}")
    return DecoderOutput(sequences, torch.cat(scores, dim=1) if scores else ())


def _probabilities(logits, top_k, top_p, temperature):
    """The distribution that ``sample`` draws from, ``[b, s, V]``."""
    flat = (logits / temperature).flatten(0, 1)
    if top_k > 0:
        modify_logits_for_top_k_filtering(flat, min(top_k, flat.shape[-1]))
    modify_logits_for_top_p_filtering(flat, top_p)
    return flat.softmax(-1).view_as(logits)


def _stepper(model, batch, length, max_length, cg, decoding_seqlens, tensor_parallel):
    """(inference_params, function): the function of tokens ``[b, n]`` behind the cached ones returns their logits."""
    cache = None
    if cg:
        cache = update_graph_cache(
            model, getattr(model, "_decoding_cache", None), batch, length, max_length, decoding_seqlens, tensor_parallel
        )
        model._decoding_cache = cache
        cache.inference_params.reset(max_length, batch)
    params = cache.inference_params if cg else InferenceParams(max_seqlen=max_length, max_batch_size=batch)

    def logits_of(tokens, num_last_tokens=1):
        first, last = params.seqlen_offset, params.seqlen_offset + tokens.shape[1]
        position_ids = None
        if first > 0:
            position_ids = torch.arange(first, last, device=tokens.device).expand_as(tokens)
        if cg and first > 0:
            logits = cache.run(tokens, position_ids, first)
        else:
            logits = model(
                tokens, position_ids=position_ids, inference_params=params, num_last_tokens=num_last_tokens
            ).logits
        params.seqlen_offset = last
        return logits[:, -num_last_tokens:]

    return params, logits_of


@dataclass
class DecodingCGCache:
    """The graphs of a model's decoding steps, and the caches that the graphs read and write.

    The graphs read this model's weights. So a copy of a ``DecodingCGCache`` is empty, and so is one that was pickled.

    Args:
        max_batch_size, max_seqlen: sequences and tokens for which the caches have room.
        device, dtype: of the caches.
        callables: the steps, by batch and tokens of a step.
        mempool: CUDA memory pool of the graphs; None on the CPU.
        inference_params: the caches, and their number of tokens.
        run: function of (input_ids, position_ids, tokens in the caches), which returns logits.

    >>> DecodingCGCache().callables
    {}
    """

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: Optional[torch.device] = None
    dtype: Optional[torch.dtype] = None
    callables: dict[tuple[int, int], Step] = field(default_factory=dict)  # by batch and tokens of a step
    mempool: Optional[tuple[int, int]] = None
    inference_params: Optional[InferenceParams] = None
    run: Optional[Step] = None
    _model = None  # a weak reference to the model

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@torch.inference_mode()
def update_graph_cache(
    model: Any,
    cache: Optional["DecodingCGCache"],
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Iterable[int] = (1,),
    tensor_parallel: int = 1,
    dtype: Optional[torch.dtype] = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """A ``DecodingCGCache`` with a graph for each step of ``decoding_seqlens`` tokens.

    Args:
        model: a module, called as the first lines of ``utils.generation`` say. It has ``allocate_inference_cache`` or a
            transformers ``config``.
        cache: a former result, whose graphs are kept if its memory is large enough and of the same kind, or None. A
            result of another model is left as it is, and a new one is made.
        batch_size: sequences of a step.
        seqlen_og: tokens of the prompt.
        max_seqlen: tokens that the caches must hold.
        decoding_seqlens: numbers of tokens of a step.
        tensor_parallel: ranks that share the heads of a model without ``allocate_inference_cache``.
        dtype: of the caches, by default the dtype of the first parameter.
        n_warmups: calls of the model before a graph is recorded.
    Returns:
        The cache. Its ``run`` does a step. On the CPU there are no graphs, and ``run`` calls the model.
    There are no gradients.

    >>> from types import SimpleNamespace
    >>> class Model(torch.nn.Embedding):
    ...     config = SimpleNamespace(num_attention_heads=2, hidden_size=16, num_hidden_layers=1)
    ...     def forward(self, tokens, **_):
    ...         return SimpleNamespace(logits=super().forward(tokens))
    >>> cache = update_graph_cache(Model(5, 5), None, batch_size=1, seqlen_og=2, max_seqlen=8)
    >>> with torch.inference_mode():
    ...     cache.run(torch.tensor([[3]]), torch.tensor([[2]]), 2).shape
    torch.Size([1, 1, 5])
    """
    if cache is None or (cache._model is not None and cache._model() is not model):
        cache = DecodingCGCache()
    cache._model = weakref.ref(model)
    parameter = next(iter(model.parameters()))
    device, dtype = parameter.device, dtype or parameter.dtype
    enough = batch_size <= cache.max_batch_size and max_seqlen <= cache.max_seqlen
    if not enough or (device, dtype) != (cache.device, cache.dtype):
        cache.callables, cache.mempool, cache.inference_params = {}, None, None  # free the memory before asking again
        cache.device, cache.dtype, cache.max_batch_size, cache.max_seqlen = device, dtype, batch_size, max_seqlen
        if hasattr(model, "allocate_inference_cache"):
            caches = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
        else:
            caches = _caches_of_config(model.config, batch_size, max_seqlen, tensor_parallel, device, dtype)
        cache.inference_params = InferenceParams(
            max_seqlen=max_seqlen,
            max_batch_size=batch_size,
            seqlen_offset=seqlen_og,
            key_value_memory_dict=caches,
            lengths_per_sample=torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=device),
        )
        cache.mempool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for tokens in decoding_seqlens:
        if (batch_size, tokens) not in cache.callables:
            cache.callables[batch_size, tokens] = capture_graph(
                model, cache.inference_params, batch_size, cache.max_seqlen, tokens, cache.mempool, n_warmups
            )

    def run(input_ids, position_ids, seqlen):
        return cache.callables[tuple(input_ids.shape[:2])](input_ids, position_ids, seqlen)

    cache.run = run
    cache.inference_params.seqlen_offset = 0
    return cache


def capture_graph(
    model: Any,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: Any = None,
    n_warmups: int = 2,
) -> Step:
    """Record a step of ``decoding_seqlen`` tokens as a CUDA graph, in memory of ``mempool``.

    Args:
        model: a module, called as the first lines of ``utils.generation`` say.
        inference_params: the caches, with lengths_per_sample.
        batch_size, max_seqlen: sequences of a step, and tokens for which the caches have room.
        decoding_seqlen: tokens of a step.
        mempool: a handle of ``torch.cuda.graph_pool_handle``, or None for memory of its own.
        n_warmups: calls of the model before the graph is recorded.
    Returns:
        A function of (input_ids ``[b, decoding_seqlen]``, position_ids likewise, tokens in the caches), which returns
        logits ``[b, decoding_seqlen, V]``. On the CPU the function calls the model.

    >>> from types import SimpleNamespace
    >>> class Model(torch.nn.Embedding):
    ...     def forward(self, tokens, **_):
    ...         return SimpleNamespace(logits=super().forward(tokens))
    >>> params = InferenceParams(8, 1, lengths_per_sample=torch.zeros(1, dtype=torch.int32))
    >>> step = capture_graph(Model(5, 5), params, batch_size=1, max_seqlen=8)
    >>> step(torch.tensor([[3]]), torch.tensor([[2]]), 2).shape
    torch.Size([1, 1, 5])
    """
    device = next(iter(model.parameters())).device
    input_ids = torch.zeros(batch_size, decoding_seqlen, dtype=torch.long, device=device)
    position_ids = torch.zeros_like(input_ids)
    lengths = inference_params.lengths_per_sample

    def step(input_ids, position_ids):
        return model(
            input_ids,
            position_ids=position_ids,
            inference_params=inference_params,
            num_last_tokens=decoding_seqlen,
        ).logits

    def run_model(new_input_ids, new_position_ids, seqlen):
        before, inference_params.seqlen_offset = inference_params.seqlen_offset, seqlen
        lengths.fill_(seqlen)
        logits = step(new_input_ids, new_position_ids)
        inference_params.seqlen_offset = before
        return logits

    if device.type != "cuda":
        return run_model

    # The graph holds the longest step. What depends on the true lengths reads ``lengths``.
    before, inference_params.seqlen_offset = inference_params.seqlen_offset, max_seqlen - decoding_seqlen
    lengths.fill_(inference_params.seqlen_offset)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(n_warmups):
            step(input_ids, position_ids)
        stream.synchronize()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=mempool):
        logits = step(input_ids, position_ids)
    inference_params.seqlen_offset = before
    # NOTE: the graph reads rotary tables where they lay. A longer sequence replaces the tables, so they are kept here.
    tables = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]

    def replay(new_input_ids, new_position_ids, seqlen):
        lengths.fill_(seqlen)
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        return logits.clone()

    replay.tables = tables
    return replay


def _caches_of_config(config, batch_size, max_seqlen, tensor_parallel, device, dtype):
    """Caches for a model that has a transformers config and no ``allocate_inference_cache``."""
    heads = config.num_attention_heads
    headdim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = config.num_hidden_layers
    return allocate_inference_cache(batch_size, max_seqlen, heads // tensor_parallel, headdim, layers, device, dtype)


def _now(device, tensor_parallel):
    """Seconds on a clock, after all ranks have finished their work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if tensor_parallel > 1:
        torch.distributed.barrier()
    return time.perf_counter()


class GenerationMixin:
    """Adds ``generate`` to a model.

    >>> from types import SimpleNamespace
    >>> class Model(GenerationMixin):
    ...     def __call__(self, tokens, **_):  # the next token is the last one plus 1
    ...         return SimpleNamespace(logits=torch.eye(5)[(tokens + 1) % 5])
    >>> Model().generate(torch.tensor([[0, 1]]), max_length=6)
    tensor([[0, 1, 2, 3, 4, 0]])
    """

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Optional[torch.dtype] = None, **kwargs: Any
    ) -> Any:
        """The caches of a model for ``update_graph_cache``. A model that decodes from CUDA graphs defines this method.

        Raises:
            NotImplementedError: the model does not define the method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to allocate its caches")

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Union[Tensor, DecoderOutput]:
        """Runs ``decode`` with this model. Returns the tokens, or DecoderOutput if ``return_dict_in_generate``.

        Args:
            input_ids: tokens ``[b, s]``, the prompt.
            max_length: tokens of the result, prompt included.
            top_k, top_p, temperature: as of ``sample``.
            output_scores: keep the scores in the DecoderOutput. Otherwise they are None.
            kwargs: further arguments of ``decode``.
        Returns:
            Tokens ``[b, length]``, or DecoderOutput.
        There are no gradients.
        """
        output = decode(
            input_ids,
            self,
            max_length,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            **kwargs,
        )
        if not output_scores:
            output = output._replace(scores=None)
        return output if return_dict_in_generate else output.sequences
