"""Fast simulation of a schedule's computations, for the many layouts of a search;
messages are delays, not spans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshwright.errors import ScheduleError
from meshwright.schedule.action import COMPUTE, Action, Kind, Schedule, actions_of
from meshwright.schedule.analysis import Costs, Span, Timeline, pair_spans


def simulate_fast(
    schedule: Schedule, costs: Sequence[Costs], by_microbatch: Sequence[Sequence[Costs]] = ()
) -> Timeline:
    """Simulate a schedule with buffered sends; return its computations.
    Several times as fast as :func:`simulate`.

    Args:
        schedule: from ``build``, not lowered.
        costs: of each stage.
        by_microbatch: costs of each stage for each micro-batch, where these differ; messages take
            the time that ``costs`` has.

    Raises:
        ScheduleError: the schedule hangs.
    """
    last = schedule.num_stages - 1
    ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    forth = [
        costs[s].comm if s < last and ranks[s] != ranks[s + 1] else 0.0 for s in range(last + 1)
    ]
    back = [costs[s].comm if s > 0 and ranks[s] != ranks[s - 1] else 0.0 for s in range(last + 1)]
    of_microbatch = by_microbatch or [costs] * schedule.chunks
    takes = [_seconds(each) for each in by_microbatch] or [_seconds(costs)] * schedule.chunks
    arrives: dict[tuple[bool, int, int], float] = {}
    """(True for a forward's input, receiving stage, micro-batch) -> time of arrival."""
    waiting: dict[tuple[bool, int, int], int] = {}
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    clocks, positions = [0.0] * schedule.pp, [0] * schedule.pp
    to_visit = deque(range(schedule.pp))
    while to_visit:
        rank = to_visit.popleft()
        row, own, clock = schedule.rows[rank], spans[rank], clocks[rank]
        while positions[rank] < len(row):
            group = actions_of(row[positions[rank]])
            missing = None
            for kind, stage, microbatch in group:  # a pair waits for both inputs
                assert stage is not None and microbatch is not None, group
                need = (kind is Kind.F, stage, microbatch)
                if kind is not Kind.W and stage != (0 if kind is Kind.F else last):
                    clock = max(clock, arrives.get(need, clock))
                    missing = missing if need in arrives else need
            if missing is not None:
                waiting[missing] = rank
                break
            if isinstance(row[positions[rank]], Action):
                kind, stage, microbatch = group[0]
                taken_s = takes[microbatch or 0][kind, stage or 0]
                own.append(Span(rank, group[0], clock, clock + taken_s))
            else:
                parts = [
                    of_microbatch[each.microbatch or 0][each.stage or 0].parts(each.kind)
                    for each in group
                ]
                own += pair_spans(rank, group, clock, parts)
            clock = own[-1].end
            positions[rank] += 1
            for kind, stage, microbatch in group:
                if kind is not Kind.W and stage is not None and microbatch is not None:
                    forward = kind is Kind.F
                    made = (forward, stage + 1 if forward else stage - 1, microbatch)
                    arrives[made] = clock + (forth if forward else back)[stage]
                    if made in waiting:
                        to_visit.append(waiting.pop(made))
        clocks[rank] = clock
    if waiting:
        raise ScheduleError(
            "MW-SCHEDULE-008",
            f"{schedule.name} hangs: ranks wait for each other ({len(waiting)}); see check()",
        )
    return Timeline(schedule.name, tuple(span for row in spans for span in row))


def _seconds(costs: Sequence[Costs]) -> dict[tuple[Kind, int], float]:
    """Return the seconds of each kind of computation of each stage."""
    return {(kind, stage): cost.of(kind) for kind in COMPUTE for stage, cost in enumerate(costs)}
