"""Every command with hostile paths, and every option with hostile values:
an exit code and one message, within seconds.

The commands and their options come from the parser, so that a new one is tried too.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright_launch.arguments import build_parser
from meshwright_launch.cli import main

pytestmark = pytest.mark.slow
LIMIT_S = 30
REQUIRED = {
    "--nodes": "1",
    "--devices-per-node": "8",
    "--image": "team/train:1",
    "--cluster": "h100",
    "--out": "out",
    "--tokenizer": "nothere",
    "--prompt": "a",
    "--from": None,
}
"""Values of required options; None: with two values of its own."""
WITHOUT_A_PATH = {"completion", "data stdlib", "calibrate", "init"}
"""Commands that need no file: with usual values they would do their work."""
PATHS = [
    "fifo",
    "/dev/zero",
    "/proc/kmsg",
    ".",
    "nothere",
    "x" * 5000,
    "a/" * 3000,
    "\udcff",
    "loop",
]
VALUES = [
    "9" * 5000,
    "-1",
    "1e400",
    "nan",
    "\u0663\u0664",
    "",
    "a\x00b",
    "fifo",
    "/dev/zero",
    "[" * 5000,
    "\x1b[2J",
    "\udcff",
]


def leaves(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield every command without subcommands, with its parser."""
    nested = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    for action in nested:
        for name, inner in action.choices.items():
            yield from leaves(inner, (*words, name))
    if not nested:
        yield " ".join(words), parser


COMMANDS = dict(leaves(build_parser()))


def minimal(name: str, path: str) -> list[str]:
    """Return the words of a command with all that it requires; ``path`` for each positional
    argument.
    """
    words = name.split()
    if name == "convert":
        return [*words, "--from", "hf", path, "out"]
    for action in COMMANDS[name]._actions:
        if action.required and action.option_strings:
            words += [action.option_strings[0], REQUIRED[action.option_strings[0]]]
        elif not action.option_strings:
            words.append(path)
    return words


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a FIFO and a circular link, and an alarm: a command that waits fails."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {LIMIT_S} s")

    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(word if len(word) < 60 else f"{word[:20]}...({len(word)})" for word in words)
    signal.alarm(LIMIT_S)
    try:
        code = main(words)
    except Exception as error:
        raise AssertionError(f"{shown}: {type(error).__name__}: {str(error)[:500]}") from error
    finally:
        signal.alarm(0)
    said = capsys.readouterr().err
    assert code in (1, 2), (shown, code, said[:500])
    assert "Traceback" not in said and "\x1b[" not in said and 0 < len(said) < 4000, (
        shown,
        len(said),
        said[:500],
    )


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_A_PATH))
def test_a_hostile_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in PATHS:
        answered(minimal(name, path), capsys)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_A_PATH))
def test_hostile_values_of_each_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is missing, so that a value that passes the parser goes no further than that."""
    for action in COMMANDS[name]._actions:
        for option in action.option_strings[:1]:
            for value in () if action.nargs in (0, 2) or option == "-h" else VALUES:
                answered([*minimal(name, "nothere"), f"{option}={value}"], capsys)


@pytest.mark.parametrize("name", ["init", "data stdlib"])
def test_a_hostile_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in PATHS[:3] + PATHS[5:7]:
        answered(
            [*name.split(), path] if name == "init" else [*name.split(), "--out", path], capsys
        )
