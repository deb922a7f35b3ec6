"""Analyses of a schedule: checked for faults, simulated, compared with measured steps, drawn as text.

check, report           faults of a lowered schedule: missing, repeated or misplaced actions, deadlocks
simulate, pace          Schedule and Costs -> Timeline
Timeline, Reading       one step in time, simulated or measured
bubble_share, bubbles, on_their_way, peak_activations     measures of a timeline
text, timeline_of, caption, name_of, typical_shortest     pictures for a terminal, and what other pictures share
"""

from meshwright.schedule.analysis.draw import caption, name_of, text, timeline_of, typical_shortest
from meshwright.schedule.analysis.fault_report import report
from meshwright.schedule.analysis.faults import check
from meshwright.schedule.analysis.simulator import Costs, pace, simulate
from meshwright.schedule.analysis.timeline import (
    Reading,
    Timeline,
    bubble_share,
    bubbles,
    on_their_way,
    peak_activations,
)

__all__ = [
    "Costs",
    "Reading",
    "Timeline",
    "bubble_share",
    "bubbles",
    "caption",
    "check",
    "name_of",
    "on_their_way",
    "pace",
    "peak_activations",
    "report",
    "simulate",
    "text",
    "timeline_of",
    "typical_shortest",
]
