"""Files, numbers and variables of any origin enter by one door each:
no module opens or parses them by itself.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator

import pytest

from meshwright.system.numbers import MAX_INT64, environment_number, job_restarts, whole_number
from meshwright_launch.arguments import build_parser
from tests.support.errors import raises
from tests.support.sources import ROOT, dotted, files

OPENS_BY_ITSELF = {
    ("framework/meshwright/system/bounded.py", "os.open"): "the door itself",
    ("framework/meshwright/system/atomic.py", "os.open"): "without blocking, to sync",
    ("framework/meshwright/system/process.py", "os.open"): "a lock, without blocking, never read",
    ("framework/meshwright/run/files.py", "os.open"): "a directory, and a new log",
    (
        "framework/meshwright/run/files.py",
        ".open('rb')",
    ): "a descriptor of this process that is a regular file",
    ("framework/meshwright/tracking/jsonl.py", "os.open"): "metrics.jsonl, after check_run_files",
    ("framework/meshwright/tracking/wandb_child.py", "os.open"): "/dev/null",
    ("framework/meshwright/tracking/wandb.py", "netrc.netrc"): "after why_unusable",
    ("framework/meshwright/config/aliases.py", ".read_text"): "a table of this package",
    ("tools/meshwright_plan/planner/hardware.py", ".read_text"): "a table of this package",
    ("framework/meshwright/optimizer/offload.py", "torch.from_file"): "a new file of its own",
    ("framework/meshwright/checkpoint/memory.py", "torch.from_file"): "a new file of its own",
    (
        "framework/meshwright/data/huggingface.py",
        "Dataset.from_file",
    ): "after a check of the directory",
    ("framework/meshwright/data/prepare/finish.py", "np.memmap"): "of its own work folder",
    (
        "framework/meshwright/data/indexed.py",
        "np.fromfile",
    ): "after its header was read by the door",
    (
        "framework/meshwright/data/token_files.py",
        "np.fromfile",
    ): "after its header was read by the door",
    ("launch/meshwright_launch/cli.py", "os.open"): "/dev/null",
    ("launch/meshwright_launch/rank.py", "os.open"): "a new log",
}
"""(file, call) -> reason why it does not read by ``system/bounded.py``. The table only shrinks."""
READERS = {
    *("os.open", "netrc.netrc", "np.memmap", "np.fromfile", "torch.from_file", "Dataset.from_file"),
    *(
        "json.load",
        "tomllib.load",
        "yaml.load",
        "yaml.safe_load",
        "pickle.load",
        "torch.load",
        "linecache.getlines",
    ),
}
"""Functions that open a path, or read an open file to its end."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in files():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def opened(call: ast.Call) -> str | None:
    """Return how a call opens a file for reading, or None."""
    name = dotted(call.func) or ast.unparse(call.func)
    first = call.args[0] if call.args else None
    if ".".join(name.split(".")[-2:]) in READERS:
        return ".".join(name.split(".")[-2:])
    if name == "open" and not (isinstance(first, ast.Constant) and isinstance(first.value, int)):
        return "open"
    if name.endswith((".read_text", ".read_bytes")):
        return f".{name.rpartition('.')[2]}"
    if name.endswith(".open") and name != "gzip.open":
        by_mode = isinstance(first, ast.Constant) and str(first.value).startswith("r")
        if by_mode or (
            first is None and any(keyword.arg == "encoding" for keyword in call.keywords)
        ):
            return f".open({ast.unparse(first) if first is not None else ''})"
    return None


def test_every_file_is_opened_by_the_door() -> None:
    found = {
        (path, how)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (how := opened(node)) is not None
    }
    assert found - OPENS_BY_ITSELF.keys() == set(), (
        "a FIFO would block it, /dev/zero fill memory: system/bounded.py"
    )
    assert OPENS_BY_ITSELF.keys() - found == set(), "no longer there: remove these entries"


def test_that_search_finds_each_form() -> None:
    def found(text: str) -> str | None:
        (node,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        return opened(node)

    for text in (
        "open(p)",
        "p.open('rb')",
        "Path.open(encoding='utf-8')",
        "p.read_text()",
        "os.open(p, 0)",
    ):
        assert found(text) is not None, text
    for text in ("sink.open()", "p.open('wb')", "read_text(p)", "open(2, 'w')"):
        assert found(text) is None, text


def test_no_variable_and_no_digits_are_parsed_by_int() -> None:
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or path == "framework/meshwright/system/numbers.py":
                continue
            name = dotted(node.func) or ast.unparse(node.func)
            if name in ("int", "float"):
                words = " ".join(map(ast.unparse, node.args))
                if any(word in words for word in ("environ", "getenv", "env[", "env.get")):
                    found.append(f"{path}:{node.lineno}")
            if name.endswith((".isdecimal", ".isdigit", ".isnumeric")) and not path.startswith(
                "models/"
            ):
                found.append(f"{path}:{node.lineno}")
    assert found == [], (
        "system/numbers.py has the door: int() takes Arabic digits and blanks, and raises beyond"
        " 4,300"
    )


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions(inner)
        else:
            yield action


@pytest.mark.parametrize(
    "text", ["9" * 5000, "1e400", "-" + "9" * 30, "nan", "inf", "\u0663", "1_0", "0x10", ""]
)
def test_every_number_of_the_command_line_is_bounded(text: str) -> None:
    types = {action.type for action in actions(build_parser()) if action.type is not None}
    assert not types & {int, float}, "an option takes a type of arguments/common.py, with bounds"
    numeric = 0
    for kind in types:
        assert callable(kind)
        try:
            value = kind("3")
        except argparse.ArgumentTypeError:
            value = kind("0.5")
        if isinstance(value, int | float | list):
            numeric += 1
            with pytest.raises(argparse.ArgumentTypeError) as caught:
                kind(text)
            assert len(str(caught.value)) < 250
    assert numeric > 8


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("-3", None),
        (str(MAX_INT64), MAX_INT64),
        (str(MAX_INT64 + 1), None),
        ("9" * 5000, None),
    ],
)
def test_a_whole_number(text: str, number: int | None) -> None:
    assert whole_number(text) == number
    assert (
        whole_number("-3", -5) == -3
        and whole_number("\u0663") is None
        and whole_number("4", 5) is None
    )


def test_a_variable_that_is_no_number_is_named() -> None:
    assert environment_number("X", 5, env={}) == environment_number("X", 5, env={"X": ""}) == 5
    for text in ("9" * 5000, "abc", "-1", "1.5", "\u0663"):
        with raises("MW-SYSTEM-008", "X = '") as caught:
            environment_number("X", 5, env={"X": text})
        assert len(str(caught.value)) < 400
    with raises("MW-SYSTEM-008", "SLURM_RESTART_COUNT"):
        job_restarts({"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "many"})
    assert job_restarts({"SLURM_RESTART_COUNT": "many"}) == 0
