"""Writes the reference of the public functions, docs/api, from their docstrings.

    python docs/generate_api.py            writes the pages
    python docs/generate_api.py --check    says which pages are old, and fails if there are any

A page holds the modules of PAGES with the names of their ``__all__``. tests/guards/test_api.py runs the check.
"""

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "api"
PAGES = {
    "attention": ("Attention", ["flash_attn"]),
    "flex_attention": ("Attention with your own masks and scores", ["flash_attn.flex_attention"]),
    "bert_padding": ("Packing and padding", ["flash_attn.bert_padding"]),
    "integrations": (
        "In other libraries",
        [
            "flash_attn.integrations.transformers",
            "flash_attn.integrations.diffusers",
            "flash_attn.integrations.flex",
        ],
    ),
    "layers": ("Layers", ["flash_attn.layers.rotary", "flash_attn.layers.patch_embed"]),
    "losses": ("Losses", ["flash_attn.losses.cross_entropy"]),
    "modules": (
        "Modules",
        [
            "flash_attn.modules.mha",
            "flash_attn.modules.mlp",
            "flash_attn.modules.block",
            "flash_attn.modules.embedding",
        ],
    ),
    "ops": (
        "Operations",
        [
            "flash_attn.ops.activations",
            "flash_attn.ops.fused_dense",
            "flash_attn.ops.layer_norm",
            "flash_attn.ops.rms_norm",
            "flash_attn.ops.dropout_add_norm",
            "flash_attn.ops.triton.cross_entropy",
            "flash_attn.ops.triton.layer_norm",
            "flash_attn.ops.triton.linear",
            "flash_attn.ops.triton.mlp",
            "flash_attn.ops.triton.rotary",
        ],
    ),
    "utils": (
        "Helpers",
        [
            "flash_attn.utils.benchmark",
            "flash_attn.utils.distributed",
            "flash_attn.utils.generation",
            "flash_attn.utils.library",
            "flash_attn.utils.pretrained",
            "flash_attn.utils.testing",
            "flash_attn.utils.torch",
        ],
    ),
}
NOTE = "Made by `python docs/generate_api.py` from the docstrings. Changes belong there."
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Examples?):$")


def public(module):
    """[(name, object)] of the functions and classes of ``__all__``."""
    found = [(name, getattr(module, name)) for name in module.__all__]
    return [(name, item) for name, item in found if inspect.isroutine(item) or inspect.isclass(item)]


def is_ours(item):
    """Names that a module takes over, such as torch's BlockMask, are documented where they come from."""
    return getattr(item, "__module__", "").startswith("flash_attn")


def short(default):
    """A default as a reader writes it: no addresses, and no folders of modules."""
    if inspect.isroutine(default) or inspect.isclass(default):
        return default.__name__
    return repr(default).replace("'", '"')


def annotation(of):
    text = inspect.formatannotation(of).replace("typing.", "").replace("collections.abc.", "")
    return re.sub(r"ForwardRef\('([\w.]+)'[^)]*\)", r"\1", text).replace("NoneType", "None")


def signature(name, item):
    """``name(arguments)``, in one line or with an argument in each line."""
    if inspect.isclass(item) and "forward" in vars(item) and isinstance(vars(item)["forward"], staticmethod):
        name, parameters = f"{name}.apply", list(inspect.signature(item.forward).parameters.values())[1:]
    else:
        parameters = list(inspect.signature(item).parameters.values())
    words, before = [], None
    for i, p in enumerate(parameters):
        positional_only = before is not None and before.kind is p.POSITIONAL_ONLY
        if positional_only and p.kind is not p.POSITIONAL_ONLY:
            words.append("/")
        starred = any(q.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) for q in parameters[:i])
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
        word = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        typed = p.annotation is not p.empty
        word += f": {annotation(p.annotation)}" if typed else ""
        if p.default is not p.empty:
            word += (" = " if typed else "=") + short(p.default)
        words.append(word)
        before = p
    result = inspect.signature(item).return_annotation
    end = "" if inspect.isclass(item) or result is inspect.Signature.empty else f" -> {annotation(result)}"
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def body(text):
    """A docstring as Markdown: sections get bold names, pictures and examples become code, the rest stays."""
    lines, out, inside = inspect.cleandoc(text or "").splitlines(), [], None
    for line in lines:
        indented = line.startswith("    ")
        section = SECTION.match(line)
        if inside == "example" and line:  # its results keep their indentation
            out.append(line)
            continue
        if inside == "example" or (
            inside == "code" and not (indented or line.startswith("...") or (line and not out[-1] == "```"))
        ):
            out += ["```"]
            inside = None
        if section:
            out += ["", f"**{section[1]}**", ""]
            inside = "section"
        elif inside == "section" and indented:
            argument = re.match(r"    (\w[\w, ]*): (.*)", line)
            if argument:
                out.append(f"- `{argument[1]}`: {argument[2]}")
            else:
                out.append(("  " if out[-1].startswith(("- ", "  ")) else "") + line.strip())
        elif line.startswith(">>>"):
            out += ["```python", line]
            inside = "example"
        elif indented and inside != "code":
            out += ["```", line[4:]]
            inside = "code"
        elif inside == "code":
            out.append(line[4:] if indented else line)
        else:
            if inside == "section" and line:
                out.append("")
            inside = None if line else inside
            out.append(line)
    if inside in ("code", "example"):
        out.append("```")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def own_methods(item):
    """Public methods with a docstring that the class itself defines."""
    return [
        (name, method)
        for name, method in vars(item).items()
        if not name.startswith("_") and inspect.isfunction(method) and method.__doc__
    ]


def entry(name, item):
    if not is_ours(item):
        return f"### `{name}`\n\nThe same as `{item.__module__}.{item.__qualname__}`."
    parts = [f"### `{name}`", f"```python\n{signature(name, item)}\n```", body(inspect.getdoc(item))]
    if inspect.isclass(item):
        for method, function in own_methods(item):
            title = signature(f"{name}.{method}", function)
            parts += [f"```python\n{title}\n```", body(inspect.getdoc(function))]
    return "\n\n".join(part for part in parts if part)


def page(title, modules):
    parts = [f"# {title}", NOTE]
    for name in modules:
        module = importlib.import_module(name)
        parts += [f"## `{name}`", body(module.__doc__)]
        parts += [entry(*item) for item in public(module)]
    return "\n\n".join(part for part in parts if part) + "\n"


def index():
    lines = ["# Reference", "", NOTE, ""]
    for stem, (title, modules) in PAGES.items():
        lines.append(f"- [{title}]({stem}.md): " + ", ".join(f"`{name}`" for name in modules))
    return "\n".join(lines) + "\n"


def pages():
    """{path: text}"""
    made = {FOLDER / f"{stem}.md": page(*of) for stem, of in PAGES.items()}
    return {FOLDER / "README.md": index(), **made}


def old_pages():
    """The pages that differ from the docstrings, or that nothing makes."""
    made = pages()
    old = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return old + [path for path in FOLDER.glob("*.md") if path not in made]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is old")
    if parser.parse_args().check:
        old = [str(path.relative_to(ROOT)) for path in old_pages()]
        sys.exit(f"python docs/generate_api.py writes {', '.join(old)}." if old else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in old_pages():
        path.unlink(missing_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
