"""Log of a run's starts: ``starts.jsonl`` with time, host and step of each,
and the placement of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.mesh import Grid, draw_placement
from meshwright.run.directory import PLACEMENT, STARTS
from meshwright.system.atomic import append_synced, write_atomic
from meshwright.system.bounded import parse_json, read_bytes
from meshwright.system.numbers import job_restarts
from meshwright.terminal.output import tell


def _changed_since(directory: Path, corpus: Mapping[str, int]) -> list[str]:
    """Return the files of a corpus whose modification time differs from that
    at the last start of the run.

    ``corpus``: path -> current modification time in ns. Files that the last start does not list are
        left out.
    """
    try:
        before = parse_json(read_bytes(directory / STARTS).splitlines()[-1]).get("corpus")
    except (OSError, ValueError, AttributeError, IndexError):
        return []
    if not isinstance(before, dict):
        return []
    return [path for path, time_ns in corpus.items() if before.get(path, time_ns) != time_ns]


def record_start(
    directory: Path,
    step: int,
    grid: Grid,
    nodes: Sequence[str],
    corpus: Mapping[str, int] | None = None,
    report: Callable[[str], None] = tell,
) -> int:
    """Record a start of the run at this step; return the number of earlier starts.
    Called by rank 0.

    Its ``ranks_on`` has the number of ranks on each node, in the order of the ranks.

    A record that cannot be written does not stop the run.

    Args:
        corpus: Path -> modification time in ns; files that differ from the last start are named in
            a message.
        report: Receives that message.
    """
    if changed := _changed_since(directory, corpus or {}):
        report(
            f"{', '.join(changed)}: written since the last start of this run, with unchanged size"
            " and sampled hash (`meshwright data verify DIR` reads every byte)"
        )
    place = directory / STARTS
    line: dict[str, Any] = {
        "at": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "step": step,
        "host": socket.gethostname(),
        "layout": grid.layout,
        "nodes": len(set(nodes)),
        "ranks_on": [[node, len(list(ranks))] for node, ranks in groupby(nodes)],
    }
    if corpus:
        line["corpus"] = dict(corpus)
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        line |= {"slurm_job": job, "slurm_restart": job_restarts()}
    before = 0
    with contextlib.suppress(OSError):
        before = read_bytes(place).count(b"\n") if place.exists() else 0
        append_synced(place, (json.dumps(line) + "\n").encode())
        write_atomic(directory / PLACEMENT, draw_placement(grid, nodes) + "\n")
    return before
