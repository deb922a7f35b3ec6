"""Row of a schedule as the executor runs it: items with the keys of their values, resolved once for all steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.pipeline.overlap import Pair
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.value_store import MessageGroup, computation_of, message_group
from meshwright.schedule.action import COMMUNICATION, COMPUTE, Kind, Schedule, actions_of


def resolve_row(schedule: Schedule, pp_rank: int, stages: Mapping[int, Stage]) -> Iterator[tuple[Kind | type, Any]]:
    """Yield (kind of item, argument of its method) for each item of a row.

    The kind is that of the action, ``Pair`` or ``MessageGroup``; the argument a :class:`~.value_store.Computation`, a
    pair of them, the messages that are posted together, or the action itself (REDUCE, STEP).
    """
    last_backwards, last_stage = schedule.last_backwards(pp_rank), schedule.num_stages - 1
    for item in schedule.rows[pp_rank]:
        group = actions_of(item)
        if group[0].kind in COMMUNICATION:
            yield MessageGroup, message_group(group, schedule, stages)
        elif group[0].kind in COMPUTE:
            found = [computation_of(each, last_stage, is_last=each in last_backwards) for each in group]
            yield (Pair, Pair(*found)) if len(found) > 1 else (group[0].kind, found[0])
        else:
            yield group[0].kind, item
