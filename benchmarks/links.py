"""Simulated step time that pipeline messages add,
with receives posted late and posted one computation ahead.

    python benchmarks/links.py

F of a stage takes 1, B 2, I and W 1, a message 0.02 to 0.2. A message leaves when both its ends are
posted and the one before it on its link has arrived. Columns: receives at the latest place, where
they stood until 2026-11-25; one computation ahead, as they are run; and, as a bound, messages that
leave as soon as they are sent.
"""

from __future__ import annotations

from unittest.mock import patch

from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis import Costs, simulate
from meshwright.schedule.analysis.simulator import Channel
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower

CASES = (("1f1b", 4, 1), ("interleaved_1f1b", 4, 2), ("zb_h1", 4, 1), ("zb_v", 4, 2))
CHUNKS = 16


def with_late_receives(schedule: Schedule) -> Schedule:
    """Lower with each message at its place in the global order, the latest: without step (3)
    of lower.py.
    """
    with patch("meshwright.schedule.lower.post_ahead", lambda schedule, row: row):
        return lower(schedule)


def step_time(schedule: Schedule, comm: float, channel: Channel = Channel.LINKS) -> float:
    """Return the end of the last action."""
    return max(span.end for span in simulate(schedule, Costs(comm=comm), channel).spans)


def main() -> None:
    """Print the table."""
    print("| schedule | message / F | late | ahead | sent at once |\n|---|---|---|---|---|")
    for name, pp, interleave in CASES:
        computations = build(name, pp, CHUNKS, interleave)
        late, lowered = with_late_receives(computations), lower(computations)
        ideal = step_time(lowered, 0.0)
        for comm in (0.02, 0.05, 0.1, 0.2):
            times = (
                step_time(late, comm),
                step_time(lowered, comm),
                step_time(lowered, comm, Channel.BUFFERED),
            )
            cells = " | ".join(f"+{100 * (time / ideal - 1):.1f} %" for time in times)
            print(f"| {name} pp{pp} x {interleave} | {comm} | {cells} |")


if __name__ == "__main__":
    main()
