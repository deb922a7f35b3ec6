"""Published bubble rates beside those that our simulator finds for our schedules, with the same times. No torch.

    python benchmarks/bubbles.py            prints the table of docs/schedules.md
    python benchmarks/bubbles.py --write    and puts it there

A bubble rate is (cost - m (F+I+W)) / cost. What the cost is, the paper takes from the script of its authors: for 1F1B,
1F1B-I and ZB-H1 the time from the first forward to the last backward of all ranks, for ZB-H2 and ZB-V the longest own
time of a rank, from its first forward to its last backward.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis.simulate import Costs, Timeline, bubble_share, own_bubble_share, simulate
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower

DATA = Path(__file__).parent / "zb_profiles.csv"
DOCS = Path(__file__).parents[1] / "docs" / "schedules.md"
BEGIN, END = "<!-- begin: python benchmarks/bubbles.py -->\n", "<!-- end -->\n"

SCHEDULES = {
    "1F1B": ("1f1b", bubble_share),
    "1F1B-I": ("interleaved_1f1b", bubble_share),
    "ZB-H1": ("zb_h1", bubble_share),
    "ZB-H2": ("zb_h2", own_bubble_share),
    "ZB-V": ("zb_v", own_bubble_share),
}


class Profile(NamedTuple):
    """A row of the tables: times of a whole rank's layers in microseconds, and the published rates that there are."""

    table: int
    model: str
    num_layers: int
    pp: int
    chunks: int
    f: int
    i: int
    w: int
    comm: int
    published: dict[str, float]

    def interleave(self, name: str) -> int:
        """One layer in each stage for 1F1B-I, two stages per rank for ZB-V."""
        return {"1F1B-I": self.num_layers // self.pp, "ZB-V": 2}.get(name, 1)

    def costs(self, interleave: int) -> Costs:
        """Of one stage, where the rank has ``interleave`` of them: as in the paper, a message costs what it did."""
        f, i, w = (time / interleave for time in (self.f, self.i, self.w))
        return Costs(f=f, b=i + w, i=i, w=w, comm=self.comm)


def profiles() -> list[Profile]:
    """The rows of the data file."""
    lines = [line for line in DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    numbers = ("table", "layers", "p", "m", "f", "i", "w", "comm")
    found = []
    for row in csv.DictReader(lines):
        table, *rest = (int(row[name]) for name in numbers)
        published = {name: float(row[name]) for name in SCHEDULES if row[name]}
        found.append(Profile(table, row["model"], *rest, published))
    return found


def simulated(profile: Profile, name: str) -> Timeline:
    """What our schedule of a published name comes to with the times of a row."""
    interleave = profile.interleave(name)
    schedule = build(SCHEDULES[name][0], profile.pp, profile.chunks, interleave)
    return simulate(lower(schedule), profile.costs(interleave))


def ours(profile: Profile, name: str) -> float:
    """The bubble rate by the definition of the cost that the paper has for this schedule."""
    return SCHEDULES[name][1](simulated(profile, name))


def without_waits_at_the_turn(profile: Profile) -> float:
    """1F1B-I as the paper has it: from the last rank to the first only one message in pp is waited for.

    Its script computes when a micro-batch may enter a rank's next stage for the first micro-batch of each group of pp,
    and takes for granted that the others are there in time. With messages that take time they are not.
    """
    interleave = profile.interleave("1F1B-I")
    schedule, costs = build("interleaved_1f1b", profile.pp, profile.chunks, interleave), profile.costs(interleave)
    rows = [[action for _, action in schedule.actions(rank)] for rank in range(schedule.pp)]
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * schedule.pp, [0] * schedule.pp
    while any(positions[rank] < len(row) for rank, row in enumerate(rows)):
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                needed = _needed(schedule, rank, action)
                if needed is not None and needed not in ends:
                    break
                is_waited_for = needed is not None and not (
                    _turns(schedule, needed, rank) and action.microbatch % schedule.pp
                )
                start = max(clocks[rank], ends[needed] + costs.comm) if is_waited_for else clocks[rank]
                ends[action] = clocks[rank] = start + costs.of(action.kind)
                positions[rank] += 1
    work = profile.chunks * (profile.f + profile.i + profile.w)
    return (max(clocks) - work) / max(clocks)


def _needed(schedule: Schedule, rank: int, action: Action) -> Action | None:
    offset = -1 if action.kind is Kind.F else 1
    return None if schedule.receive_for(action) is None else action._replace(stage=action.stage + offset)


def _turns(schedule: Schedule, needed: Action, rank: int) -> bool:
    return {schedule.rank_of(needed.stage), rank} == {0, schedule.pp - 1}


def table() -> Iterator[str]:
    """The lines of a table in Markdown: published, ours, and the difference where there is one."""
    columns = ["table", "model", "p", "m", *SCHEDULES, "1F1B-I, not waiting"]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for profile in profiles():
        yield table_row(profile)


def table_row(profile: Profile) -> str:
    """One row of it."""
    cells = [str(profile.table), profile.model, str(profile.pp), str(profile.chunks)]
    for name in SCHEDULES:
        published = profile.published.get(name)
        cells.append(_cell(published, ours(profile, name)))
    cells.append(f"{without_waits_at_the_turn(profile):.4f}")
    return "| " + " | ".join(cells) + " |"


def _cell(published: float | None, found: float) -> str:
    if published is None:
        return f"- {found:.4f}"
    difference = round(found, 4) - published
    return f"{published:.4f} {found:.4f}" + (f" ({difference:+.4f})" if abs(difference) > 1e-9 else "")


if __name__ == "__main__":
    lines = "".join(line + "\n" for line in table())
    print(lines, end="")
    if "--write" in sys.argv[1:]:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(before + BEGIN + lines + END + rest.partition(END)[2], encoding="utf-8")
