"""Private names of torch that the packages use, with the versions in which they were found.

python -m tests.support.private_torch          writes the table of docs/install.md
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path

from tests.support.sources import ROOT, dotted, files, module_of

DOCUMENT = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- private names of torch -->\n", "<!-- end -->\n"

SETTLED = {
    "torch.utils._pytree": "trees of tensors",
    "torch.utils._python_dispatch": "dispatch modes",
    "torch.ops.aten": "operators, some of whose names begin with an underscore",
    "torch._foreach_": "operators over lists",
    "torch.nn.Module._modules": "children by name",
    "torch.nn.Module._buffers": "buffers by name",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that state_dict leaves out",
    "torch.nn.Module._forward_hooks": "hooks after a forward",
    "torch.nn.Module._forward_pre_hooks": "hooks before a forward",
    "torch.Tensor._is_view": "whether a tensor is a view",
    "torch.UntypedStorage._cdata": "identity of a storage",
    "torch._ops.OpOverload._schema": "arguments of an operator",
    "torch._ops.OpOverload._overloadpacket": "an operator without its overload",
    "torch._ops.OpOverload._overloadname": "the overload",
}
"""Private by name alone: code outside of torch's core uses them,
and every release has had them for years.
"""

OTHERS = {
    # Python: named tuples, os, sys
    *("_asdict", "_replace", "_field_defaults", "_exit", "_getframe"),
    *("_SubParsersAction", "_actions", "_choices_actions"),  # argparse
    # multiprocessing
    *("_forkserver", "_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"),
    "_cat_file",  # fsspec: a coroutine of a file system
    # transformers
    *("_attn_implementation", "_apply_gate", "_init_weights", "_pp_plan", "_tp_plan"),
    *("_can_record_outputs", "_keys_to_ignore_on_load_unexpected"),
}
"""Private names of other packages."""


def sources() -> dict[Path, ast.Module]:
    """Return the files of the packages."""
    return {path: ast.parse(path.read_text()) for path in files()}


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a file gives to functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) == "self"
        ):
            names.add(node.attr)
    return names


def private_attributes(tree: ast.Module) -> set[str]:
    """Return the private attributes that a file reads of objects, by the dot or by getattr;
    not those of ``self``.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls"):
            names.add(node.attr)
        if isinstance(node, ast.Call) and dotted(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
            "_replaced",
        ):
            names |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
    return {name for name in names if re.match(r"_[a-zA-Z]", str(name))}


def unnamed(files: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the private attributes of torch that one of the files reads and does not name
    in PRIVATE_TORCH.
    """
    known = {name.rpartition(".")[2] for name in SETTLED} | OTHERS
    known = known.union(*map(own_names, files.values()))
    found = {}
    for path, tree in files.items():
        named = {part for name in declared_in(path, tree) for part in name.split(".")}
        reads = private_attributes(tree) - known - named
        reads = {
            name
            for name in reads
            if not name.startswith("_foreach_") and not is_operator(tree, name)
        }
        if reads:
            found[module_of(path)] = reads
    return found


def is_operator(tree: ast.Module, name: str) -> bool:
    """Return whether a private name is that of an operator, ``aten._name``,
    wherever the file reads it.
    """
    owners = [
        dotted(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == name
    ]
    return bool(owners) and all(owner in ("aten", "torch.ops.aten") for owner in owners)


def declared_in(path: Path, tree: ast.Module) -> dict[str, str]:
    """Return the PRIVATE_TORCH of a file; empty: it has none."""
    targets = {
        dotted(target)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    if "PRIVATE_TORCH" not in targets:
        return {}
    found: dict[str, str] = importlib.import_module(module_of(path)).PRIVATE_TORCH
    return found


def declared() -> dict[str, dict[str, str]]:
    """Return name -> {file: versions}."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in files():
        text = path.read_text()
        names = declared_in(path, ast.parse(text)) if "PRIVATE_TORCH" in text else {}
        for name, versions in names.items():
            found[name][str(path.relative_to(ROOT))] = versions
    return dict(found)


def is_in(versions: str, release: tuple[int, int]) -> bool:
    """Return whether a release of torch, such as (2, 13), is one of ``versions``:
    "2.15" or "2.11-2.14".
    """
    first, _, last = versions.partition("-")
    low, high = (tuple(map(int, each.split("."))) for each in (first, last or first))
    return low <= release <= high


def table() -> str:
    """Return the tables of docs/install.md."""
    lines = ["| name | versions | file |", "|---|---|---|"]
    for name, found in sorted(declared().items()):
        places = ", ".join(f"`{file}`" for file in found)
        lines.append(f"| `{name}` | {', '.join(sorted(set(found.values())))} | {places} |")
    lines += [
        "",
        "Private by name alone, and used in several rooms:",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {text} |" for name, text in SETTLED.items()]
    return "\n".join(lines) + "\n"


def document() -> str:
    """Return docs/install.md with the tables of the source."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(document())
