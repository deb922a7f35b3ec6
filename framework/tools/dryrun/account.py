"""From a recorder's notes to what is told of a rank: its peak and what that is made of, the peak of each action, and
what it said to whom.

    at the peak     born before the step              by what it is: weights, gradients, optimizer, buffers
                    made in this action or another    gone by its end: temporary; sent or received: a message;
                                                      else kept: of a forward activations, of a backward buckets
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.mesh.intercept import Heard
from meshwright.schedule.action import Action, Kind
from meshwright.tools.dryrun.recorder import Begun, Life, Recorder, live_bytes


class Category(StrEnum):
    """What live bytes are for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered weights"
    """Of ZeRO-3, whole for a while."""
    ACTIVATIONS = "activations"
    """Kept for a backward."""
    MESSAGES = "messages"
    """Between stages: sent and not done, or received and not used."""
    BUCKETS = "buckets"
    """Gradients in communication, and what a backward has made of them and not handed on."""
    TEMPORARIES = "temporaries"
    """Made and gone in the same action."""
    CONSTANTS = "constants"
    """The model's buffers."""
    OTHER = "other"


class Peak(NamedTuple):
    """The most live bytes within one thing that a rank did."""

    what: object
    """An action, or messages posted together, or words."""
    num_bytes: int


class Spoken(NamedTuple):
    """A message, and what the rank was doing as it said it."""

    what: object
    heard: Heard


@dataclass
class Rehearsal:
    """What one rank does and holds in a step."""

    rank: int
    pp_rank: int
    peak_bytes: int
    """The most live bytes on the device after any operation of the step."""
    peak_in: object
    """What the rank was doing then."""
    held: dict[Category, int]
    """The bytes of that moment."""
    at_rest: dict[Category, int]
    """Before the step."""
    host_bytes: int
    """Of that moment's bytes, those that ``parallel.offload`` puts into the host's memory, and that are not counted."""
    both_bytes: int
    """The most live bytes, those of the host counted too."""
    said: list[Spoken] = field(default_factory=list)
    """In order."""
    peaks: list[Peak] = field(default_factory=list)
    """Of each thing that it did, in order."""


def told(
    recorder: Recorder,
    rank: int,
    pp_rank: int,
    first: int,
    roles: Mapping[int, Category],
    on_host: Collection[Category] = (),
) -> Rehearsal:
    """What the notes from after operation ``first`` on tell. ``roles``: of the storages that were there before;
    ``on_host``: what of them is not on the device: the peak is the device's."""
    last = recorder.now
    begun = [each for each in recorder.begun if each.at >= first] or [Begun(first, "nothing")]
    away = {number for number, role in roles.items() if role in on_host}
    lives = [life for life in recorder.lives if life.died >= first]
    live = live_bytes((life for life in lives if life.number not in away), first, last)
    at = max(range(len(live)), key=live.__getitem__) + first
    ends = [*(each.at - 1 for each in begun[1:]), last]
    spans = list(zip(begun, ends, strict=True))
    doing = next((each for each, end in spans if each.at <= at <= end), begun[0])
    sent = {number for said in recorder.said if said.heard.peer is not None for number in said.storages}
    resized = {number for number, lived in Counter(life.number for life in lives).items() if lived > 1}

    def held(moment: int) -> dict[Category, int]:
        found: Counter[Category] = Counter()
        for life in lives:
            if life.born <= moment <= life.died and life.num_bytes:
                found[_category(life, first, spans, roles, sent, resized)] += life.num_bytes
        return {category: found[category] for category in Category if found[category]}

    said = []
    position = 0
    for each in recorder.said:
        if each.at <= first:
            continue
        while position + 1 < len(begun) and begun[position + 1].at < each.at:
            position += 1
        said.append(Spoken(begun[position].what, each.heard))
    at_peak = held(at)
    return Rehearsal(
        rank,
        pp_rank,
        live[at - first],
        doing.what,
        at_peak,
        held(first),
        sum(at_peak.get(category, 0) for category in on_host),
        max(live_bytes(lives, first, last)) if away else live[at - first],
        said,
        [Peak(each.what, max(live[each.at - first : end + 1 - first])) for each, end in spans],
    )


def _category(
    life: Life,
    first: int,
    spans: list[tuple[Begun, int]],
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
    begun, end = next((each, end) for each, end in reversed(spans) if each.at < life.first)
    if life.number in sent:
        return Category.MESSAGES
    if life.died <= end:
        return Category.TEMPORARIES
    if isinstance(begun.what, Action) and begun.what.kind not in (Kind.F, Kind.I):
        return Category.BUCKETS
    return Category.ACTIVATIONS
