"""Unfinished collectives of a rank, from torch's flight recorder: the host has left them behind,
the device has not.

Torch records the collectives and messages of each process group in a ring buffer
(``TORCH_FR_BUFFER_SIZE``, 2,000 by default): {"entries": [{"process_group": ["1", "dp"],
"collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "state": "scheduled" | "started" |
"completed", "retired": bool, "input_sizes": [[4, 3]], ...}]}, oldest first.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

PRIVATE_TORCH = {
    "torch._C._distributed_c10d._dump_nccl_trace_json": "2.11-2.15",
    "torch._C._distributed_c10d._dump_fr_trace_json": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of ``torch._C._distributed_c10d``: the recorder of NCCL, in CUDA builds,
and that of other backends.
"""


class _Entry(BaseModel):
    """One collective or message of the recorder; fields that are not needed here are ignored."""

    process_group: tuple[str, str]
    profiling_name: str
    state: str
    retired: bool = False
    is_p2p: bool = False
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


def unfinished() -> list[str]:
    """Return a line for the first unfinished collective of each group of this process;
    empty without a recorder.

    On CUDA it queries events. It may block if the driver does.
    """
    try:
        import torch._C._distributed_c10d as library  # a torch built without distributed has none

        dumps = [getattr(library, name)() for name in DUMPS if hasattr(library, name)]
    except (ImportError, RuntimeError, TypeError):
        # private functions: a report without them beats none
        return []
    return [line for dump in dumps for line in first_unfinished(dump)]


def first_unfinished(dump: bytes | str) -> list[str]:
    """Parse a dump of the recorder; return a line for each group's first entry that is not done,
    oldest first.
    """
    try:
        tree: Any = json.loads(dump or "{}")
        entries = [_Entry.model_validate(entry) for entry in tree.get("entries", ())]
    except (ValueError, AttributeError, TypeError, ValidationError):  # another version's format
        return []
    first: dict[tuple[str, str], _Entry] = {}
    for entry in entries:
        if entry.state != "completed" and not entry.retired:
            first.setdefault(entry.process_group, entry)
    return [_describe(entry) for entry in first.values()]


def _describe(entry: _Entry) -> str:
    number, kind = (
        (entry.p2p_seq_id, "message") if entry.is_p2p else (entry.collective_seq_id, "collective")
    )
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry.input_sizes)
    dtypes = ", ".join(dict.fromkeys(entry.input_dtypes))
    name, group = entry.profiling_name, " ".join(filter(None, entry.process_group))
    return (
        f"{name}, {kind} {number} of group {group} ({sizes} {dtypes}): {entry.state}, not completed"
    )
