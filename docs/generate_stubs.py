"""Writes the stubs (.pyi) of the modules whose functions return more on request, so that type checkers know the result.

    python docs/generate_stubs.py            writes the stubs
    python docs/generate_stubs.py --check    says which stubs are old, and fails if there are any

A stub has the annotated functions of its module. A function of FUNCTIONS has an overload for each result:
``flash_attn_func`` returns a tensor, and with ``return_lse=True`` a pair. tests/guards/test_types.py runs the check.
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
NOTE = """\
# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
"""

ON, OFF, NOT_GIVEN = "Literal[True]", "Literal[False]", "None"
PAIR, TRIPLE = "tuple[Tensor, Tensor]", "tuple[Tensor, Tensor, Tensor]"
MASKS = "Tensor | None, Tensor | None"

# {function: (the result of a plain call, [(the arguments that change the result, with their types, the result)])}
ATTENTION = (
    "Tensor",
    [
        ({"return_attn_probs": ON}, TRIPLE),
        ({"return_lse": ON}, PAIR),
        ({"return_max_logits": ON}, PAIR),
        ({"return_lse": ON, "return_max_logits": ON}, TRIPLE),
    ],
)
NORM = (
    "Tensor",
    [
        ({"prenorm": ON}, PAIR),
        ({"weight1": "Tensor"}, PAIR),
        ({"weight1": "Tensor", "prenorm": ON}, TRIPLE),
        ({"return_dropout_mask": ON}, f"tuple[Tensor, {MASKS}]"),
        ({"prenorm": ON, "return_dropout_mask": ON}, f"tuple[Tensor, Tensor, {MASKS}]"),
    ],
)
NORM_REF = "Tensor", NORM[1][:3]


def on_request(*names):
    """Functions that return another tensor for each of these options."""
    rows = [({name: ON}, PAIR) for name in names]
    return "Tensor", rows + ([(dict.fromkeys(names, ON), TRIPLE)] if len(names) == 2 else [])


def parallel_residual(mask):
    """Functions of two norms. The second output is None without weight1."""
    pair, masks = "Tensor, Tensor | None", "Tensor, Tensor"
    return f"tuple[{pair}]", [
        ({"prenorm": ON}, f"tuple[{pair}, Tensor]"),
        ({mask: ON}, f"tuple[{pair}, {masks}]"),
        ({"prenorm": ON, mask: ON}, f"tuple[{pair}, Tensor, {masks}]"),
    ]


def dropout_add(kind):
    return {
        f"dropout_add_{kind}": on_request("prenorm", "return_dropout_mask"),
        f"dropout_add_{kind}_subset": on_request("prenorm", "return_dropout_mask"),
        f"dropout_add_{kind}_parallel_residual": parallel_residual("return_dropout_mask"),
    }


FUNCTIONS = {
    "flash_attn/flash_attn_interface.py": {
        "flash_attn_func": ATTENTION,
        "flash_attn_kvpacked_func": ATTENTION,
        "flash_attn_qkvpacked_func": ATTENTION,
        "flash_attn_varlen_func": ATTENTION,
        "flash_attn_varlen_kvpacked_func": ATTENTION,
        "flash_attn_varlen_qkvpacked_func": ATTENTION,
        "flash_attn_with_kvcache": on_request("return_softmax_lse"),
    },
    "flash_attn/flex/attention.py": {
        "flex_attention": (
            "Tensor",
            [({"return_lse": ON}, PAIR), ({"return_aux": "AuxRequest"}, "tuple[Tensor, AuxOutput]")],
        )
    },
    "flash_attn/ops/dropout_add_norm.py": dropout_add("norm"),
    "flash_attn/ops/layer_norm.py": {
        **dropout_add("layer_norm"),
        "DropoutAddLayerNormFn.apply": on_request("prenorm", "return_dmask"),
        "DropoutAddLayerNormSubsetFn.apply": on_request("prenorm", "return_dmask"),
        "DropoutAddLayerNormParallelResidualFn.apply": parallel_residual("return_dmask"),
    },
    "flash_attn/ops/rms_norm.py": dropout_add("rms_norm"),
    "flash_attn/ops/fused_dense.py": {
        "fused_dense_func": on_request("return_residual"),
        "fused_mlp_func": on_request("return_residual"),
        "FusedDenseFunc.apply": on_request("return_residual"),
        "FusedMLPFunc.apply": on_request("return_residual"),
    },
    "flash_attn/ops/triton/layer_norm.py": {
        "layer_norm_fn": NORM,
        "rms_norm_fn": NORM,
        "layer_norm_linear_fn": on_request("prenorm"),
        "layer_norm_ref": NORM_REF,
        "rms_norm_ref": NORM_REF,
    },
    "flash_attn/ops/triton/linear.py": {"triton_linear_act": on_request("save_act_input")},
    "flash_attn/utils/generation.py": {
        "GenerationMixin.generate": ("Tensor", [({"return_dict_in_generate": ON}, "DecoderOutput")]),
    },
    "hopper/flash_attn_3/flash_attn_interface.py": {
        "flash_attn_func": on_request("return_attn_probs"),
        "flash_attn_varlen_func": on_request("return_attn_probs"),
        "flash_attn_qkvpacked_func": on_request("return_attn_probs"),
    },
    "hopper/flash_attn_3/_kvcache.py": {"flash_attn_with_kvcache": on_request("return_softmax_lse")},
}
KEPT_DECORATORS = ("staticmethod", "classmethod", "property", "dataclass")


class _Unions(ast.NodeTransformer):
    """Optional[X] becomes X | None, and Union[X, Y] becomes X | Y, as stubs have them."""

    def visit_Subscript(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in ("Optional", "Union"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            parts = parts + [ast.Constant(None)] if node.value.id == "Optional" else parts
            return ast.Name(" | ".join(ast.unparse(part).strip("'") for part in parts))
        return node


def text_of(node):
    return "Any" if node is None else ast.unparse(_Unions().visit(ast.parse(ast.unparse(node), mode="eval").body))


def parameters_of(function):
    """[(name with its stars, annotation or "", has a default, may come by position)]"""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    first_default = len(positional) - len(a.defaults)
    found = []
    for i, p in enumerate(positional):
        found.append((p.arg, p.annotation and text_of(p.annotation), i >= first_default, True))
        if p in a.posonlyargs[-1:]:
            found.append(("/", None, False, True))
    if a.vararg:
        found.append((f"*{a.vararg.arg}", text_of(a.vararg.annotation), False, True))
    found += [
        (p.arg, p.annotation and text_of(p.annotation), default is not None, False)
        for p, default in zip(a.kwonlyargs, a.kw_defaults)
    ]
    if a.kwarg:
        found.append((f"**{a.kwarg.arg}", text_of(a.kwarg.annotation), False, False))
    return found


def signature(function, types, result, indent):
    """The lines of ``def name(parameters) -> result: ...``, with these types for some of the parameters.

    A parameter of TYPES that asks for another result has no default, so it comes by keyword."""
    words, has_star = [], False
    for name, annotation, has_default, is_positional in parameters_of(function):
        is_asked = types.get(name) not in (None, OFF, NOT_GIVEN)
        starred = name.startswith("*") and not name.startswith("**")
        if (is_asked or not is_positional) and not (has_star or starred or name.startswith("**")):
            words.append("*")
            has_star = True
        has_star |= starred
        annotation = types.get(name, annotation)
        word = f"{name}: {annotation}" if annotation else name
        has_default = has_default and not is_asked
        words.append(word + (" = ..." if annotation else "=...") * has_default)
    lines, line = [f"{indent}def {function.name}("], indent + "    "
    for i, word in enumerate(words):
        part = word + (", " if i < len(words) - 1 else ",")
        if len(line) + len(part.rstrip()) > WIDTH:
            lines.append(line.rstrip())
            line = indent + "    "
        line += part
    short = f"{lines[0]}{', '.join(words)}) -> {result}: ..."
    return [short] if len(short) <= WIDTH else [*lines, line.rstrip(), f"{indent}) -> {result}: ..."]


def stub_of_function(function, table, prefix="", indent=""):
    decorators = [f"{indent}@{ast.unparse(d)}" for d in function.decorator_list if ast.unparse(d) in KEPT_DECORATORS]
    result = text_of(function.returns)
    rows = table.pop(prefix + function.name, None)
    if rows is None:
        return [*decorators, *signature(function, {}, result, indent)]
    plain, others = rows
    off = {name: OFF if kind == ON else NOT_GIVEN for types, _ in others for name, kind in types.items()}
    lines = []
    for types, of in [({}, plain), *others]:
        lines += [f"{indent}@overload", *decorators, *signature(function, {**off, **types}, of, indent)]
    return [*lines, f"{indent}@overload", *decorators, *signature(function, {}, result, indent)]


def attributes_of(init):
    """[(name, type)] of what ``__init__`` assigns to self: an argument, a module, or anything."""
    arguments = {p.arg: text_of(p.annotation) for p in [*init.args.args, *init.args.kwonlyargs] if p.annotation}
    found = {}
    for statement in ast.walk(init):
        if not isinstance(statement, ast.Assign):
            continue
        (target,), value = statement.targets, statement.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for to, what in zip(target.elts, value.elts) if both else [(target, value)]:
            if not (isinstance(to, ast.Attribute) and ast.unparse(to.value) == "self") or to.attr.startswith("_"):
                continue
            kind = "Any"
            if isinstance(what, ast.Name):
                kind = arguments.get(what.id, "Any")
            elif isinstance(what, ast.Call) and ast.unparse(what.func).rpartition(".")[2][:1].isupper():
                kind = ast.unparse(what.func)
            found.setdefault(to.attr, kind)
    return list(found.items())


def stub_of_class(node, table):
    decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list if ast.unparse(d) in KEPT_DECORATORS]
    lines = [*decorators, f"class {ast.unparse(node).split('class ', 1)[1].splitlines()[0]}"]
    body = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            body.append(f"    {ast.unparse(item.target)}: {text_of(item.annotation)}" + " = ..." * bool(item.value))
        elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Call):
            body.append(f"    {ast.unparse(item)}")
        elif isinstance(item, ast.FunctionDef) and item.returns:
            if item.name == "__init__":
                body += [f"    {name}: {kind}" for name, kind in attributes_of(item)]
            body += stub_of_function(item, table, f"{node.name}.", "    ")
    return [*lines, *body] if body else [f"{lines[-1]} ..."]


def imports_of(tree, used):
    """The imports that the stub needs, and what it takes from typing."""
    lines = ["from typing import " + ", ".join(sorted(used & {"Any", "Callable", "Literal", "NamedTuple", "overload"}))]
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != "typing":
            node.names = [x for x in node.names if (x.asname or x.name.split(".")[0]) in used]
            line = ast.unparse(node)
            if len(line) <= WIDTH:
                lines += [line] if node.names else []
                continue
            start = line[: line.index("import ") + len("import ")]
            lines += [start + ast.unparse(x) for x in node.names]
    return lines


def stub(path, table):
    """The text of a module's stub. Every function of the table is in the module."""
    tree, table, body, exported = ast.parse(path.read_text(encoding="utf-8")), dict(table), [], set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = set(ast.literal_eval(node.value))
            names = "".join(f'    "{name}",\n' for name in ast.literal_eval(node.value))
            body += [f"__all__ = [\n{names}]"]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            body.append(ast.unparse(node))  # a name for a type
        elif isinstance(node, ast.FunctionDef) and node.returns:
            body += stub_of_function(node, table)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            body += stub_of_class(node, table)
    assert not table, f"{path} has no {', '.join(table)}"
    text = "\n".join(body)
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} | exported
    return NOTE + "\n".join([*imports_of(tree, used), "", text]) + "\n"


def stubs():
    """{path: text}"""
    return {(ROOT / name).with_suffix(".pyi"): stub(ROOT / name, table) for name, table in FUNCTIONS.items()}


def old_stubs():
    """The stubs that differ from the sources, or that nothing makes."""
    made = stubs()
    old = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    folders = ROOT / "flash_attn", ROOT / "hopper" / "flash_attn_3"
    return old + [path for folder in folders for path in folder.rglob("*.pyi") if path not in made]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a stub is old")
    if parser.parse_args().check:
        old = [str(path.relative_to(ROOT)) for path in old_stubs()]
        sys.exit(f"python docs/generate_stubs.py writes {', '.join(old)}." if old else 0)
    for path in old_stubs():
        path.unlink(missing_ok=True)
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
