"""Former name of ``meshwright_launch``, as job scripts hold it that were written before:
``-m meshwright.launch``.

A job that was submitted before an upgrade then goes on after it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run_present(module: str, former: str) -> None:
    """Run a module of the launcher as ``python -m`` does, after a note on rank 0."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"meshwright: {former} is {module} now; write the job script again", file=sys.stderr)
    if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
        # -m puts the working directory first: a folder there must not hide the launcher
        sys.path.pop(0)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
