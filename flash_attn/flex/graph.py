"""``flex_attention`` and ``create_block_mask`` inside of ``torch.compile``.

Dynamo calls a mod, and makes a graph of it. Captured tensors and numbers become arguments of the graph. Dynamo does so
for the higher-order operators that it knows by their name. Ours have the name of PyTorch's operator, and no other part
in common. They make programs of the graphs, and call ops of :mod:`flash_attn.flex.ops`. So the operators are gone
before a backend sees a graph of ATen, and no backend can fall back to PyTorch's dense attention.
"""

import operator
import types
import weakref

import flash_attn_2_cuda
import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor

from .._dispatch import is_exporting
from .._imagined import is_imagined
from .._ops import without_second_derivative
from . import arguments, ops
from .block_mask import LISTS, on_device
from .derivative import derivative_of
from .sequences import Sequences, key_length
from .steps import NUMBERS, kind
from .tracer import Trace, program_of
from .values import Number

SYMBOLS = (torch.SymBool, torch.SymInt, torch.SymFloat)
programs_of_text = {}  # text: a program


# ---- programs of graphs ---------------------------------------------------------------------------------------------


class _Number(Number):
    """A number that may be a symbol, or a tensor without dimensions that holds a float."""

    @property
    def _value(self):
        """A number of the same type: types of results depend on nothing else."""
        value = self._trace.steps.values[self._number]
        return 2 if isinstance(value, torch.SymInt) else True if isinstance(value, torch.SymBool) else (
            value if isinstance(value, NUMBERS) else 2.0
        )  # fmt: skip


def _place_of(node):
    """The line of a mod that made a node of a graph."""
    lines = ((node is not None and node.stack_trace) or "").strip().splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("File ")]
    return found[-1] if found else "a mod in torch.compile"


def _last_place_of(graph):
    """The line of a mod that made its result."""
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
    return _place_of(next((node for node in reversed(nodes) if node.stack_trace), None))


class GraphTrace(Trace):
    """Traces a graph that Dynamo made. What another mod binds is the tuple of the graph's captures."""

    def __init__(self, graph, captures, score):
        super().__init__(captures, score)
        self.graph, self.node = graph, None

    def callee(self):
        captures = self.wrap(0)
        return lambda *indices: self._interpret((*indices, *captures))

    def where(self):
        return _place_of(self.node)

    def _explain(self, error, num):
        """Dynamo has called the mod."""

    def wrap(self, number):
        if isinstance(self.steps.values[number], (*NUMBERS, *SYMBOLS)):
            self.steps.guard(number, kind)
            return _Number(self, number)
        return super().wrap(number)

    def repeat(self, function, args, kwargs):
        """Floats stay tensors while a graph is compiled."""
        if getattr(function, "__name__", "") == "item":
            number = args[0]._number
            return _Number(self, self.steps.add(lambda values: _scalar(values[number])))
        if not all(isinstance(x, (_Number, *NUMBERS)) for x in args) or kwargs:
            return super().repeat(function, args, kwargs)
        numbers = [x._number if isinstance(x, _Number) else self.steps.add(lambda _, x=x: x) for x in args]
        return _Number(self, self.steps.add(lambda values: function(*(values[i] for i in numbers))))

    def _interpret(self, args):
        values, args, had_grad = {}, iter(args), torch.is_grad_enabled()
        try:
            for node in self.graph.graph.nodes:
                self.node = node
                values[node] = self._value_of(node, values, args)
                if node.op == "output":
                    result = values[node]
                    return result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
        finally:
            with torch._C.DisableTorchFunction():
                torch._C._set_grad_enabled(had_grad)

    def _value_of(self, node, values, args):
        if node.op == "placeholder":
            return next(args)
        words = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_function":
            return node.target(*words[0], **words[1])
        if node.op == "call_method":
            return getattr(words[0][0], node.target)(*words[0][1:], **words[1])
        if node.op == "get_attr":
            return self.constant_tensor(getattr(self.graph, node.target))
        return words[0][0]


def _scalar(tensor):
    return tensor.item() if type(tensor) is torch.Tensor or not tensor.is_floating_point() else tensor


_programs = weakref.WeakKeyDictionary()  # graph: programs


def _known_program(graph, captures, score):
    """``(program, tensors, numbers)`` of a graph that may have been traced before."""
    known = _programs.setdefault(graph, [])
    for program in known:
        values = program.bind(captures)
        if values is not None:
            return program, *values
    program, *values = GraphTrace(graph, captures, score).run()
    if not program.holds_once:
        known.append(program)
    programs_of_text[program.text] = program
    return program, *values


