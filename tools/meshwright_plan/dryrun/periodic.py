"""Profile of a rank for many micro-batches, from a dry run with few:
the steady part of its row is repeated.

    recorded, 6 micro-batches    F0 B0 | F1 B1 | F2 B2 | F3 B3 | F4 B4  F5 B5  REDUCE STEP
    equal up to micro-batch numbers      = = = = = = = = = = =
    lengthened, 32               F0 B0 | F1 B1 | F2 B2 ...  (27 of them)  F30 B30  F31 B31  REDUCE STEP

Activities and their communication must repeat, and their peaks must grow by the same few bytes per
period: scalars such as the losses are kept until the end of a step. This is used where storages
outlive their micro-batch (ZeRO-2, ZeRO-3), which templates cannot express.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.mesh.fake import InterceptedOperation
from meshwright.schedule.action import COMPUTE, Action, Schedule
from meshwright_plan.dryrun.rank_profile import Category, CommunicationRecord, Peak, RankProfile
from meshwright_plan.dryrun.templates import ReplayError

REPEATS = 3
"""Number of equal periods that a recording must have."""
MOST_GROWTH = 256
"""Bytes by which a peak may grow in a period; more means that the rank is still filling up."""


class _Moment(NamedTuple):
    """One activity of a rank with its peak and its communication."""

    activity: Any
    num_bytes: int
    calls: tuple[InterceptedOperation, ...]

    def shifted(self, by: int, growth: int) -> _Moment:
        """Return the same moment ``by`` micro-batches later, with ``growth`` more bytes."""
        return self._replace(
            activity=_shifted(self.activity, by), num_bytes=self.num_bytes + growth
        )


def few_chunks(schedule: Schedule) -> int:
    """Return a number of micro-batches in which the middle of every row repeats;
    interleaved rows keep chunks mod pp.

    The first micro-batches of a rank fill its pipeline, and up to 2 pp sends in flight.
    """
    pp, chunks = schedule.pp, schedule.chunks
    if pp == 1:
        return 2 * REPEATS
    return (
        4 * pp + 2 * REPEATS + 2 if period(schedule) == 1 else (4 + 2 * REPEATS) * pp + chunks % pp
    )


def period(schedule: Schedule) -> int:
    """Return the number of micro-batches after which a row repeats:
    pp with several stages per rank, else 1.
    """
    return schedule.pp if schedule.interleave > 1 else 1


def lengthen(short: RankProfile, schedule: Schedule, more: int) -> RankProfile:
    """Return the profile with ``more`` micro-batches, as in the row of the full ``schedule``.

    Raises:
        ReplayError: the middle of the row does not repeat, or the result is not the row of the
            schedule.
    """
    moments, step = _moments(short), period(schedule)
    start, length, growth = _period(moments, step)
    if more % step:
        raise ReplayError(f"{more} more micro-batches are not a multiple of {step}")
    times, end = more // step, start + length
    inserted = [
        m.shifted(step * n, growth * n) for n in range(1, times + 1) for m in moments[start:end]
    ]
    whole = [*moments[:end], *inserted, *(m.shifted(more, growth * times) for m in moments[end:])]
    computed = [
        m.activity for m in whole if isinstance(m.activity, Action) and m.activity.kind in COMPUTE
    ]
    if computed != [
        action for _, action in schedule.actions(short.pp_rank) if action.kind in COMPUTE
    ]:
        raise ReplayError("the repeated row is not that of the schedule")
    peak = max(whole, key=lambda moment: moment.num_bytes)
    added = peak.num_bytes - short.peak_bytes
    kept = short.held.get(Category.ACTIVATIONS, 0) + added
    return replace(
        short,
        peak_bytes=peak.num_bytes,
        peak_in=peak.activity,
        held=short.held | ({Category.ACTIVATIONS: kept} if added else {}),
        both_bytes=short.both_bytes + added,
        communication=[CommunicationRecord(m.activity, call) for m in whole for call in m.calls],
        peaks=[Peak(m.activity, m.num_bytes) for m in whole],
    )


def _moments(profile: RankProfile) -> list[_Moment]:
    """Join the peaks of a profile with the communication of each activity."""
    calls: list[list[InterceptedOperation]] = [[] for _ in profile.peaks]
    at = 0
    for record in profile.communication:
        while profile.peaks[at].activity is not record.activity:
            at += 1
        calls[at].append(record.call)
    return [_Moment(*peak, tuple(own)) for peak, own in zip(profile.peaks, calls, strict=True)]


def _period(moments: Sequence[_Moment], step: int) -> tuple[int, int, int]:
    """Return the first moment of the repeated part, the number of moments in a period,
    and the bytes added by each.
    """
    names = [(str(moment.activity), moment.calls) for moment in moments]
    for start, moment in enumerate(moments):
        later = (str(_shifted(moment.activity, step)), moment.calls)
        if names[start] == later or later not in names[start + 1 :]:
            continue
        length = names.index(later, start + 1) - start
        growth = moments[start + length].num_bytes - moment.num_bytes
        repeats = moments[start : start + (REPEATS - 1) * length]
        shifted = [_key(each.shifted(step, growth)) for each in repeats]
        if 0 <= growth <= MOST_GROWTH and shifted == [
            _key(each) for each in moments[start + length : start + REPEATS * length]
        ]:
            return start, length, growth
    raise ReplayError("its micro-batches differ")


def _key(moment: _Moment) -> tuple[str, int, tuple[InterceptedOperation, ...]]:
    return str(moment.activity), moment.num_bytes, moment.calls


def _shifted(activity: Any, by: int) -> Any:
    """Return an activity of a later micro-batch; activities without one stay as they are."""
    if isinstance(activity, Action):
        return (
            activity
            if activity.microbatch is None
            else activity._replace(microbatch=activity.microbatch + by)
        )
    if isinstance(activity, tuple):  # messages that are posted together
        return type(activity)(
            message._replace(
                action=_shifted(message.action, by), key=(*message.key[:2], message.key[2] + by)
            )
            for message in activity
        )
    return activity
