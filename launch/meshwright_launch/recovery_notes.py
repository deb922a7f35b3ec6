"""Notes of recoveries in the ranks' rendezvous store: what the coordinator announces, and what ranks report.

    generation          number of the newest launch of ranks; ranks of an earlier one leave their step
    change/G            ranks whose processes do not join generation G: others take their places; lost nodes
    PHASE/G, PHASE/G/R  how many ranks have completed a phase of generation G; the mark of rank R
    step/G              first step that was taken in generation G
    hang/G              ranks that a report of a hang names as stuck

All of it is JSON or numbers, bounded and checked. No torch at import: the launcher starts its fork
server first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.system.numbers import MAX_RANKS, whole_number

PREFIX = "recovery"
PHASES = ("left", "groups", "built", "restored", "stepped")
"""Phases of a recovery that each rank reports to the coordinator, in order."""
MAX_MESSAGE = 60_000

Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[tuple[Rank, ...], Field(max_length=MAX_RANKS)]
Address = Annotated[str, Field(max_length=64)]


class Note(BaseModel):
    """Base of notes in JSON: exact types, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Change(Note):
    """Change from one generation to the next."""

    replaced: Ranks
    """Ranks with new processes."""
    lost: tuple[Address, ...] = ()
    """Addresses of nodes that are gone."""


class HangVerdict(Note):
    """Ranks that a report of a hang names as the cause."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]
    message: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE)]
    for_s: Annotated[float, Field(ge=0, le=1e11)]
    """Seconds for which nothing has moved."""


def note_store(store: Any) -> Any:
    """Return the part of a store for these notes."""
    import torch.distributed as dist

    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


def announced(notes: Any) -> int:
    """Return the newest generation that the coordinator has announced."""
    return int(notes.add("generation", 0))


def changes(notes: Any, after: int, until: int) -> list[Change]:
    """Return what the generations after ``after`` change, up to ``until``."""
    return [
        Change.model_validate_json(notes.get(f"change/{generation}"))
        for generation in range(after + 1, until + 1)
    ]


class CoordinatorNotes:
    """The coordinator's side. It is in the process that serves the store: no call blocks."""

    def __init__(self, store: Any) -> None:
        """Begin with generation 0."""
        self._notes = note_store(store)
        self._generation = 0
        self._has_verdict = False

    def announce(self, generation: int, replaced: Collection[int], lost: Sequence[str]) -> None:
        """Publish a generation, the ranks that have new processes in it, and the addresses of nodes
        that are gone.
        """
        change = Change(replaced=tuple(sorted(replaced)), lost=tuple(lost))
        self._notes.set(f"change/{generation}", change.model_dump_json())
        self._notes.add("generation", generation - self._generation)
        self._generation, self._has_verdict = generation, False

    def count(self, phase: str) -> int:
        """Return how many ranks have completed a phase of this generation."""
        return int(self._notes.add(f"{phase}/{self._generation}", 0))

    def came(self, phase: str, num_ranks: int) -> set[int]:
        """Return the ranks that have completed a phase of this generation."""
        key = f"{phase}/{self._generation}"
        return {rank for rank in range(num_ranks) if self._notes.check([f"{key}/{rank}"])}

    def first_step(self) -> int | None:
        """Return the first step of this generation; None: it has none yet."""
        text = self._read("step")
        return None if text is None else whole_number(text)

    def take_verdict(self) -> HangVerdict | None:
        """Return the verdict on a hang of this generation, once."""
        text = None if self._has_verdict else self._read("hang")
        if text is None:
            return None
        self._has_verdict = True
        try:
            return HangVerdict.model_validate_json(text)
        except ValidationError:
            return None

    def _read(self, name: str) -> str | None:
        key = f"{name}/{self._generation}"
        if not self._notes.check([key]):
            return None
        return bytes(self._notes.get(key)).decode(errors="replace")
