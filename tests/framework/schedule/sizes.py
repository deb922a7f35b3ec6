"""The schedules over which properties are tested: each by its name, in any size."""

from __future__ import annotations

from hypothesis import strategies as st

from meshwright.schedule.action import Schedule
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.degrees import INTERLEAVES


def interleaves(name: str) -> list[int]:
    """Return those of 1..4 that the schedule can have."""
    return [each for each in range(1, 5) if each in INTERLEAVES.get(name, range(1, 2))]


def smallest(name: str, pp: int, chunks: int) -> Schedule:
    """With as few stages per rank as it can have."""
    return build(name, pp, chunks, interleaves(name)[0])


@st.composite
def built(draw: st.DrawFn, max_pp: int = 8, max_chunks: int = 20) -> Schedule:
    """Any schedule of pp 1..8, chunks 1..20, interleave 1..4."""
    name = draw(st.sampled_from(sorted(BUILDERS)))
    pp, chunks = draw(st.integers(1, max_pp)), draw(st.integers(1, max_chunks))
    return build(name, pp, chunks, draw(st.sampled_from(interleaves(name))))
