"""Row of a schedule as the executor runs it: items with the keys of their values,
resolved once for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.pipeline.overlap import Pair
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.value_store import MessageGroup, computation_of, message_group
from meshwright.schedule.action import COMMUNICATION, COMPUTE, Action, Kind, Schedule, actions_of


def resolve_row(
    schedule: Schedule, pp_rank: int, stages: Mapping[int, Stage]
) -> Iterator[tuple[Kind | type, Any]]:
    """Yield (kind of item, argument of its method) for each item of a row
    but STEP, the last one.

    The kind is that of the action, ``Pair`` or ``MessageGroup``; the argument a
    :class:`~.value_store.Computation`, a pair of them, the messages that are posted together, or
    the action itself (REDUCE).
    """
    *items, step = schedule.rows[pp_rank]
    assert step == Action(Kind.STEP), f"the row of rank {pp_rank} ends with {step}: lower it first"
    last_backwards, last_stage = schedule.last_backwards(pp_rank), schedule.num_stages - 1
    for item in items:
        actions = actions_of(item)
        kind = actions[0].kind
        if kind in COMMUNICATION:
            yield MessageGroup, message_group(actions, schedule, stages)
        elif kind in COMPUTE:
            computations = [
                computation_of(action, last_stage, is_last=action in last_backwards)
                for action in actions
            ]
            if len(computations) > 1:
                yield Pair, Pair(*computations)
            else:
                yield kind, computations[0]
        else:
            yield kind, item
