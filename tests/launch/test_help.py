"""Every command and subcommand has a help with an example,
and each example is a command that there is.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright_launch.arguments import build_parser
from meshwright_launch.arguments.common import load_command
from meshwright_launch.cli import main, split_overrides

ROOT = Path(__file__).parents[2]
TORCHRUN = re.compile(r"^torchrun (--\S+ )*-m meshwright_launch ")
SRUN = re.compile(r"^srun (--\S+ )*")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield all that have a name, the command itself left out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner
                yield from commands(inner)


COMMANDS = list(commands(build_parser()))


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """Return the commands below ``example:``, without the launcher before them."""
    _, _, shown = (parser.epilog or "").partition("example:\n")
    lines = [line.strip() for line in shown.replace("\\\n", " ").splitlines() if line.strip()]
    return [SRUN.sub("", TORCHRUN.sub("meshwright ", line)) for line in lines]


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_each_has_an_example_that_parses(parser: argparse.ArgumentParser) -> None:
    own = [line for line in examples(parser) if line.startswith("meshwright ")]
    assert any(line.startswith(f"{parser.prog} ") for line in own), (
        f"{parser.prog} --help shows no example of itself"
    )
    for line in own:
        words, overrides = split_overrides(shlex.split(line)[1:])
        try:
            options, unknown = build_parser().parse_known_args(words)
        except SystemExit:
            pytest.fail(f"{parser.prog} --help shows {line}, which does not parse")
        assert not unknown, f"{parser.prog} --help shows {line}, and {unknown} are no options"
        assert callable(load_command(options.run)) and (not overrides or options.takes_overrides), (
            line
        )
        named = [word for word in words if word.startswith("configs/") and "--out" not in line]
        assert all((ROOT / word).is_file() for word in named), f"{line}: there is no such file"


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_each_says_what_it_does_and_what_its_options_are(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*parser.prog.split()[1:], "--help"]) == 0
    shown = capsys.readouterr().out
    assert parser.description and " ".join(parser.description.split())[:40] in " ".join(
        shown.split()
    )
    assert max(map(len, shown.splitlines())) <= 120
    silent = [
        action.option_strings[0]
        for action in parser._actions
        if action.option_strings and not action.help and action.metavar != "N"
    ]
    assert not silent, f"{parser.prog}: {silent} have no help"
