"""Rules of the prose that a program can check: how docstrings open, and words that code cannot do.

python tests/support/prose.py framework/meshwright/mesh        prints what breaks a rule below a folder, and counts
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_LIST = """
    abridge accept account accumulate activate add advance align all-gather all-reduce allocate allow append apply
    arrange assemble assert assign attach attend average await backpropagate balance begin bind blend block bound bring
    broadcast build cache calculate calibrate call cap capture carry cast change check choose clamp classify clean clear
    clip clone close collect combine compare compile complete compose compress compute concatenate configure connect
    construct consume convert copy count cover create cut debug declare decode decompose decorate decrease define
    delete derive describe destroy detach detect determine digest disable discard dispatch display divide double
    draw drop dry-run dump embed emit empty enable encode end enqueue ensure enter enumerate escape estimate
    evaluate exchange exclude execute exit expand expect explain export express extend extract fail fetch fill
    filter find finish fit fix flatten flush fold follow forget fork format forward free freeze fuse gather generate
    get give group guess halt hand handle hash hide hold identify ignore implement import include increase index
    inherit initialise insert inspect install interleave interpolate interpret interrupt intersect invert invoke
    issue iterate join judge keep kill label launch lay leave limit link list load locate lock log look lower make
    map mark mask match materialise measure merge mirror move name normalise note notify number observe offload open
    order overlap overwrite pack pad parse partition pass pause pick pickle pin place plan play plot point poll pop
    post predict prefetch prepare prevent print probe process produce profile propose prove prune publish pull push
    put quantise quote raise rank react read rebuild receive recompute record recover redirect reduce reduce-scatter
    refuse register reject release remember remove rename render reorder repeat replace replay report represent
    reproduce request require reserve reset reshape reshard resolve respect restart restore resume retry return
    reverse rewrite rotate round route run sample save scale scan scatter schedule score search seed select send
    separate serialise serve set shard share shift shorten show shrink shuffle shut simulate skip sleep slice solve
    sort spawn split stack start state step stop store stream strip submit subtract sum summarise support suppress
    swap switch sync synchronise take terminate test time touch trace track train transform translate transpose
    traverse trim truncate try turn undo unflatten unpack unshard untie update upload use validate verify view visit
    wait walk warm warn watch weigh wrap write yield zero
"""
VERBS = frozenset(_LIST.split())
"""Imperative verbs that a function's docstring may open with. Another one is added here."""

QUESTIONS = re.compile(
    r"^(what|who|whose|whether|where|which|how|why|when|of|and|or|that|they|it|there|here)\b", re.I
)
SPEECH = re.compile(
    r"\b(says?|said|saying|tells?|told|telling|knows?|knew|hears?|heard|speaks?|spoken)\b", re.I
)


class Finding(NamedTuple):
    """A docstring that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Docstring(NamedTuple):
    """A docstring and the kind of thing that it documents."""

    kind: str
    """function, test, property, class, module or attribute."""
    line: int
    text: str


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    """Yield every docstring of a module, attribute docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Docstring(_kind_of(node), getattr(node, "lineno", 1), text)
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if (
                is_text
                and isinstance(before, ast.Assign | ast.AnnAssign)
                and isinstance(after.value.value, str)
            ):
                yield Docstring("attribute", after.lineno, after.value.value)


def _kind_of(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    if node.name.startswith("test_"):  # type: ignore[attr-defined]
        return "test"  # its docstring may be a sentence: what holds
    decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
    is_value = any("property" in each or "pytest.fixture" in each for each in decorators)
    return "property" if is_value else "function"


def findings(path: Path) -> list[Finding]:
    """Return the docstrings of a file that break a rule."""
    found = []
    for kind, line, text in docstrings(ast.parse(path.read_text())):
        first = text.split(None, 1)[0].strip(".,:;").lower() if text.split() else ""
        opening = text.split("\n", 1)[0][:90]
        if kind == "function" and first not in VERBS:
            found.append(Finding(path, line, "opens without an imperative verb", opening))
        elif kind not in ("function", "test") and QUESTIONS.match(text):
            found.append(Finding(path, line, "opens without a noun", opening))
        if match := SPEECH.search(text):
            found.append(
                Finding(
                    path, line, f"code does not {match[0]}", text[max(0, match.start() - 40) :][:90]
                )
            )
    return found


def main(words: list[str]) -> None:
    paths = [
        path
        for word in words
        for path in ([Path(word)] if word.endswith(".py") else Path(word).rglob("*.py"))
    ]
    found = [finding for path in sorted(paths) for finding in findings(path)]
    for finding in found:
        print(finding)
    total = sum(1 for path in paths for _ in docstrings(ast.parse(path.read_text())))
    print(f"{len(found)} findings in {total} docstrings of {len(paths)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
