"""Profile of one rank in a step, from a recorder: peak memory by category, the peak of each action,
communication.

Category of a storage, by the first rule that holds:

    weight, gradient, state, buffer -> its role    resized -> gathered weights (ZeRO-3)    from before the step -> other
    sent or received -> message                    released in the action that made it -> temporary
    made by B, W, REDUCE or STEP -> bucket         otherwise (F, I) -> activation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.mesh.fake import InterceptedOperation
from meshwright.schedule.action import Action, Kind
from meshwright_plan.dryrun.recorder import ActivityStart, StepRecorder, StorageLife, live_bytes


class Category(StrEnum):
    """Category of live bytes; see the rules at the top of this file."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered weights"
    """Weights of ZeRO-3 while they are unsharded."""
    ACTIVATIONS = "activations"
    """Tensors kept for a backward."""
    MESSAGES = "messages"
    """Values between stages: sent and not completed, or received and not yet used."""
    BUCKETS = "buckets"
    """Gradients in communication, and results of a backward that have not been sent."""
    TEMPORARIES = "temporaries"
    """Tensors made and released in the same action."""
    CONSTANTS = "constants"
    """Buffers of the model."""
    OTHER = "other"


class Peak(NamedTuple):
    """Largest number of live bytes during one activity of a rank."""

    activity: object
    """Action, group of messages posted together, or a text."""
    num_bytes: int


class CommunicationRecord(NamedTuple):
    """Communication operation, and the rank's activity at that time."""

    activity: object
    call: InterceptedOperation


@dataclass
class RankProfile:
    """Memory and communication of one rank in a step; also that of every rank with equal stages."""

    rank: int
    pp_rank: int
    peak_bytes: int
    """Largest number of live bytes on the device after any operation of the step."""
    peak_in: object
    """Activity of the rank at the peak."""
    held: dict[Category, int]
    """Live bytes at the peak, by category."""
    at_rest: dict[Category, int]
    """Live bytes before the step, by category."""
    host_bytes: int
    """Bytes at the peak that ``parallel.offload`` keeps in host memory;
    not part of ``peak_bytes``.
    """
    offloaded_bytes: int
    """Largest number of bytes of saved tensors that ``pipeline.offload_activations`` keeps in host
    memory. On CUDA a layer's block of pinned memory is rounded up to a power of two, which is not
    counted.
    """
    both_bytes: int
    """Largest number of live bytes on device and host together."""
    communication: list[CommunicationRecord] = field(default_factory=list)
    """Communication operations, in order."""
    peaks: list[Peak] = field(default_factory=list)
    """Peak of each activity, in order."""


def build_profile(
    recorder: StepRecorder,
    rank: int,
    pp_rank: int,
    first: int,
    roles: Mapping[int, Category],
    host_categories: Collection[Category],
) -> RankProfile:
    """Build the profile of a rank from the records after operation ``first``.

    Args:
        roles: Storage number -> category, for storages from before the step.
        host_categories: Those of the categories that are in host memory, outside the device's peak.
    """
    last = recorder.now
    starts = [start for start in recorder.activities if start.at >= first] or [
        ActivityStart(first, "nothing")
    ]
    on_host = {number for number, role in roles.items() if role in host_categories}
    every = [life for life in recorder.lives if life.died >= first]
    lives = [life for life in every if life.number not in recorder.on_host]
    saved = [life for life in every if life.number in recorder.on_host]
    live = live_bytes((life for life in lives if life.number not in on_host), first, last)
    at = max(range(len(live)), key=live.__getitem__) + first
    ends = [*(start.at - 1 for start in starts[1:]), last]
    spans = list(zip(starts, ends, strict=True))
    current = next((start for start, end in spans if start.at <= at <= end), starts[0])
    messages = (record for record in recorder.communication if record.call.peer is not None)
    sent = {number for record in messages for number in record.storages}
    resized = {
        number
        for number, num_lives in Counter(life.number for life in lives).items()
        if num_lives > 1
    }

    def held(moment: int) -> dict[Category, int]:
        num_bytes: Counter[Category] = Counter()
        for life in lives:
            if life.born <= moment <= life.died and life.num_bytes:
                num_bytes[_category(life, first, spans, roles, sent, resized)] += life.num_bytes
        return {category: num_bytes[category] for category in Category if num_bytes[category]}

    communication = []
    position = 0
    for record in recorder.communication:
        if record.at <= first:
            continue
        while position + 1 < len(starts) and starts[position + 1].at < record.at:
            position += 1
        communication.append(CommunicationRecord(starts[position].activity, record.call))
    at_peak = held(at)
    return RankProfile(
        rank,
        pp_rank,
        live[at - first],
        current.activity,
        at_peak,
        held(first),
        sum(at_peak.get(category, 0) for category in host_categories),
        max(live_bytes(saved, first, last)),
        max(live_bytes(every, first, last)) if on_host or saved else live[at - first],
        communication,
        [
            Peak(start.activity, max(live[start.at - first : end + 1 - first]))
            for start, end in spans
        ],
    )


def _category(
    life: StorageLife,
    first: int,
    spans: list[tuple[ActivityStart, int]],
    roles: Mapping[int, Category],
    sent: Collection[int],
    resized: Collection[int],
) -> Category:
    if life.number in roles:
        return roles[life.number]
    if life.number in resized:
        return Category.GATHERED
    if life.first <= first:
        return Category.OTHER
    start, end = next((start, end) for start, end in reversed(spans) if start.at < life.first)
    if life.number in sent:
        return Category.MESSAGES
    if life.died <= end:
        return Category.TEMPORARIES
    if isinstance(start.activity, Action) and start.activity.kind not in (Kind.F, Kind.I):
        return Category.BUCKETS
    return Category.ACTIVATIONS
