"""Commands that other packages add to ``meshwright`` by entry points
of the group ``meshwright.commands``.

    [project.entry-points."meshwright.commands"]
    fly = "my_package.parsers:fly"              a command; "config.fly" is one below the command config

The value is a function that takes a group of subparsers and adds a parser of the entry's name to
it, by :func:`meshwright_launch.arguments.common.command`, whose ``run`` is ``module:function`` in
full. The packages of tools/ are added so. One that cannot be loaded is left out with a line on
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


def subcommands_of(added: Added, command: str) -> Added:
    """Return the group of subparsers of a command that has some, such as ``config``."""
    actions = added.choices[command]._actions if command in added.choices else []
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    raise ValueError(f"{command} is no command with subcommands")


def _report(entry: EntryPoint, error: BaseException) -> None:
    package = entry.dist.name if entry.dist is not None else entry.value
    tell(
        f"meshwright: the command {entry.name} of the package {package} is left out:"
        f" {reason_of(error)}. Upgrade or uninstall {package}"
    )
