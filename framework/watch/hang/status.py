"""State of a run according to its ``status.json``: still training, ended, or silent. No torch."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from meshwright.system.process import is_alive
from meshwright.watch.hang.diagnosis import seconds
from meshwright.watch.hang.heartbeat import MISSED, Status


class RunStanding(NamedTuple):
    """State of a run at one moment."""

    is_live: bool
    """True while the run trains: its status file is not older than ``MISSED`` ticks."""
    silent_s: float
    """Seconds since the last update of the status file."""
    told: str
    """Text for the user: the current phase, the end of the run, or the time without an update."""


def read_standing(status: Status) -> RunStanding:
    """Return the state of a run now."""
    silent_s = max(0.0, time.time() - status.at_s)
    is_live = status.ended is None and silent_s <= MISSED * status.tick_s
    return RunStanding(is_live, silent_s, _told(status, silent_s, is_live))


def _told(status: Status, silent_s: float, is_live: bool) -> str:
    if status.ended is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.at_s))
        message = f": {status.ended.message}" if status.ended.message else ""
        return f"{status.ended.how} at {when}{message}"
    if is_live:
        return status.phase
    here = status.host == socket.gethostname()
    where = "this machine" if here else status.host
    gone = f" is gone from {where}" if here and not is_alive(status.pid) else f" on {where}"
    return f"silent for {seconds(silent_s)}, while {status.phase}; process {status.pid} of rank 0{gone}"
