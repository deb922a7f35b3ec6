"""Error codes of the installed packages, read from their source: code, class, exit code, message,
place. No torch.

Errors are not registered anywhere: a code is the literal first argument of the call that creates
the error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import meshwright.errors
from meshwright.errors import UserError
from meshwright.system.bounded import read_text
from meshwright.system.packages import entries_of
from meshwright_launch.arguments.registered import GROUP

CODE = re.compile(r"MW-([A-Z]+)-(\d{3})")
CONFIG_ROWS = ("Rule", "refuse", "AxisOption", "RefusedPair", "Division")
"""Calls that give the configuration a code, for errors that ``load`` raises."""
MOST_TEXTS = 4
"""Maximum number of forms of one message that are listed."""

EXIT_CODES = {
    name: value.exit_code
    for name, value in vars(meshwright.errors).items()
    if isinstance(value, type) and issubclass(value, UserError)
} | {"UnfitMachineError": 3, "ForkServerError": 1}

ROOMS = {
    "CHECKPOINT": "checkpoints: the file format, reading, writing",
    "CONFIG": "the configuration: file, keys, rules between keys",
    "CP": "context parallelism",
    "EP": "expert parallelism",
    "DATA": "corpora, tokenizers, data preparation",
    "DOCTOR": "`meshwright doctor`",
    "DP": "data parallelism and ZeRO",
    "DRYRUN": "`meshwright dryrun`",
    "INFERENCE": "`meshwright eval` and `meshwright sample`",
    "INTEROP": "models and configurations of Hugging Face, Megatron-LM, torchtitan, nanotron",
    "LAUNCH": "the command line, the local launcher, Slurm",
    "MESH": "ranks, groups, collectives",
    "MODEL": "building a model and drawing its weights",
    "OPTIM": "the optimizer",
    "PICTURE": "charts",
    "PIPELINE": "stages, activation checkpointing, the executor",
    "PLACEMENT": "patterns of names, and features on the modules that they name",
    "PLANNER": "`meshwright plan`",
    "RUN": "a run on disk: saving, resuming, its lock; blueprint and build",
    "SCHEDULE": "pipeline schedules",
    "SYSTEM": "files and processes",
    "TP": "tensor parallelism",
    "TRACKING": "records and sinks",
    "VERIFY": "`meshwright verify`",
    "WATCH": "hangs, NaN and Inf, drift, stragglers, traces",
}


class SourceFile(NamedTuple):
    """Source file of a module."""

    module: str
    path: Path


class Site(NamedTuple):
    """One call in the source that creates an error."""

    code: str
    kind: str
    """Class of the error, or the name of the parameter that holds it."""
    source: SourceFile
    line: int
    texts: tuple[str, ...]
    """The message with ``{expression}`` for each value; several where it has several forms."""

    @property
    def room(self) -> str:
        return self.code.split("-")[1]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.kind, UserError.exit_code)


def installed_sources() -> Iterator[SourceFile]:
    """Yield every module of the trainer, the launcher and the packages that register commands.
    Imports none of them.
    """
    registered = {
        entry.value.partition(":")[0].partition(".")[0] for entry in entries_of(GROUP).values()
    }
    for package in sorted({"meshwright", "meshwright_launch", *registered}):
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            yield from sources_below(Path(folder).parent, package)


def sources_below(root: Path, package: str = "") -> Iterator[SourceFile]:
    """Yield every module below a source root, or those of one package."""
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield SourceFile(".".join(part for part in parts if part != "__init__"), path)


def find_sites(sources: Iterable[SourceFile], wanted: str = "MW-") -> list[Site]:
    """Find all calls that create an error with a literal code, sorted by code.

    ``wanted``: text that a file contains, else it is not parsed; a whole code finds its place fast.
    """
    found = []
    for source in sources:
        text = read_text(source.path, errors="replace")
        if wanted not in text:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a file of another package that has commands
            continue
        functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        for call, around in calls(tree):
            code = code_of(call)
            if code is None or len(call.args) < 2:
                continue
            texts = _Texts(functions, around).of(call.args[1], 0)[:MOST_TEXTS]
            if called(call) == "RefusedPair":
                texts = [f"{texts[0]}; {_Texts(functions, around).of(call.args[2], 0)[0]}"]
            texts = [_opening(call) + text for text in texts]
            kind = "ConfigError" if called(call) in CONFIG_ROWS else called(call)
            found.append(Site(code, kind, source, call.lineno, tuple(dict.fromkeys(texts))))
    return sorted(found)


def _opening(call: ast.Call) -> str:
    """Return what a message of the table of combinations begins with: its features or numbers."""
    named = [str(each.value) for each in call.args[2:] if isinstance(each, ast.Constant)]
    match called(call), named:
        case "RefusedPair", [_, first, second]:
            return f"{first} with {second}: "
        case "AxisOption", [key]:
            return f"parallel.{key} has no effect where its axis has one rank: "
        case "Division", [divisor]:
            return f"{divisor} does not divide: "
    return ""


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    """Yield every call with the innermost function around it."""

    def visit(
        node: ast.AST, around: ast.FunctionDef | None
    ) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
        if isinstance(node, ast.Call):
            yield node, around
        around = node if isinstance(node, ast.FunctionDef) else around
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    return visit(tree, None)


def called(call: ast.Call) -> str:
    """Return the last part of the called name: ``f`` of ``a.b.f(x)``."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def code_of(call: ast.Call) -> str | None:
    """Return the error code that is the first argument of a call, or None."""
    first = call.args[0] if call.args else None
    value = first.value if isinstance(first, ast.Constant) else None
    return value if isinstance(value, str) and CODE.fullmatch(value) else None


