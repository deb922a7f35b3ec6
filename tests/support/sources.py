"""Source roots of the checkout and the modules below them.
A file's path below its root is its import path.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("framework", "models", "launch", "tools")
TRAINER = ROOT / "framework" / "meshwright"
PACKAGES = {
    "meshwright": "framework",
    "meshwright_models": "models",
    "meshwright_launch": "launch",
    "meshwright_plan": "tools",
    "meshwright_interop": "tools",
}
"""Package -> its source root."""


def files(*packages: str) -> Iterator[Path]:
    """Yield every Python file of the packages, by default of all."""
    for package in packages or PACKAGES:
        yield from sorted((ROOT / PACKAGES[package] / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name of a file below a source root; a package goes by its folder's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dotted(node: ast.AST) -> str:
    """Return a name or a chain of attributes as it is written, such as torch._C.x;
    empty: another expression. A tenth of the time of ``ast.unparse``.
    """
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
