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
    """A timeline of a figure or trace that may have several."""

    timeline: Timeline
    caption: str = ""
    """Caption above the timeline; empty: name, bubble share and peak activations."""
    readings: tuple[Reading, ...] = ()
