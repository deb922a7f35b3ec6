"""``status.json``: written by rank 0 every few seconds, read by `meshwright status` and reports.
No torch.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from meshwright.errors import DataError
from meshwright.mesh import Grid
from meshwright.system.bounded import MIB, read_bytes
from meshwright.system.process import is_alive
from meshwright.watch.hang.diagnosis import lines, seconds
from meshwright.watch.hang.heartbeat import (
    MAX_NUMBER,
    MAX_RANKS,
    MAX_S,
    MISSED_TICKS,
    Count,
    Heartbeat,
    ProcessId,
    ReceivedHeartbeat,
    Seconds,
    StatusModel,
    in_words,
    one_line,
)
from meshwright.watch.ranks import numbers

MAX_STATUS_BYTES = 32 * MIB
"""Largest status file: a rank takes up to 1 KiB of it, and 16,384 ranks are half of this."""
MAX_LISTED = 16
"""Ranks up to which each has its own line; more are grouped by activity."""


class RunEnd(StatusModel):
    """End of a run."""

    how: Literal["finished", "stopped", "failed"]
    message: str = ""


class RankStatus(StatusModel):
    """Entry of one rank in the status file."""

    silent_s: Seconds
    beat: Heartbeat


class Status(StatusModel):
    """Contents of ``status.json``. ``at_s``: seconds since 1970."""

    format: Literal["meshwright status 1"] = "meshwright status 1"
    run: str
    at_s: Seconds
    tick_s: Annotated[PositiveFloat, Field(le=MAX_S)]
    grid: Annotated[
        tuple[Annotated[PositiveInt, Field(le=MAX_RANKS)], ...], Field(min_length=3, max_length=5)
    ]
    """Degrees (pp, dp, tp, cp, ep); older files may lack the last ones."""
    step: Count
    steps: Annotated[PositiveInt, Field(le=MAX_NUMBER)]
    phase: str
    pid: ProcessId
    host: str
    """Host of rank 0, which writes the file."""
    ranks: Annotated[tuple[RankStatus, ...], Field(max_length=MAX_RANKS)]
    ended: RunEnd | None = None

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        """Check that the ranks are those of the grid, each once."""
        size = Grid.of(self.grid).size
        if size > MAX_RANKS:
            raise ValueError(f"grid has {size:,} ranks, at most {MAX_RANKS:,} are possible")
        ranks = [each.beat.rank for each in self.ranks]
        if ranks and max(ranks) >= size:
            raise ValueError(f"ranks has rank {max(ranks)}, and grid has {size} ranks")
        if len({*ranks}) < len(ranks):
            raise ValueError("ranks has a rank twice")
        return self


class CurrentState(NamedTuple):
    """State of a run at one moment."""

    is_live: bool
    """True while the run trains: its status file is not older than ``MISSED_TICKS`` ticks."""
    silent_s: float
    """Seconds since the last update of the status file."""
    text: str
    """The current phase, the end of the run, or the time without an update."""


def read_status(path: Path) -> Status:
    """Read the ``status.json`` of a run.

    Raises:
        DataError: there is no such file, or it is not a status.
    """
    try:
        return Status.model_validate_json(read_bytes(path, MAX_STATUS_BYTES))
    except OSError as error:
        run = path.parent
        if not run.is_dir():
            raise DataError(
                "MW-WATCH-002", f"{run} is no directory: give that of a run, such as runs/demo"
            ) from None
        what = f"has a {path.name} that cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            what = f"has no {path.name}: it has not begun to train"
        raise DataError(
            "MW-WATCH-003", f"{run} {what}, or is no directory of a run, such as runs/demo"
        ) from None
    except ValidationError as error:
        # the input may be all of the file
        first = error.errors(include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            "MW-WATCH-004",
            f"{path} is no status of a run: {where}: {first['msg']}. A run that trains rewrites it",
        ) from None


def run_state(status: Status) -> CurrentState:
    """Return the state of a run now."""
    silent_s = max(0.0, time.time() - status.at_s)
    is_live = status.ended is None and silent_s <= MISSED_TICKS * status.tick_s
    return CurrentState(is_live, silent_s, one_line(_describe(status, silent_s, is_live)))


def _describe(status: Status, silent_s: float, is_live: bool) -> str:
    if status.ended is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.at_s))
        message = f": {status.ended.message}" if status.ended.message else ""
        return f"{status.ended.how} at {when}{message}"
    if is_live:
        return status.phase
    here = status.host == socket.gethostname()
    where = "this machine" if here else status.host
    gone = f" is gone from {where}" if here and not is_alive(status.pid) else f" on {where}"
    return (
        f"silent for {seconds(silent_s)}, while {status.phase}; process {status.pid} of rank"
        f" 0{gone}"
    )


def describe_ranks(status: Status, silent_s: float) -> list[str]:
    """Describe the activity of all ranks, in lines: one for each rank,
    or for each group of ranks that do the same.

    ``silent_s``: seconds since the last update of the file, for ranks without an entry.
    """
    grid, missed_s = Grid.of(status.grid), MISSED_TICKS * status.tick_s
    if grid.size <= MAX_LISTED:
        table = {rank: ReceivedHeartbeat(None, silent_s) for rank in range(grid.size)}
        table |= {
            each.beat.rank: ReceivedHeartbeat(each.beat, each.silent_s) for each in status.ranks
        }
        return lines(table, grid, missed_s)
    groups: dict[tuple[int, str, bool], list[RankStatus]] = defaultdict(list)
    for each in status.ranks:
        beat = each.beat
        waits = "" if beat.waits is None else f", waits ({beat.waits.how})"
        groups[beat.step, in_words(beat.what) + waits, each.silent_s > missed_s].append(each)
    rows = []
    for (step, what, is_silent), found in groups.items():
        longest = seconds(max(each.silent_s if is_silent else each.beat.for_s for each in found))
        since = f"{', no heartbeat' if is_silent else ','} for up to {longest}"
        rows.append(
            f"step {step}: {what}{since}: {len(found):,} ranks,"
            f" {numbers(each.beat.rank for each in found)}"
        )
    missing = set(range(grid.size)) - {each.beat.rank for each in status.ranks}
    rows += [f"no heartbeat yet: {numbers(missing)}"] if missing else []
    return [one_line(row) for row in rows]
