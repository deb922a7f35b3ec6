"""Commands for the checkpoints of a run."""

from __future__ import annotations

from meshwright_launch.arguments.common import Added, command, run_or_checkpoint


def checkpoint(added: Added) -> None:
    of_checkpoints = command(
        added,
        "checkpoint",
        None,
        "list, verify, show and export the checkpoints of a run",
        "Reads checkpoints of any layout without ranks, and changes none.",
        "meshwright checkpoint verify runs/demo",
    )
    commands_of = of_checkpoints.add_subparsers(
        title="commands", dest="what", metavar="WHAT", required=True
    )
    listed = command(
        commands_of,
        "list",
        "checkpoints:list_checkpoints",
        "list the checkpoints of a run",
        "Prints step, samples seen, layout, tensors, files and bytes of each. Names missing and"
        " truncated files; `verify` reads every byte.",
        "meshwright checkpoint list runs/demo",
    )
    verified = command(
        commands_of,
        "verify",
        "checkpoints:verify",
        "check every byte against its hash",
        "Checks all checkpoints of a run, or one. Exit code 1 when a file differs.",
        "meshwright checkpoint verify runs/demo --step 120",
    )
    shown = command(
        commands_of,
        "show",
        "checkpoints:show",
        "print the contents of a checkpoint",
        "Prints the metadata and the tensors of the newest checkpoint of a run, or of the one of"
        " --step.",
        "meshwright checkpoint show runs/demo --tensor embedding.tokens.weight",
    )
    shown.add_argument(
        "--tensor", metavar="NAME", help="only this parameter, with its pieces and their files"
    )
    for parser in (listed, verified, shown):
        run_or_checkpoint(parser, has_step=parser is not listed)
