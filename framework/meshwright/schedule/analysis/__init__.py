"""Analyses of a schedule: checked for faults, simulated, compared with measured steps.

check, report           faults of a lowered schedule: missing, repeated or misplaced actions, deadlocks
simulate, timeline_of   Schedule and Costs -> Timeline; seconds_in_turns, pair_spans: time of a pair
Timeline, Span, Reading one step in time, simulated or measured
bubble_share, bubbles, on_their_way, peak_activations     measures of a timeline
links_of                links of a pipeline that schedules use
name_of                 name of a schedule with its size
"""

from meshwright.schedule.analysis.fault_report import report as report
from meshwright.schedule.analysis.faults import check as check
from meshwright.schedule.analysis.links import links_of as links_of
from meshwright.schedule.analysis.pairs import pair_spans as pair_spans
from meshwright.schedule.analysis.pairs import seconds_in_turns as seconds_in_turns
from meshwright.schedule.analysis.simulator import Costs as Costs
from meshwright.schedule.analysis.simulator import simulate as simulate
from meshwright.schedule.analysis.simulator import timeline_of as timeline_of
from meshwright.schedule.analysis.timeline import Reading as Reading
from meshwright.schedule.analysis.timeline import Span as Span
from meshwright.schedule.analysis.timeline import Timeline as Timeline
from meshwright.schedule.analysis.timeline import bubble_share as bubble_share
from meshwright.schedule.analysis.timeline import bubbles as bubbles
from meshwright.schedule.analysis.timeline import name_of as name_of
from meshwright.schedule.analysis.timeline import on_their_way as on_their_way
from meshwright.schedule.analysis.timeline import peak_activations as peak_activations
