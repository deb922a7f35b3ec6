"""Every start of a run, a line each in ``starts.jsonl``: when, where, from which step; and where its ranks stood."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from framework.durable import append_synced, replace_synced
from framework.mesh.grid import Grid
from framework.mesh.view import draw

STARTS, PLACEMENT = "starts.jsonl", "placement.txt"


def note_start(directory: Path, step: int, grid: Grid, nodes: Sequence[str]) -> int:
    """Write down that the run goes on from this step; how often it had been started before. Rank 0 calls it.

    That it cannot be written is no reason not to train.
    """
    place = directory / STARTS
    line = {
        "at": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "step": step,
        "host": socket.gethostname(),
        "layout": f"pp{grid.pp} dp{grid.dp} tp{grid.tp}",
        "nodes": len(set(nodes)),
    }
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        line |= {"slurm_job": job, "slurm_restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}
    before = 0
    with contextlib.suppress(OSError):
        before = place.read_bytes().count(b"\n") if place.exists() else 0
        append_synced(place, (json.dumps(line) + "\n").encode())
        replace_synced(directory / PLACEMENT, (draw(grid, list(nodes)) + "\n").encode())
    return before
