"""Former name of ``meshwright_launch``: ``python -m meshwright.launch`` in a job script that was written with it.

A job that was submitted before an upgrade then goes on after it.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    print(
        "meshwright: `python -m meshwright.launch` is `python -m meshwright_launch` now; write the job script again",
        file=sys.stderr,
    )
    runpy.run_module("meshwright_launch", run_name="__main__", alter_sys=True)
