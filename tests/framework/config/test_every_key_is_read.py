"""No key without a reader: whoever sets one expects it to do something.

The rule, by syntax tree: a key ``section.key`` is read where ``.key`` is taken from an expression
that is that section, in the trainer or in ``launch/``, but not in ``config/``, which only carries
keys about, nor in ``verify/``, whose reference run would hide that the real one ignores a key. An
expression is

- the configuration, when it is a name or attribute called ``config``, or one declared or returned
  as ``RunConfig``;
- a section, when it is ``.section`` of the configuration, or a name or attribute declared as the
  section's class (imported from ``meshwright.config``) or assigned from such an expression.

Names count for a whole file. That is a little generous, and needs no flow analysis. One file of
``config/`` is a reader after all: ``derived.py`` decides how many processes to start.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from tests.support.sources import ROOT, files

CONFIG = "RunConfig"
CLASSES = {field.annotation.__name__: name for name, field in RunConfig.model_fields.items()}  # type: ignore[union-attr]
KEYS = {
    (name, key)
    for name, field in RunConfig.model_fields.items()
    for key in field.annotation.model_fields  # type: ignore[union-attr]
}


class Meanings:
    """What the names of one file mean: :data:`CONFIG`, the name of a section,
    or nothing of ours.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.classes: dict[str, str] = {}
        self.modules: set[str] = set()
        self.names: dict[str, set[str]] = defaultdict(set, config={CONFIG})
        self.attributes: dict[str, set[str]] = defaultdict(set, config={CONFIG})
        self.functions = {"load": CONFIG, "resolve": CONFIG, "parse": CONFIG}
        self._imports(tree)
        size, nodes = -1, [*ast.walk(tree)]
        while size != (
            size := sum(map(len, (*self.names.values(), *self.attributes.values(), self.functions)))
        ):
            for node in nodes:
                self._learn(node)

    def _imports(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright"):
                for alias in node.names:
                    if alias.name in {*CLASSES, CONFIG} and str(node.module).startswith(
                        "meshwright.config"
                    ):
                        self.classes[alias.asname or alias.name] = CLASSES.get(alias.name, CONFIG)
                    elif alias.name in ("config", "sections", "training"):
                        self.modules.add(alias.asname or alias.name)

    def declared(self, annotation: ast.expr | None) -> set[str]:
        """What an annotation says: ``Optimizer``, ``config.Optimizer``, ``"Optimizer"``,
        ``Optimizer | None``.
        """
        found: set[str] = set()
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name) and node.id in self.classes:
                found.add(self.classes[node.id])
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in self.modules
            ):
                found |= {CLASSES.get(node.attr, node.attr)} & {*CLASSES.values(), CONFIG}
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node is not annotation
            ):
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= self.declared(ast.parse(node.value, mode="eval").body)
        return found

    def of(self, node: ast.expr) -> set[str]:
        """What an expression means."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            inner = self.of(node.value)
            return (
                {node.attr} & set(CLASSES.values())
                if CONFIG in inner
                else self.attributes.get(node.attr, set())
            )
        if isinstance(node, ast.Call):
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            return {self.functions[name]} if name in self.functions else set()
        return set()

    def _bind(self, target: ast.expr, meaning: set[str]) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] |= meaning
        elif isinstance(target, ast.Attribute):
            self.attributes[target.attr] |= meaning

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg):
            self.names[node.arg] |= self.declared(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            self.functions.update((node.name, meaning) for meaning in self.declared(node.returns))
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    self.attributes[field.target.id] |= self.declared(field.annotation)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, self.declared(node.annotation))
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, self.of(node.value))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for part, value in zip(target.elts, node.value.elts, strict=False):
                        self._bind(part, self.of(value))
                else:
                    self._bind(target, self.of(node.value))


def read_by_property() -> dict[tuple[str, str], set[str]]:
    """Return (section, property) -> the keys and properties that it reads."""
    found = {}
    for name, field in RunConfig.model_fields.items():
        for attribute, value in vars(field.annotation).items():
            if isinstance(value, property):
                tree = ast.parse(textwrap.dedent(inspect.getsource(value.fget)))  # type: ignore[arg-type]
                found[name, attribute] = {
                    node.attr
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                }
    return found


PROPERTIES = read_by_property()


def keys_read(source: str) -> set[tuple[str, str]]:
    """Return the keys that a file reads, also through a property of their section."""
    tree = ast.parse(source)
    meanings = Meanings(tree)
    read = {
        (section, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for section in meanings.of(node.value)
    }
    pending = [each for each in read if each in PROPERTIES]
    while pending:
        section, name = pending.pop()
        inner = {(section, key) for key in PROPERTIES[section, name]} - read
        read |= inner
        pending += [each for each in inner if each in PROPERTIES]
    return KEYS & read


def readers() -> Iterator[Path]:
    """The files that count."""
    for path in files("meshwright", "meshwright_launch", "meshwright_plan", "meshwright_interop"):
        if path.relative_to(ROOT).parts[2] not in ("config", "verify") or path.name == "derived.py":
            yield path


def test_every_key_is_read() -> None:
    read = set().union(*(keys_read(path.read_text()) for path in readers()))
    unread = sorted(".".join(key) for key in KEYS - read)
    assert not unread, (
        f"nobody reads {', '.join(unread)}: read them, or take them out of the schema"
    )


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("x = config.parallel.tp", ["parallel.tp"]),
        ("def f(self): return self.config.train.steps", ["train.steps"]),
        ("parallel = config.parallel\nprint(f'{parallel.tp}')", ["parallel.tp"]),
        ("p, t = config.parallel, config.train\np.tp, t.steps", ["parallel.tp", "train.steps"]),
        (
            "from meshwright.config import Optimizer\ndef f(o: Optimizer | None): return o.eps",
            ["optimizer.eps"],
        ),
        (
            "from meshwright.config.schema import Optimizer as O\ndef f(o: 'O'): return o.eps",
            ["optimizer.eps"],
        ),
        (
            "from meshwright import config\ndef f(o: config.Optimizer): return o.eps",
            ["optimizer.eps"],
        ),
        (
            "from meshwright.config import RunConfig\ndef f(run: RunConfig): return run.run.name",
            ["run.name"],
        ),
        (
            (
                "from meshwright.config import Train\nclass A:\n  t: Train\n  def f(self): return"
                " self.t.steps"
            ),
            ["train.steps"],
        ),
        (
            (
                "from meshwright.config import Train\nclass A:\n  def __init__(self, t: Train):"
                " self.kept = t\n  def f(self): return self.kept.steps"
            ),
            ["train.steps"],
        ),
        ("from meshwright.config import load\nrun = load(path)\nrun.train.steps", ["train.steps"]),
        (
            "from meshwright.config import RunConfig\ndef g() -> RunConfig: ...\ng().train.steps",
            ["train.steps"],
        ),
        # what is none:
        ("optimizer.eps, train.steps, parallel.tp", []),
        ("self.optimizer.eps", []),
        ("from elsewhere import Optimizer\ndef f(o: Optimizer): return o.eps", []),
        ("config.train", []),
        ("config.optimizer.steps", []),
        ("config.train.steps = 3", []),
        ("# config.train.steps\n'config.train.steps'", []),
    ],
)
def test_what_counts_as_reading(source: str, keys: list[str]) -> None:
    assert sorted(".".join(key) for key in keys_read(source)) == keys
