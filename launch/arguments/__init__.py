"""Parser of the command line: every command with its options, its help and an example."""

from __future__ import annotations

import argparse

from meshwright.launch.arguments import checkpoints, files, inspection, planning, training
from meshwright.launch.arguments.common import CommandParser
from meshwright.system.process import own_version

COMMANDS = (
    planning.init,
    training.train,
    planning.mesh,
    training.doctor,
    training.slurm,
    training.kubernetes,
    planning.draw,
    planning.stages,
    planning.plan,
    planning.calibrate,
    planning.dryrun,
    training.verify,
    files.data,
    files.config,
    checkpoints.checkpoint,
    files.convert,
    inspection.status,
    training.evaluate,
    training.sample,
    inspection.report,
    inspection.plot,
    inspection.completion,
)
"""Commands, in the order in which help lists them."""


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
    for add in COMMANDS:
        add(added)
    return parser