def program_of_graph(graph, captures, score, device):
    """``(program, tensors, ints, floats)`` of a graph and the values of its captures."""
    if isinstance(graph, torch.fx.GraphModule):
        program, tensors, numbers = _known_program(graph, tuple(captures), score)
    else:  # Dynamo refused the operator, which is called with the mod itself
        program, tensors, numbers = program_of(graph, score)
    floats = [x for x, type in zip(numbers, program.types) if type == ops.F64]
    floats = [
        x if isinstance(x, torch.Tensor) else torch.scalar_tensor(x, dtype=torch.float64, device="cpu") for x in floats
    ]
    ints = [x for x, type in zip(numbers, program.types) if type != ops.F64]
    return program, [on_device(x, device) for x in tensors], [_int(x) for x in ints], floats


def _int(x):
    return x if isinstance(x, torch.SymInt) else int(x)


def _of_score(graph, captures, query):
    score = torch.float64 if query.dtype == torch.float64 else torch.float32
    found = program_of_graph(graph, captures, score, query.device)
    program = found[0]
    return None if program.builder.nodes[program.result][0] == "score" else found


def _of_mask(graph, captures, device):
    found = program_of_graph(graph, captures, None, device)
    program, tensors, *_ = found
    if program.dtype != torch.bool:
        raise AssertionError(f"mask_mod must return torch.bool, but returns {program.dtype}: {_last_place_of(graph)}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise AssertionError(
            f"Captured buffers from mask mod that require grad are not supported. Use detach(): {_last_place_of(graph)}"
        )
    return None if program.result == program.builder.constant(True) else found


# ---- the operators --------------------------------------------------------------------------------------------------


class _Operator(HigherOrderOperator):
    """An operator whose arguments Dynamo treats like those of PyTorch's ``flex_attention``."""

    def __init__(self, name, function):
        super().__init__("flash_attn_" + name)
        self.__name__ = "flex_attention"  # Dynamo looks for this name
        self.__module__ = __name__  # and the code of a graph for this module, which is not PyTorch's
        self._function = function

    def __call__(self, query, key, value, score, block_mask, scale, options, score_captures=(), mask_captures=()):
        # A mod that Dynamo refuses ends its graph here. It must not go on inside: garbage collection can drop a program
        # while it reads the dictionary of them.
        function = torch.compiler.disable(self._function)
        return function(query, key, value, score, block_mask, scale, options, score_captures, mask_captures)


def _tensors_of(tail):
    return [x for part in tail for x in (part if isinstance(part, list) else ()) if isinstance(x, torch.Tensor)]


def _dropout(options, rng_state):
    """The last arguments of the ops. There are none without dropout."""
    return () if rng_state is None else (options["dropout_p"], rng_state)


class _Attention(torch.autograd.Function):
    """The op with its gradients. ``head`` are arguments before those of the score_mod. ``beside`` are those behind
    sinks, and rng_state.

    An exported program has ``flex_attend`` instead, because torch.export drops the backward of a function.
    """

    @staticmethod
    def forward(ctx, program, head, tail, options, query, key, value, sinks, beside, num, *tensors):
        score = (program.text.hex() if program else "", list(tensors[:num]), *tail[0])
        shared = (*head, *score, *tail[1:])
        shift, ends, rng_state = beside
        of_rows = () if sinks is rng_state is None else ([], sinks, shift, ends, *_dropout(options, rng_state))
        out, lse, max_scores, probability = torch.ops.flash_attn.flex_forward(
            query, key, value, *shared, options["wants_max"], *of_rows
        )
        ctx.program, ctx.head, ctx.tail, ctx.num = program, head, tail, num
        ctx.options = options
        ctx.save_for_backward(
            sinks, *beside, query, key, value, out, lse, probability, *tensors, *_tensors_of(tail)
        )  # torch checks for changes
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx, dout, dlse=None, *unused):
        saved = ctx.saved_tensors
        return without_second_derivative(_gradients(ctx, saved, dout, dlse), dout, dlse, *saved)


@torch.no_grad()
def _gradients(ctx, saved, dout, dlse):
    (*sinks, rng_state, query, key, value), results, tensors = saved[:7], saved[7:10], saved[10:]
    tensors, program = tensors[: ctx.num], ctx.program
    wanted = [i for i in range(ctx.num) if ctx.needs_input_grad[10 + i]]
    text, places = derivative_of(program, wanted) if program else (b"", [])
    score = (program.text.hex() if program else "", tensors, *ctx.tail[0])
    of_inputs, of_tensors, of_sinks = ops.gradients(
        (query, key, value, *ctx.head, *score, *ctx.tail[1:]), results, dout, dlse, ctx.needs_input_grad[4:8], sinks,
        text.hex(), list(places), wanted, ctx.options["deterministic"], *_dropout(ctx.options, rng_state),
    )  # fmt: skip
    rest = [None] * (len(ctx.needs_input_grad) - 10 - ctx.num)
    return None, None, None, None, *of_inputs, of_sinks, None, None, *map(of_tensors.get, range(ctx.num)), *rest


