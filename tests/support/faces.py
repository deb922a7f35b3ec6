"""Names of the trainer and the launcher on which the packages of tools/ stand,
each function with its signature.

python -m tests.support.faces          writes tests/golden/faces/*.txt: the diff shows what a change asks of the tools
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from tests.support.sources import ROOT, files

GOLDEN = ROOT / "tests" / "golden" / "faces"
TOOLS = ("meshwright_plan", "meshwright_interop")
UNDER = ("meshwright", "meshwright_launch", "meshwright_models")


def imported(path: Path) -> set[tuple[str, str]]:
    """Return (module, name) of what a file imports from the packages under the tools."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.partition(".")[0] in UNDER
        for alias in node.names
    }


def described(module: str, name: str) -> str:
    """Return a line for a name: its signature if it is a function."""
    value = getattr(importlib.import_module(module), name, None)
    if value is None:
        value = importlib.import_module(f"{module}.{name}")
    return f"{module}.{name}{signature_of(value) if inspect.isfunction(value) else ''}"


def signature_of(function: Callable[..., object]) -> str:
    """Return the parameters of a function and its result; a default, which may be an object,
    as three dots.
    """
    signature = inspect.signature(function)
    parameters = [
        each if each.default is inspect.Parameter.empty else each.replace(default=...)
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters)).replace("Ellipsis", "...")


def face(package: str) -> str:
    """Return the lines of a package, sorted."""
    names = set().union(*map(imported, files(package)))
    return "".join(f"{line}\n" for line in sorted(described(*each) for each in names))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for package in TOOLS:
        (GOLDEN / f"{package}.txt").write_text(face(package), encoding="utf-8")