class _Texts:
    """The forms of a message: f-strings as templates,
    through local names and helper functions of the file.
    """

    def __init__(
        self, functions: dict[str, ast.FunctionDef], around: ast.FunctionDef | None
    ) -> None:
        self._functions = functions
        self._around = around

    def of(self, node: ast.expr, depth: int) -> list[str]:
        if depth > 6:
            return [_placeholder(node)]
        match node:
            case ast.Constant(value=str(value)):
                return [value]
            case ast.JoinedStr(values=values):
                return ["".join(self._piece(value) for value in values)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pairs = product(self.of(left, depth + 1), self.of(right, depth + 1))
                return ["".join(pair) for pair in pairs]
            case ast.IfExp(body=body, orelse=orelse):
                forms = [form for form in (body, orelse) if not _is_none(form)]
                return [text for form in forms for text in self.of(form, depth + 1)]
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[listed]):
                return self._elements(listed, depth)
            case ast.Call() if called(node) in self._functions:
                return self._returned(node, depth)
            case ast.Name(id=name) if name in self._functions:
                return _Texts(self._functions, self._functions[name])._results(depth)
            case ast.Name(id=name):
                return self._assigned(name, depth) or [_placeholder(node)]
        return [_placeholder(node)]

    def _piece(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        return _placeholder(node.value)

    def _elements(self, node: ast.expr, depth: int) -> list[str]:
        """Return the texts of the elements of a list."""
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            return self.of(node.elt, depth + 1)
        if isinstance(node, ast.Subscript):
            return self._elements(node.value, depth)
        return self.of(node, depth + 1)

    def _results(self, depth: int) -> list[str]:
        assert self._around is not None
        values = [
            n.value
            for n in ast.walk(self._around)
            if isinstance(n, ast.Return) and n.value is not None
        ]
        return [
            text for value in values if not _is_none(value) for text in self.of(value, depth + 1)
        ]

    def _returned(self, call: ast.Call, depth: int) -> list[str]:
        """Return what a helper returns, with the texts among its arguments put in."""
        function = self._functions[called(call)]
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        given = dict(zip(names, call.args, strict=False)) | {
            k.arg: k.value for k in call.keywords if k.arg
        }
        texts = _Texts(self._functions, function)._results(depth + 1)
        for name, value in given.items():
            if isinstance(value, ast.JoinedStr | ast.Constant):
                put = self.of(value, depth + 1)[0] if not _is_plain(value) else str(value.value)  # type: ignore[union-attr]
                texts = [text.replace(f"{{{name}}}", put) for text in texts]
        return texts

    def _assigned(self, name: str, depth: int) -> list[str]:
        """Return the texts that a local name is set to, or that are appended to a local list."""
        texts: list[str] = []
        for node in ast.walk(self._around) if self._around is not None else ():
            if isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    texts += self._only_texts(node.value, depth)
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="append" | "extend"),
                    args=[added],
                ):
                    texts += self._only_texts(added, depth) if owner == name else []
        return texts

    def _only_texts(self, node: ast.expr, depth: int) -> list[str]:
        listed = isinstance(node, ast.GeneratorExp | ast.ListComp)
        texts = self._elements(node, depth + 1) if listed else self.of(node, depth + 1)
        return [text for text in texts if not re.fullmatch(r"\{[^{}]*\}|", text)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _placeholder(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"{{{text}}}" if len(text) <= 32 and "{" not in text else "{...}"
