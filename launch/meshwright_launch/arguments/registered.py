"""Commands that other packages add to ``meshwright``, and options that they add to its commands, by
entry points of the groups ``meshwright.commands`` and ``meshwright.options``.

    [project.entry-points."meshwright.commands"]
    fly = "my_package.parsers:fly"              a command; "config.fly" is one below the command config
    [project.entry-points."meshwright.options"]
    "eval.high" = "my_package.parsers:high"     options of the command eval, by any second name

The value is a function that takes a group of subparsers and adds a parser of the entry's name to
it, by :func:`meshwright_launch.arguments.common.command`, whose ``run`` is ``module:function`` in
full. The value of options is a function that takes the command's parser; one of its options may
name another ``run`` (:class:`meshwright_launch.arguments.common.RunsInstead`).

The packages of tools/ are added so. One that cannot be loaded is left out with a line on
stderr: a broken package stops no other command.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from importlib.metadata import EntryPoint

from meshwright.errors import reason_of
from meshwright.system.packages import is_own_package
from meshwright.terminal.output import tell
from meshwright_launch.arguments.common import Added

GROUP = "meshwright.commands"
OPTIONS = "meshwright.options"


def add_registered(added: Added, entry: EntryPoint, taken: Collection[str]) -> None:
    """Add the parser of an entry point.

    ``taken``: names of commands of the launcher itself, which no other package replaces.
    """
    command, _, subcommand = entry.name.partition(".")
    try:
        if entry.name in taken:
            raise ValueError(f"{entry.name} is a command of meshwright itself")
        add = entry.load()
        group = subcommands_of(added, command) if subcommand else added
        before = set(group.choices)
        add(group)
        if set(group.choices) - before != {subcommand or command}:
            raise ValueError(f"it adds no parser of the name {subcommand or command}")
    except ModuleNotFoundError as error:
        # the trainer may be installed alone, without the packages of its other commands
        is_absent = is_own_package(entry.value) and is_own_package(error.name or "")
        if not is_absent:
            _report(entry, error)
    except (Exception, SystemExit) as error:
        _report(entry, error)


def add_registered_options(added: Added, entry: EntryPoint) -> None:
    """Add the options of an entry point to the command that its name begins with."""
    command = entry.name.partition(".")[0]
    try:
        if command not in added.choices:
            raise ValueError(f"there is no command {command}")
        entry.load()(added.choices[command])
    except ModuleNotFoundError as error:
        if not (is_own_package(entry.value) and is_own_package(error.name or "")):
            _report(entry, error, "the options of")
    except (Exception, SystemExit) as error:
        _report(entry, error, "the options of")


def subcommands_of(added: Added, command: str) -> Added:
    """Return the group of subparsers of a command that has some, such as ``config``."""
    actions = added.choices[command]._actions if command in added.choices else []
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    raise ValueError(f"{command} is no command with subcommands")


def _report(entry: EntryPoint, error: BaseException, what: str = "the command") -> None:
    package = entry.dist.name if entry.dist is not None else entry.value
    tell(
        f"meshwright: {what} {entry.name} of the package {package}"
        f" {'are' if what.endswith('of') else 'is'} left out: {reason_of(error)}. Upgrade or"
        f" uninstall {package}"
    )
