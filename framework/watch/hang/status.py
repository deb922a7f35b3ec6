"""Where a run stands, out of its ``status.json``: whether it goes on, and how it ended if it does not. No torch."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from meshwright.system.process import is_alive
from meshwright.watch.hang.diagnosis import seconds
from meshwright.watch.hang.heartbeat import MISSED, Status


class RunStanding(NamedTuple):
    """At one moment."""

    is_live: bool
    """It goes on: it was heard of in time."""
    silent_s: float
    """Since it was heard of last."""
    told: str
    """In words: what it does, how it ended, or since when nothing was heard."""


def read_standing(status: Status) -> RunStanding:
    """Now."""
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
