"""Heartbeats that each rank sends every few seconds, and their text forms. Pure: no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from meshwright.mesh import Grid

MAX_RANKS = 1 << 20
"""Most ranks of a run; docs/security.md has the bounds of a configuration."""
MAX_NUMBER = 2**63 - 1
MAX_S = 1e11
"""Largest time in seconds: 3,000 years."""

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


Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, Field(ge=0, le=MAX_S)]
RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
ProcessId = Annotated[int, Field(gt=0, lt=2**31)]
_Bound = Annotated[int, Field(gt=0, le=MAX_RANKS)]
Ranks = tuple[RankNumber, _Bound, _Bound]
"""Equally spaced ranks: start, stop and step of their range."""


class StatusModel(BaseModel):
    """Base of models that are read from a file or received from another rank: exact types,
    no unknown fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PendingWait(StatusModel):
    """Operation that a rank waits for, as in ``meshwright.mesh.activity.Waits``."""

    how: Literal["receive", "send", "collective"]
    ranks: Annotated[tuple[RankNumber, ...], Field(max_length=MAX_RANKS)] = ()
    """The peers of a message. Files of older versions list the other ranks of a collective here."""
    operation: str
    group: str = ""
    key: str = ""
    number: Count = 0
    ranges: tuple[Ranks, ...] = ()
    """Other ranks of a collective's group. As ranges:
    a list in each heartbeat would be ranks x ranks numbers.
    """

    @classmethod
    def pack(cls, waits: Mapping[str, Any]) -> Self:
        """Return the operation with the fields of a ``Waits``,
        and the ranks of a collective as ranges.
        """
        if waits["how"] != "collective":
            return cls(**waits)
        return cls(**{**waits, "ranks": (), "ranges": _ranges(waits["ranks"])})

    def others(self) -> set[int]:
        """Return the ranks that must act too; for a collective, all other ranks of its group."""
        return {*self.ranks, *(rank for each in self.ranges for rank in range(*each))}

    def signature(self) -> str:
        """Return the operation as all ranks of a collective have it:
        an all-to-all has other sizes on each rank.
        """
        kind, _, _ = self.operation.partition(" of ")
        return kind if kind == "all-to-all" else self.operation


class Heartbeat(StatusModel):
    """Activity of one rank at one moment."""

    rank: RankNumber
    beat: Count
    """Counter of this rank's heartbeats; a repeated value marks an old one."""
    step: Count
    """Optimizer steps taken."""
    phase: str
    what: str
    """Action of the schedule, such as ``1RECV_F3``, or a description."""
    for_s: Seconds
    waits: PendingWait | None = None
    posted: dict[str, Count] = {}
    """Number of collectives that the rank has entered, by group."""
    pid: ProcessId
    host: str
    at_s: Seconds
    """Seconds since 1970, on the clock of its host."""


class ReceivedHeartbeat(NamedTuple):
    """Last heartbeat of a rank (None if none ever arrived),
    and the seconds since the last new one.
    """

    beat: Heartbeat | None
    silent_s: float


def one_line(text: str) -> str:
    """Return text without line breaks: a row of a table stays one row,
    whatever a file or another rank has sent.
    """
    return " ".join(text.splitlines())


def place(grid: Grid, rank: int) -> str:
    """Format the mesh coordinates of a rank: ``pp1 dp0 tp1``."""
    return " ".join(
        f"{axis}{getattr(grid.coordinates(rank), f'{axis}_rank')}" for axis in grid.axes
    )


def in_words(what: str) -> str:
    """Describe an action: ``1RECV_F3`` -> ``receiving F of micro-batch 3``.

    Actions posted together become ``posting ...``. Other text is returned unchanged.
    """
    match = _ACTION.fullmatch(what)
    if match is None:
        if all(_ACTION.fullmatch(word) for word in what.split("+")):
            return f"posting {what}"
        return what
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


def collective(waits: PendingWait) -> str:
    """Describe a collective: ``the all-reduce of (3,) of the dp ranks (number 12)``."""
    return f"the {waits.operation} of the {waits.group} ranks (number {waits.number})"


def exchange(waits: PendingWait) -> str:
    """Describe a point-to-point wait: ``to receive F of micro-batch 3 from``; the rank follows."""
    words = [
        word for word in waits.operation.split("+") if ("SEND" in word) == (waits.how == "send")
    ]
    if waits.how == "send":
        return f"to send {_things(words)} to"
    return f"to receive {_things(words)} from"


def _things(actions: list[str]) -> str:
    found = [_ACTION.fullmatch(action) for action in actions]
    return " and ".join(
        f"{each[2][-1]} of micro-batch {each[3]}" if each else action
        for each, action in zip(found, actions, strict=True)
    )


def _ranges(ranks: Iterable[int]) -> tuple[Ranks, ...]:
    """Return ranks as ranges: those of an axis of the mesh are equally spaced."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == found[-1][0] + 1:  # of one rank: this one is the second
            found[-1][1:] = rank + 1, rank - found[-1][0]
        elif found and rank == found[-1][1] - 1 + found[-1][2]:
            found[-1][1] = rank + 1
        else:
            found.append([rank, rank + 1, 1])
    return tuple((start, stop, step) for start, stop, step in found)
