"""Command ``meshwright checkpoint export``:
a checkpoint in the format of torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse

from meshwright.terminal.output import put
from meshwright_interop.commands.files import table_of_files
from meshwright_interop.dcp import export_dcp
from meshwright_launch.checkpoints import find_checkpoint


def export(options: argparse.Namespace, _: list[str]) -> int:
    """Write a checkpoint in PyTorch's distributed checkpoint format;
    print a summary and the code that loads it.
    """
    chosen = find_checkpoint(options.place, options.step)
    done = export_dcp(chosen.path, options.out, kind=options.weights)
    lines = [
        f"{chosen.path}: step {chosen.step}",
        f"{done.path}: {done.num_tensors:,} tensors of {done.kind}, in DCP format",
        *table_of_files(done.files),
        (
            "load it with: torch.distributed.checkpoint.load(model.state_dict(),"
            f" checkpoint_id={str(done.path)!r})"
        ),
    ]
    put("\n".join(lines))
    return 0
