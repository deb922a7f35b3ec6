"""Sizes of the packages and rooms, for the eye: no test limits them.

make sizes      files, lines, syntax nodes, nodes per line, names that other rooms use; and files that name a capability
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.reading_path import READING_PATH, file_of
from tests.support.sources import PACKAGES, ROOT, files, module_of

WORDS = ("muon", "adapter", "fp8", "compile", "mup", "ramp", "expert", "context")
"""Capabilities, whose spread over files is counted."""
PARTS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
"""Syntax nodes that are not counted."""


class Size(NamedTuple):
    """Size of some files."""

    files: int
    lines: int
    nodes: int
    """Syntax nodes without docstrings, and without Load, Store and the signs of operators."""
    comments: int
    """Lines with a comment."""


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Return the tree without strings that are statements of their own."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def size_of(paths: Iterable[Path]) -> Size:
    """Return the size of some files."""
    num_files = num_lines = num_nodes = num_comments = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        num_files += 1
        num_lines += len(text.splitlines())
        num_nodes += sum(
            not isinstance(node, PARTS) for node in ast.walk(without_docstrings(ast.parse(text)))
        )
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        num_comments += sum(token.type == tokenize.COMMENT for token in tokens)
    return Size(num_files, num_lines, num_nodes, num_comments)


def room_of(path: Path) -> str:
    """Return the room of a file: below the trainer the first folder or file,
    else the package and its folder.
    """
    parts = module_of(path).split(".")
    if parts[0] == "meshwright":
        return parts[1] if len(parts) > 1 else "meshwright"
    return ".".join(parts[:2]) if path.parent.name != parts[0] else parts[0]


def names_used_elsewhere() -> dict[str, set[str]]:
    """Return the names that other rooms import, by room."""
    rooms = {module_of(path): room_of(path) for path in files()}
    used: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                module = (
                    f"{node.module}.{alias.name}"
                    if f"{node.module}.{alias.name}" in rooms
                    else node.module
                )
                if module in rooms and rooms[module] != room_of(path):
                    used[rooms[module]].add(f"{node.module}.{alias.name}")
    return used


def reached_from(module: str) -> int:
    """Return the number of our files that a module imports when it runs, directly or not."""
    paths = {module_of(path): path for path in files()}
    found, left = {module}, [module]
    while left:
        tree = ast.parse(paths[left.pop()].read_text(encoding="utf-8"))
        for node in _at_run_time(tree):
            for name in _imported(node):
                while name and name not in paths:
                    name = name.rpartition(".")[0]
                if name and name not in found:
                    found.add(name)
                    left.append(name)
    return len(found)


def _at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, without those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _at_run_time(node)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def spread() -> dict[str, int]:
    """Return the number of files that name a capability, by its word."""
    texts = [path.read_text(encoding="utf-8").lower() for path in files()]
    return {
        word: sum(re.search(rf"(?<![a-z]){word}", text) is not None for text in texts)
        for word in WORDS
    }


def row(name: str, size: Size, used: object = "") -> str:
    """Return a row of the table."""
    share = size.comments / max(size.lines, 1)
    per_line = size.nodes / max(size.lines, 1)
    return f"{name:<34}{size.files:>6}{size.lines:>8}{size.nodes:>9}{per_line:>7.1f}{share:>9.1%}{used!s:>7}"


def table(core_rooms: Iterable[str]) -> str:
    """Return the whole table."""
    used = names_used_elsewhere()
    by_room: dict[str, list[Path]] = defaultdict(list)
    for path in files():
        by_room[room_of(path)].append(path)
    lines = [f"{'':<34}{'files':>6}{'lines':>8}{'nodes':>9}{'/line':>7}{'comments':>9}{'names':>7}"]
    lines += [row(room, size_of(paths), len(used[room])) for room, paths in sorted(by_room.items())]
    lines += ["", *(row(package, size_of(files(package))) for package in PACKAGES)]
    core = [path for room in core_rooms for path in by_room[room]]
    reading = [file_of(entry) for entry in READING_PATH]
    lines += [row("core of the trainer", size_of(core)), row("reading path", size_of(reading))]
    lines += [row("tests", size_of((ROOT / "tests").rglob("*.py")))]
    lines += ["", f"files reached by step.py: {reached_from('meshwright.step')}"]
    lines += [
        "files that name " + ", ".join(f"{word} {number}" for word, number in spread().items())
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    from tests.test_architecture import CORE

    print(table(CORE))
