"""Parser of the command line: every command with its options, its help and an example."""

from __future__ import annotations

import argparse

from meshwright.system.packages import entries_of
from meshwright.system.process import own_version
from meshwright_launch.arguments import checkpoints, files, inspection, planning, training
from meshwright_launch.arguments.common import AddCommand, CommandParser
from meshwright_launch.arguments.registered import (
    GROUP,
    OPTIONS,
    add_registered,
    add_registered_options,
)

OWN: dict[str, AddCommand] = {
    "init": planning.init,
    "train": training.train,
    "mesh": planning.mesh,
    "layouts": planning.layouts,
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
    *(
        "init",
        "train",
        "layouts",
        "mesh",
        "doctor",
        "slurm",
        "kubernetes",
        "draw",
        "stages",
        "plan",
        "calibrate",
        "dryrun",
    ),
    *(
        "verify",
        "data",
        "config",
        "checkpoint",
        "convert",
        "status",
        "eval",
        "sample",
        "report",
        "plot",
        "errors",
    ),
    "completion",
)
"""Order in which help lists commands; those of other packages come last."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all commands, each with an example."""
    parser = CommandParser(
        prog="meshwright",
        description=(
            "3D-parallel training of transformers: one model, any layout, the same numbers."
        ),
        epilog=(
            "`meshwright COMMAND --help` describes a command, with an example; docs/tasks has a"
            " page for each task."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {own_version()}")
    plain: argparse.ArgumentParser = parser
    added = plain.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    others = entries_of(GROUP)
    position = {name: at for at, name in enumerate(ORDER)}
    for name in sorted({*OWN, *others}, key=lambda name: position.get(name, len(ORDER))):
        if name in OWN:
            OWN[name](added)
        if name in others:
            add_registered(added, others[name], OWN)
    for entry in entries_of(OPTIONS).values():
        add_registered_options(added, entry)
    parser.absent = frozenset(ORDER) - set(added.choices)
    return parser
