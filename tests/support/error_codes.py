"""Error codes in the source, and the page docs/errors.md and golden files that list them.

python -m tests.support.error_codes          writes docs/errors.md and tests/golden/errors/*.txt, prints the next
numbers
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import meshwright.errors
from meshwright.errors import UserError
from tests.support.sources import SOURCE_ROOTS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "errors.md"
GOLDEN = ROOT / "tests" / "golden" / "errors"
CODE = re.compile(r"MW-([A-Z]+)-(\d{3})")
RETIRED = "retired"
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
    "PLANNER": "`meshwright plan`",
    "REPORT": "`meshwright report`",
    "RUN": "a run on disk: saving, resuming, its lock; blueprint and build",
    "SCHEDULE": "pipeline schedules",
    "SYSTEM": "files and processes",
    "TP": "tensor parallelism",
    "TRACKING": "records and sinks",
    "VERIFY": "`meshwright verify`",
    "WATCH": "hangs, NaN and Inf, drift, stragglers, traces",
}


class Site(NamedTuple):
    """One call in the source that creates an error."""

    code: str
    kind: str
    """Class of the error, or the name of the parameter that holds it."""
    module: str
    texts: tuple[str, ...]
    """The message with ``{expression}`` for each value; several where it has several forms."""

    @property
    def room(self) -> str:
        return self.code.split("-")[1]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.kind, UserError.exit_code)


def error_classes() -> set[str]:
    """Return the names of all error classes for users."""
    return set(EXIT_CODES)


def sources() -> Iterator[tuple[str, Path]]:
    """Yield (module, path) of every installed file."""
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = path.relative_to(ROOT / root).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    """Yield every call with the innermost function around it."""

    def visit(node: ast.AST, around: ast.FunctionDef | None) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
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
    is_code = isinstance(first, ast.Constant) and isinstance(first.value, str) and CODE.fullmatch(first.value)
    return first.value if is_code and isinstance(first, ast.Constant) else None


def find_sites() -> list[Site]:
    """Find all calls in the source that create an error with a literal code, sorted by code."""
    found = []
    for module, path in sources():
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call, around in calls(tree):
            code = code_of(call)
            if code is not None:
                texts = _Texts(functions, around).of(call.args[1], 0)[:MOST_TEXTS]
                kind = "ConfigError" if called(call) in ("Rule", "refuse") else called(call)
                found.append(Site(code, kind, module, tuple(dict.fromkeys(texts))))
    return sorted(found)


class _Texts:
    """The forms of a message: f-strings as templates, through local names and helper functions of the file."""

    def __init__(self, functions: dict[str, ast.FunctionDef], around: ast.FunctionDef | None) -> None:
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
        values = [n.value for n in ast.walk(self._around) if isinstance(n, ast.Return) and n.value is not None]
        return [text for value in values if not _is_none(value) for text in self.of(value, depth + 1)]

    def _returned(self, call: ast.Call, depth: int) -> list[str]:
        """Return what a helper returns, with the texts among its arguments put in."""
        function = self._functions[called(call)]
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
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
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="append" | "extend"), args=[added]):
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


def repeated(sites: Sequence[Site]) -> list[str]:
    """Return the codes that occur at several places."""
    codes = [site.code for site in sites]
    return sorted({code for code in codes if codes.count(code) > 1})


def without_code() -> list[str]:
    """Return ``path:line`` for every error for users that is made without a literal code."""
    missing = []
    for _, path in sources():
        for call, _ in calls(ast.parse(path.read_text())):
            is_error = called(call) in EXIT_CODES and not isinstance(call.func, ast.Attribute)
            passes_on = bool(call.args) and ast.unparse(call.args[0]) in ("code", "each.code", "rule.code")
            if is_error and code_of(call) is None and not passes_on:
                missing.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    return missing


def retired() -> set[str]:
    """Return the codes of removed errors, which no new error may reuse."""
    lines = [line for path in GOLDEN.glob("*.txt") for line in path.read_text().splitlines()]
    return {line.split()[0] for line in lines if line.endswith(f" {RETIRED}")}


def golden(sites: Sequence[Site], gone: set[str]) -> dict[str, str]:
    """Return the golden file of each room: code, class, exit code and texts."""
    entries = [(site.room, site.code, _entry(site)) for site in sites]
    entries += [(code.split("-")[1], code, f"{code} {RETIRED}\n") for code in gone]
    return {
        f"{room.lower()}.txt": "".join(entry for _, _, entry in of_room)
        for room, of_room in groupby(sorted(entries), lambda entry: entry[0])
    }


def _entry(site: Site) -> str:
    texts = "".join("    " + text.replace("\n", "\n    ") + "\n" for text in site.texts)
    return f"{site.code} {site.kind}, exit {site.exit_code}\n{texts}"


def document(sites: Sequence[Site], gone: set[str]) -> str:
    """Return ``docs/errors.md``."""
    lines = [
        "# Error codes",
        "",
        "Every error that a user can cause prints one message: the finding, the place, the next step, and a code in",
        "brackets at the end of its first line. A code stays with its cause when the words change, and is never given",
        "to another cause. In Python it is `error.code` of `meshwright.errors.UserError`; the text is `error.message`.",
        "",
        "Below, `{...}` is a value that the message fills in. Exit codes: 1 communication failed or a rank is missing,",
        "2 the input or the machine, 3 `doctor` found a fault, 17 NaN or Inf, 18 replicas differ, 19 a hang, 20 the",
        "files of the run were removed or cannot be written, 85 saved and ended as asked.",
        "",
        "The page is generated from the source: `python -m tests.support.error_codes`.",
    ]
    for room, of_room in groupby(sites, lambda site: site.room):
        lines += ["", f"## {room}: {ROOMS[room]}", "", "| code | exit | message |", "|---|---|---|"]
        lines += [f"| `{site.code}` | {site.exit_code} | {_cell(site)} |" for site in of_room]
    if gone:
        lines += ["", "## Retired", "", "No longer raised, and not used again: " + ", ".join(sorted(gone)) + "."]
    return "\n".join(lines) + "\n"


def _cell(site: Site) -> str:
    texts = [" ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") for text in site.texts]
    return "<br>".join(texts)


def main() -> None:
    """Write the document and the golden files; print the next free number of each room."""
    sites = find_sites()
    lines = [line for path in GOLDEN.glob("*.txt") for line in path.read_text().splitlines()]
    old = {line.split()[0] for line in lines if CODE.match(line)}
    gone = old - {site.code for site in sites}
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, text in golden(sites, gone).items():
        (GOLDEN / name).write_text(text)
    DOCUMENT.write_text(document(sites, gone))
    last = {code.split("-")[1]: code for code in sorted(old | {site.code for site in sites})}
    print("last numbers:", ", ".join(last.values()))


if __name__ == "__main__":
    main()
