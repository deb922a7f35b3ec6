"""Heartbeats that each rank sends every few seconds, and their text forms. Pure: no torch."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.mesh import Grid

MISSED_TICKS = 3
"""Ticks without a new heartbeat after which a rank counts as silent."""

_ACTION = re.compile(r"(\d+)?(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B|REDUCE|STEP)(\d+)?")
_VERBS = {
    "F": "computing F of",
    "B": "computing B of",
    "I": "computing I of",
    "W": "computing W of",
    "SEND_F": "sending F of",
    "SEND_B": "sending B of",
    "RECV_F": "receiving F of",
    "RECV_B": "receiving B of",
}


class StatusModel(BaseModel):
    """Base of models that are read from a file or received from another rank: exact types, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Waited(StatusModel):
    """Operation that a rank waits for, as in ``meshwright.mesh.activity.Waits``."""

    how: Literal["receive", "send", "collective"]
    ranks: tuple[NonNegativeInt, ...]
    operation: str
    group: str = ""
    key: str = ""
    number: NonNegativeInt = 0


class Heartbeat(StatusModel):
    """Activity of one rank at one moment."""

    rank: NonNegativeInt
    beat: NonNegativeInt
    """Counter of this rank's heartbeats; a repeated value marks an old one."""
    step: NonNegativeInt
    """Optimizer steps taken."""
    phase: str
    what: str
    """Action of the schedule, such as ``1RECV_F3``, or a description."""
    for_s: NonNegativeFloat
    waits: Waited | None = None
    posted: dict[str, NonNegativeInt] = {}
    """Number of collectives that the rank has entered, by group."""
    pid: PositiveInt
    host: str
    at_s: NonNegativeFloat
    """Seconds since 1970, on the clock of its host."""


class ReceivedHeartbeat(NamedTuple):
    """Last heartbeat of a rank (None if none ever arrived), and the seconds since the last new one."""

    beat: Heartbeat | None
    silent_s: float


def place(grid: Grid, rank: int) -> str:
    """Format the mesh coordinates of a rank: ``pp1 dp0 tp1``."""
    return " ".join(f"{axis}{getattr(grid.coordinates(rank), f'{axis}_rank')}" for axis in grid.axes)


def in_words(what: str) -> str:
    """Describe an action: ``1RECV_F3`` -> ``receiving F of micro-batch 3``.

    Actions posted together become ``posting ...``. Other text is returned unchanged.
    """
    match = _ACTION.fullmatch(what)
    if match is None:
        return f"posting {what}" if all(_ACTION.fullmatch(word) for word in what.split("+")) else what
    stage, kind, microbatch = match.groups()
    if kind == "STEP":
        return "taking the optimizer's step"
    if kind == "REDUCE":
        return f"reducing the gradients of stage {stage}"
    return f"{_VERBS[kind]} micro-batch {microbatch}"


def describe_activity(beat: Heartbeat) -> str:
    """Describe the activity of a rank for a line of a table."""
    waits = beat.waits
    if waits is None:
        return in_words(beat.what)
    if waits.how == "collective":
        return f"in {collective(waits)}, {in_words(beat.what)}"
    return f"waits {exchange(waits)} rank {', '.join(map(str, waits.ranks))}"


def collective(waits: Waited) -> str:
    """Describe a collective: ``the all-reduce of (3,) of the dp ranks (number 12)``."""
    return f"the {waits.operation} of the {waits.group} ranks (number {waits.number})"


def exchange(waits: Waited) -> str:
    """Describe a point-to-point wait: ``to receive F of micro-batch 3 from``; the rank follows."""
    words = [word for word in waits.operation.split("+") if ("SEND" in word) == (waits.how == "send")]
    if waits.how == "send":
        return f"until {_things(words)} is taken by"
    return f"to receive {_things(words)} from"


def _things(actions: list[str]) -> str:
    found = [_ACTION.fullmatch(action) for action in actions]
    return " and ".join(
        f"{each[2][-1]} of micro-batch {each[3]}" if each else action
        for each, action in zip(found, actions, strict=True)
    )
