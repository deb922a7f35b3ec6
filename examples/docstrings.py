"""Conversations from the docstrings of Python's standard library: a question and its answer for each function.

    python examples/docstrings.py OUT.jsonl

The same Python gives the same file. Nothing is imported: the sources are parsed.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MIN_WORDS = 4
"""Words of the shortest answer."""


def questions(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield question and answer for each function and method of a module that has a docstring."""
    for owner, functions in owners(module, tree):
        for function in functions:
            text = ast.get_docstring(function)
            if text is None or function.name.startswith("_"):
                continue
            answer = inspect.cleandoc(text).partition("\n\n")[0].replace("\n", " ")
            if len(answer.split()) >= MIN_WORDS:
                yield f"What does {owner}.{function.name}({ast.unparse(function.args)}) do?", answer


def owners(module: str, tree: ast.Module) -> Iterator[tuple[str, list[ast.FunctionDef]]]:
    """Yield the module and its classes, with the functions of each."""
    yield module, [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            own = [member for member in each.body if isinstance(member, ast.FunctionDef)]
            yield f"{module}.{each.name}", own


def main(out: str) -> int:
    """Write the conversations."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    count = 0
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with Path(out).open("w", encoding="utf-8") as file:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if skipped.intersection(inside.parts):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):  # of another version of Python
                continue
            module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            for question, answer in questions(module, tree):
                turns = [("user", question), ("assistant", answer)]
                messages = [{"role": role, "content": text} for role, text in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
                count += 1
    print(f"{count:,} conversations in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
