"""Parser of the command line: every command with its options, its help and an example."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points

from meshwright.system.process import own_version
from meshwright_launch.arguments import checkpoints, files, inspection, planning, training
from meshwright_launch.arguments.common import AddCommand, Added, CommandParser

OWN: dict[str, AddCommand] = {
    "init": planning.init,
    "train": training.train,
    "mesh": planning.mesh,
    "doctor": training.doctor,
    "slurm": training.slurm,
    "kubernetes": training.kubernetes,
    "verify": training.verify,
    "data": files.data,
    "config": files.config,
    "checkpoint": checkpoints.checkpoint,
    "status": inspection.status,
    "eval": training.evaluate,
    "sample": training.sample,
    "errors": inspection.errors,
    "completion": inspection.completion,
}
"""Commands of the trainer and its launcher."""
ORDER = (
    *("init", "train", "mesh", "doctor", "slurm", "kubernetes", "draw", "stages", "plan", "calibrate", "dryrun"),
    *("verify", "data", "config", "checkpoint", "convert", "status", "eval", "sample", "report", "plot", "errors"),
    "completion",
)
"""Order in which help lists commands; those of other packages come last."""
GROUP = "meshwright.commands"
"""Entry points of further commands: name, or ``command.subcommand``, and a function that adds its parser."""


def registered() -> dict[str, AddCommand]:
    """Return the commands of other packages. One whose package is not there is left out."""
    found: dict[str, AddCommand] = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()
        except ModuleNotFoundError as error:
            if error.name != entry.module.partition(".")[0]:
                raise
    return found


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all commands, each with an example."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="meshwright",
        description="3D-parallel training of transformers: one model, any layout, the same numbers.",
        epilog="`meshwright COMMAND --help` describes a command, with an example; docs/tasks has a page for each task.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {own_version()}")
    added = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    commands = OWN | registered()
    position = {name: at for at, name in enumerate(ORDER)}
    for name in sorted(commands, key=lambda name: position.get(name, len(ORDER))):
        command, _, subcommand = name.partition(".")
        commands[name](subcommands_of(added, command) if subcommand else added)
    return parser


def subcommands_of(added: Added, command: str) -> Added:
    """Return the group of subparsers of a command that has some, such as ``config``."""
    groups = [each for each in added.choices[command]._actions if isinstance(each, argparse._SubParsersAction)]
    return groups[0]
