"""Command ``meshwright completion``: scripts for bash, zsh and fish,
from the parser and the configuration's schema.

The scripts (``templates/completion.*.j2``) contain all words, so ``meshwright`` is not run while
the user types. They are generated at each start of a shell (``eval "$(meshwright completion
bash)"``), so they are never out of date.

    before the cursor                          completions
    some commands (a position)                 subcommands, or files, folders or choices for the argument
    --                                         the options of the position; with configuration keys, --section.
    --section.                                 --section.key=
    --section.key= , or an option              the allowed words, or files
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from meshwright.config.keys import KEYS, SECTIONS, choices, describe_allowed
from meshwright.terminal.output import put
from meshwright_launch.arguments import build_parser
from meshwright_launch.rendering import render_template

FILES, FOLDERS = "<files>", "<folders>"
"""Values that the shell itself can complete."""


def completion(options: argparse.Namespace, _: list[str]) -> int:
    """Print the completion script of a shell."""
    put(script(build_parser(), options.shell), end="")
    return 0


class Option(NamedTuple):
    """Option ``--name``, and its values."""

    name: str
    help: str
    values: str | None
    """Words separated by spaces, :data:`FILES`, :data:`FOLDERS`, "" for unknown values,
    or None for no value.
    """


class CommandPosition(NamedTuple):
    """Position in a command line after some (sub)commands, and its possible continuations."""

    words: str
    """Commands so far, such as ``checkpoint list``."""
    children: dict[str, str]
    """Subcommand -> its summary."""
    options: list[Option]
    argument: str
    """Values of the positional argument, as in :class:`Option`."""
    takes_keys: bool


def walk_positions(parser: argparse.ArgumentParser, words: str = "") -> Iterator[CommandPosition]:
    """Yield all positions of the command line, depth first."""
    children: dict[str, str] = {}
    options: list[Option] = []
    argument = ""
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = {each.dest: _plain(each.help) for each in action._choices_actions}
            below = dict(action.choices)
        elif action.option_strings:
            values = None if action.nargs == 0 else _values(action)
            options += [
                Option(name, _plain(action.help), values)
                for name in action.option_strings
                if name[:2] == "--"
            ]
        else:
            argument = argument or _values(action)
    yield CommandPosition(
        words, children, options, argument, bool(parser.get_default("takes_overrides"))
    )
    for name, inner in below.items():
        yield from walk_positions(inner, f"{words} {name}".strip())


def _values(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in ("RUN", "DIR"):
        return FOLDERS
    return FILES if action.type is Path or re.search(r"FILE|CONFIG|PATH", metavar) else ""


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split())


def keys() -> list[Option]:
    """Return ``--section.key`` for each key of the configuration."""
    options = []
    for key, field in KEYS.items():
        numbers = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        allowed = describe_allowed(key)
        is_path = (
            key == ("run", "directory")
            or re.search(r"path|folder|file", allowed + key[1]) is not None
        )
        words = " ".join(choices(key) or map(str, numbers)) or (FILES if is_path else "")
        options.append(Option(f"--{'.'.join(key)}", _plain(allowed), words))
    return options


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of ``bash``, ``zsh`` and ``fish``."""
    positions = list(walk_positions(parser))
    values = {
        "FILES": FILES,
        "FOLDERS": FOLDERS,
        "prog": parser.prog,
        "positions": positions,
        "commands": [position.words for position in positions if position.words],
        "with_keys": [position.words for position in positions if position.takes_keys],
        "keys": keys(),
        "sections": [f"--{name}." for name in SECTIONS],
    }
    return render_template(f"completion.{shell}.j2", values)
