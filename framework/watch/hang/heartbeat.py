"""Heartbeats that each rank sends every few seconds, and ``status.json``, where rank 0 stores them. Pure: no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from meshwright.errors import DataError
from meshwright.mesh.grid import Grid
from meshwright.system.bounded import read_bytes

MISSED = 3
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


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Waited(_File):
    """Operation that a rank waits for, as in ``meshwright.mesh.activity.Waits``."""

    how: Literal["receive", "send", "collective"]
    ranks: tuple[NonNegativeInt, ...]
    operation: str
    group: str = ""
    key: str = ""
    number: NonNegativeInt = 0


class Heartbeat(_File):
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


class Ended(_File):
    """End of a run."""

    how: Literal["finished", "stopped", "failed"]
    message: str = ""


class RankStatus(_File):
    """Entry of one rank in the status file."""

    silent_s: NonNegativeFloat
    beat: Heartbeat


class Status(_File):
    """Contents of ``status.json``. ``at_s``: seconds since 1970."""

    format: Literal["meshwright status 1"] = "meshwright status 1"
    run: str
    at_s: NonNegativeFloat
    tick_s: PositiveFloat
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Degrees (pp, dp, tp)."""
    step: NonNegativeInt
    steps: PositiveInt
    phase: str
    pid: PositiveInt
    host: str
    """Host of rank 0, which writes the file."""
    ranks: tuple[RankStatus, ...]
    ended: Ended | None = None


def place(grid: Grid, rank: int) -> str:
    """Format the mesh coordinates of a rank: ``pp1 dp0 tp1``."""
    return " ".join(f"{axis[:2]}{index}" for axis, index in grid.coordinates(rank)._asdict().items())


def in_words(what: str) -> str:
    """Describe an action: ``1RECV_F3`` -> ``receiving F of micro-batch 3``.

    Actions posted together become ``posting ...``. Other text is returned unchanged.
    """
    found = _ACTION.fullmatch(what)
    if found is None:
        return f"posting {what}" if all(_ACTION.fullmatch(word) for word in what.split("+")) else what
    stage, kind, microbatch = found.groups()
    if kind == "STEP":
        return "taking the optimizer's step"
    if kind == "REDUCE":
        return f"reducing the gradients of stage {stage}"
    return f"{_VERBS[kind]} micro-batch {microbatch}"


def does(beat: Heartbeat) -> str:
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


def read_status(path: Path) -> Status:
    """Read the ``status.json`` of a run.

    Raises:
        DataError: there is no such file, or it is not a status.
    """
    try:
        return Status.model_validate_json(read_bytes(path))
    except OSError as error:
        run = path.parent
        if not run.is_dir():
            raise DataError("MW-WATCH-002", f"{run} is no directory: give that of a run, such as runs/demo") from None
        what = f"has a {path.name} that cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            what = f"has no {path.name}: it has not begun to train"
        raise DataError("MW-WATCH-003", f"{run} {what}, or is no directory of a run, such as runs/demo") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            "MW-WATCH-004", f"{path} is no status of a run: {where}: {first['msg']}. It is written anew as a run trains"
        ) from None
