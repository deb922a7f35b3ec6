"""Shared parts of the commands' parsers, and the types of their arguments."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from meshwright.errors import UserError
from meshwright.system.atomic import check_place
from meshwright.system.bounded import abridge_words, shortened
from meshwright.system.numbers import MAX_INT64, MAX_RANKS, whole_number
from meshwright.system.store import Place, parse_place
from meshwright.terminal.output import visible

WIDTH = 100

Command = Callable[[argparse.Namespace, list[str]], int]
"""Function of a command: (options, configuration overrides) -> exit code."""
Added: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Group of subparsers to which a command is added."""
AddCommand: TypeAlias = Callable[[Added], object]
"""Function that adds the parser of a command."""


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors have an error code, as all errors that a user can cause."""

    absent: frozenset[str] = frozenset()
    """Commands whose package is not installed."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and leave with 2."""
        named = re.search(r"invalid choice: '(\w+)'", message)
        if named and named[1] in self.absent:
            message = (
                f"the package of the command {named[1]} is not registered here: install meshwright"
                " with its packages meshwright_plan and meshwright_interop, in a checkout by `pip"
                " install -e .`"
            )
        super().error(visible(str(UserError("MW-LAUNCH-054", abridge_words(message)))))


DEVICES_PER_NODE = 8
DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def command(
    added: Added,
    name: str,
    run: str | None,
    summary: str,
    description: str,
    example: str,
    *,
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        run: Function of the command, as for :func:`load_command`; None for one with subcommands.
        summary: Line of the command in the list of commands.
        takes_overrides: Accept configuration keys, ``--section.key=value``.
    """
    parser = added.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, WIDTH),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_overrides=takes_overrides)
    return parser


class RunsInstead(argparse.Action):
    """Option of a command that runs another function in place of the command's own, with the same
    options.
    """

    def __init__(self, *args: Any, run: str, **kwargs: Any) -> None:
        """Create the option. ``run``: as for :func:`load_command`."""
        super().__init__(*args, **kwargs)
        self._run = run

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value, and the function."""
        setattr(namespace, self.dest, values)
        namespace.run = self._run


def load_command(run: str) -> Command:
    """Import the function ``module:function``, so that a command loads only the modules it needs.

    A module without a dot is one of this package.
    """
    module, _, function = run.partition(":")
    own = module if "." in module else f"meshwright_launch.{module}"
    loaded: Command = getattr(importlib.import_module(own), function)
    return loaded


def config_file(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the configuration file, and accept overrides of its keys."""
    parser.set_defaults(takes_overrides=True)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, such as configs/demo.toml")
    parser.usage = f"{parser.prog} CONFIG [options] [--section.key=value ...]"


def nodes_of_job(parser: argparse.ArgumentParser, *, of_cluster: bool = False) -> None:
    """Add ``--nodes`` and ``--devices-per-node``,
    which default to 8 devices per node and as many nodes as needed.

    ``of_cluster``: the devices default to those of the ``--cluster`` file; without one the option
        is None.
    """
    parser.add_argument(
        "--nodes",
        type=rank_count,
        metavar="N",
        help="number of nodes (default: as the degrees need)",
    )
    default = "as in the --cluster file, or 8" if of_cluster else "8"
    parser.add_argument(
        "--devices-per-node",
        type=rank_count,
        default=None if of_cluster else DEVICES_PER_NODE,
        metavar="M",
        help=f"ranks on each (default: {default})",
    )


def output(
    parser: argparse.ArgumentParser,
    metavar: str,
    text: str,
    example: str,
    *,
    is_folder: bool = False,
    is_required: bool = False,
) -> None:
    """Add ``--out``, whose place is checked before the command begins (see :func:`check_output`).

    ``example``: name of such a file or folder, for the error. ``text``: the help.
    """
    parser.set_defaults(check_output=partial(check_place, folder=is_folder, example=example))
    parser.add_argument("--out", type=Path, required=is_required, metavar=metavar, help=text)


def check_output(options: argparse.Namespace) -> None:
    """Check the place of a command's ``--out``,
    so that no work is lost to one that cannot be written.

    Raises:
        ConfigError: it cannot be written.
    """
    if getattr(options, "out", None) is not None:
        options.check_output(options.out)


def run_or_checkpoint(parser: argparse.ArgumentParser, *, has_step: bool = False) -> None:
    """Add the argument for a run or one of its checkpoints,
    and with ``has_step`` the option ``--step``.
    """
    parser.add_argument(
        "place",
        type=place,
        metavar="RUN",
        help="a run directory or one of its checkpoints/step-*, or either in an object store",
    )
    if has_step:
        parser.add_argument(
            "--step", type=parse_count_from_0, metavar="N", help="the checkpoint of this step"
        )


def place(text: str) -> Place:
    """Return the path of a run or checkpoint, on a file system or in an object store."""
    try:
        return parse_place(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def trust_code(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-code``, for commands that import the builders named by a run,
    a checkpoint or a configuration.
    """
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help=(
            "import any builder that a run or checkpoint names (default: meshwright's own models"
            " only)"
        ),
    )


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number from ``low`` to ``high``.

    NOTE [bounds of options]: every number on the command line has bounds, with the highest value
    that anything can be done with. Options take these types, never ``int`` or ``float``: those
    accept 4,300 digits, NaN and Inf.
    """

    def parse(text: str) -> int:
        number = whole_number(text, low, high)
        if number is None:
            raise argparse.ArgumentTypeError(
                f"{shortened(text, 80)} is not a whole number from {low:,} to {high:,}"
            )
        return number

    return parse


count = whole(1, 10**9)
parse_count_from_0 = whole(0, 10**9)
rank_count = whole(1, MAX_RANKS)
"""Type of a number of ranks, nodes or devices."""
seed = whole(0, MAX_INT64)
MAX_SWEPT = 100
"""Maximum number of values of a sweep, each a search of its own."""


def counts(text: str) -> list[int]:
    """Parse whole numbers from 1 up, separated by commas; return them sorted, each once."""
    words = text.split(",")
    if len(words) > MAX_SWEPT:
        raise argparse.ArgumentTypeError(
            f"{len(words):,} numbers, and at most {MAX_SWEPT} are swept"
        )
    return sorted({count(word.strip()) for word in words})


def price(text: str) -> float:
    """Parse a finite number above 0."""
    return _number(text, lambda number: 0.0 < number < float("inf"), "a number above 0")


def load(text: str) -> float:
    """Parse a finite number of at least 1."""
    return _number(text, lambda number: 1.0 <= number < float("inf"), "a number of at least 1")


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    return _number(text, lambda number: 0.0 < number <= 1.0, "above 0 and at most 1")


def part(text: str) -> float:
    """Parse a number from 0 up and below 1."""
    return _number(text, lambda number: 0.0 <= number < 1.0, "a share from 0 up and below 1")


def text(word: str) -> str:
    """Return the word as text in UTF-8, whatever the locale.
    For text that is tokenized or written to a file.
    """
    try:
        return os.fsencode(word).decode("utf-8")  # in the C locale Python has not decoded its bytes
    except UnicodeEncodeError:
        return word  # of a program that calls this one: no word of a command line
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{os.fsencode(word)!r} is not UTF-8") from None


def temperature(text: str) -> float:
    """Parse a finite number from 0 up."""
    return _number(text, lambda number: 0.0 <= number < float("inf"), "a number from 0 up")


def _number(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    number = float(text) if DECIMAL.fullmatch(text) else math.nan
    if not fits(number):
        raise argparse.ArgumentTypeError(f"{shortened(text, 80)} is not {wanted}")
    return number


def size(text: str) -> int:
    """Parse a number of bytes, such as 500MB, 5GB or 2GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    num_bytes = 0
    if match and len(match[1]) < 20:
        base = 1024 if match[3] else 1000
        num_bytes = int(float(match[1]) * base ** " kmgt".index(match[2] or " "))
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(
            f"{shortened(text, 80)!r} is not a size, such as 500MB, 5GB or 2GiB"
        )
    return num_bytes
