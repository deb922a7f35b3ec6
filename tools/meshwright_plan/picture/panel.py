"""Panels: timelines of a figure or a trace."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from meshwright.schedule.analysis import Reading, Timeline


class Unit(StrEnum):
    """Unit of the times of a timeline."""

    TICKS = "ticks"
    SECONDS = "seconds"


class Panel(NamedTuple):
    """Timeline of a figure or trace, with its caption and its times of reading samples."""

    timeline: Timeline
    caption: str = ""
    """Caption above the timeline; empty: name, bubble share and activations in flight."""
    readings: tuple[Reading, ...] = ()