def _is_as_made(x):
    """Is a list of blocks an input of the graph that is traced now, or a result of flex_classify?

    ``ops.note_lists`` marks the lists of a mask. A backend may compute another tensor in the memory of a marked list,
    and the version of the marked list stays the same. So a list that the graph computes must not be asked for a mark.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:  # no graph of ATen is traced, and versions tell of changes
        return True
    if isinstance(x, FunctionalTensor):
        torch._sync(x)
        x = torch._from_functional_tensor(x.elem)
    slot = proxy_tensor.get_proxy_slot(x, mode.tracer, None)
    if slot is None:
        return False
    node = slot.proxy.node
    is_item = node.op == "call_function" and node.target is operator.getitem
    return node.op == "placeholder" or (is_item and node.args[0].target is torch.ops.flash_attn.flex_classify.default)


def _attend(query, key, value, score, block_mask, scale, options, score_captures, mask_captures):
    if options["follows_autocast"]:
        query, key, value = arguments.in_autocast(query, key, value)
    *block_size, num, places, full_num, full_places = block_mask[:6]
    *sequences, sinks, shift, ends, rng_state, mask = block_mask[6:]
    sequences = Sequences(*sequences)
    score = _of_score(score, score_captures, query)
    mask = _of_mask(mask, mask_captures, query.device)
    lists = [x for x in (num, places, full_num, full_places) if x is not None]
    of_mask = (mask[0].text.hex(), *mask[1:]) if mask else ("", [], [], [])
    tensors = score[1] if score else []
    inputs = (query, key, value, *tensors, *([] if sinks is None else [sinks]))
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if is_recorded:
        sequences.refuse_gradients()
    if is_exporting():  # the op drops plain kernels from a backward with dlse; another graph may compute the lists
        may_be_plain = not options["wants_max"] and not lists
    else:
        may_be_plain = (
            not options["wants_max"] and not (options["wants_lse"] and is_recorded) and all(map(_is_as_made, lists))
        )
    blocks = (block_size if all(block_size) else [], lists)  # a size without lists: the op finds the lists on a GPU
    of_sequences = ([] if all(x is None for x in sequences[:3]) else list(sequences[:3]), sequences.blocks_have_offset)
    tail = (score[2:] if score else ([], []), *of_mask, *blocks, *of_sequences)
    program, head = score[0] if score else None, (scale, may_be_plain)
    if is_exporting():
        wanted = [i for i, x in enumerate(tensors) if x.is_floating_point()]
        text, places = derivative_of(program, wanted) if program else (b"", [])
        mod = program.text.hex() if program else "", list(tensors), *tail[0]
        return torch.ops.flash_attn.flex_attend(
            query, key, value, *head, *mod, *tail[1:], options["wants_max"], sinks, shift, ends, text.hex(),
            list(places), wanted, options["deterministic"], *_dropout(options, rng_state),
        )[:3]  # fmt: skip
    beside = shift, ends, rng_state
    return _Attention.apply(program, head, tail, options, query, key, value, sinks, beside, len(tensors), *tensors)


def _classify(like, _key, _value, _score, block_mask, _scale, options, _captures, mask_captures):
    program, *rest = program_of_graph(block_mask[-1], mask_captures, None, like.device)
    if program.dtype != torch.bool:
        raise AssertionError(f"mask.dtype must be torch.bool, got {program.dtype}: {_last_place_of(block_mask[-1])}")
    with torch.no_grad():
        return tuple(
            torch.ops.flash_attn.flex_classify(like, program.text.hex(), *rest, options["shape"], options["block_size"])
        )


attend_operator = _Operator("flex_attention", _attend)
classify_operator = _Operator("flex_classify", _classify)


# ---- what Dynamo traces ---------------------------------------------------------------------------------------------


_FORGETS_DEFAULTS = torch.__version__ < (2, 13)


def _defaults_behind(mod, num):
    """The defaults of a mod's arguments behind the first num, by place and by name.

    NOTE: Dynamo of PyTorch 2.11 has no guards for defaults, and would take a graph for mods with other numbers. It has
    guards for arguments, so the defaults are passed. Dynamo of 2.13 has them, and refuses such questions of functions
    that are made in the graph.
    """
    if not (_FORGETS_DEFAULTS and isinstance(mod, types.FunctionType)):
        return (), {}
    values = getattr(mod, "__defaults__", None) or ()  # a function that is made in the graph has no __kwdefaults__
    num = min(max(mod.__code__.co_argcount - num, 0), len(values))
    return values[len(values) - num :], getattr(mod, "__kwdefaults__", None) or {}


def _identity(score, b, h, q_idx, kv_idx):
    return score


def _score_function(score_mod):
    values, named = _defaults_behind(score_mod, 5)

    def score(score, b, h, q_idx, kv_idx):
        result = score_mod(score, b, h, q_idx, kv_idx, *values, **named)
        return result if isinstance(result, torch.Tensor) else torch.full_like(score, result)

    return _identity if score_mod is None else score


def _mask_function(mask_mod):
    values, named = _defaults_behind(mask_mod, 4)

    def mask(b, h, q_idx, kv_idx):
        result = True if mask_mod is None else mask_mod(b, h, q_idx, kv_idx, *values, **named)
        return result if isinstance(result, torch.Tensor) else b.new_full((), result, dtype=torch.bool)

    return mask


def rng_state_of(dropout_p, device):
    """The seed and the offset of dropout's generator, which PyTorch's generator of the device draws. None: no dropout.

    A call that is only planned draws nothing. NOTE: numbers that a CUDA graph or a compiled one draws anew must come
    from an operator of PyTorch.
    """
    if not dropout_p:
        return None
    if not torch.compiler.is_dynamo_compiling() and (is_imagined() or flash_attn_2_cuda.only_plans()):
        return torch.zeros(2, dtype=torch.int64, device=device)
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def is_exported():
    """Does torch.export trace without Dynamo? Its tensors have no memory for the kernels."""
    return is_exporting() and not torch.compiler.is_dynamo_compiling()


def exported(function, *args, **kwargs):
    """Calls the function so that Dynamo traces it, as PyTorch's ``flex_attention`` does.

    Dynamo remembers the sizes that a code object has seen, and may fix a size that differs from export to export. So
    each export has a code object of its own.
    """
    from torch._higher_order_ops.utils import setup_compilation_env

    fresh = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    fresh.__defaults__, fresh.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    with setup_compilation_env() as backend:
        return torch.compile(fresh, backend=backend, fullgraph=True)(*args, **kwargs)


def flex_attention(
    query, key, value, score_mod, block_mask, scale, return_lse, return_aux, mask_mod, sequences, dropout_p
):
    """The checked call, while Dynamo traces it."""
    places = (None, None, None, False) if sequences is None else tuple(sequences)
    if key.size(0) != query.size(0) and places[2] is None:
        key, value = (x.expand(query.size(0), -1, -1, -1) for x in (key, value))
    blocks = (0, 0, None, None, None, None)
    if mask_mod is not None:
        blocks = (*ops.BLOCK, None, None, None, None)
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
        lists = [getattr(block_mask, name) for name in LISTS]
        lists = arguments.as_lists(*lists, block_mask.BLOCK_SIZE[1], key_length(key, sequences))
        blocks = (*block_mask.BLOCK_SIZE, *lists)
    wants_max = return_aux is not None and return_aux.max_scores
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    blocks = (*blocks, *places, None, None, None, rng_state_of(dropout_p, query.device), _mask_function(mask_mod))
    options = _options(wants_lse, wants_max, dropout_p)
    return attend_operator(query, key, value, _score_function(score_mod), blocks, scale, options)


def _options(wants_lse, wants_max, dropout_p, deterministic=False, follows_autocast=True):
    return {
        "wants_lse": bool(wants_lse), "wants_max": bool(wants_max), "deterministic": bool(deterministic),
        "follows_autocast": follows_autocast, "dropout_p": float(dropout_p),
    }  # fmt: skip


def attend_with_sinks(query, key, value, score_mod, mask_mod, scale, sinks, wants_max, deterministic, block, dropout_p):
    """The options of ``flash_attn_func``, while Dynamo traces it: out, lse and max_scores.

    ``sinks``: None or ``(sinks, shift, cu_seqlens_q)``. ``block``: the size of the blocks that the kernels of GPUs look
    for, or 0.
    """
    of_rows = (None, None, None) if sinks is None else sinks
    blocks = (block, block, None, None, None, None, None, None, None, False)
    blocks = (*blocks, *of_rows, rng_state_of(dropout_p, query.device), _mask_function(mask_mod))
    options = _options(True, wants_max, dropout_p, deterministic, follows_autocast=False)
    return attend_operator(query, key, value, _score_function(score_mod), blocks, scale, options)


def find_blocks(mask_mod, device, shape, block):
    like = torch.empty((), device=device)
    blocks = (0, 0, None, None, None, None, _mask_function(mask_mod))
    options = {"shape": list(shape), "block_size": list(block)}
    return classify_operator(like, like, like, _identity, blocks, None, options)
