"""Published bubble rates beside the simulated ones of this framework's schedules,
with the same times. No torch.

    python benchmarks/bubbles.py            prints the table of docs/schedules.md
    python benchmarks/bubbles.py --write    and puts it there

A bubble rate is (cost - m (F+I+W)) / cost. The authors' script defines the cost that the paper
uses. For 1F1B, 1F1B-I and ZB-H1 it is the time from the first forward to the last backward of all
ranks. For ZB-H2 and ZB-V it is the longest time of one rank, from its first forward to its last
backward.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import Costs, Timeline, bubble_share, simulate
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from tests.support.bubbles import own_bubble_share

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
    """Row of the published tables: times of one rank's layers in microseconds,
    and the published rates.
    """

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
        """Return the stages per rank: one layer in each stage for 1F1B-I, two stages for ZB-V,
        else one stage.
        """
        return {"1F1B-I": self.num_layers // self.pp, "ZB-V": 2}.get(name, 1)

    def costs(self, interleave: int) -> Costs:
        """Return the costs of one of ``interleave`` stages of a rank; as in the paper,
        a message costs the same.
        """
        f, i, w = (time / interleave for time in (self.f, self.i, self.w))
        return Costs(f=f, b=i + w, i=i, w=w, comm=self.comm)


def profiles() -> list[Profile]:
    """Read the rows of the data file."""
    lines = [
        line for line in DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    numbers = ("table", "layers", "p", "m", "f", "i", "w", "comm")
    found = []
    for row in csv.DictReader(lines):
        table, *rest = (int(row[name]) for name in numbers)
        published = {name: float(row[name]) for name in SCHEDULES if row[name]}
        found.append(Profile(table, row["model"], *rest, published))
    return found


def simulated(profile: Profile, name: str) -> Timeline:
    """Simulate this framework's schedule of a published name with the times of a row."""
    interleave = profile.interleave(name)
    schedule = build(SCHEDULES[name][0], profile.pp, profile.chunks, interleave)
    return simulate(lower(schedule), profile.costs(interleave))


def ours(profile: Profile, name: str) -> float:
    """Return the simulated bubble rate, by the paper's definition of the cost for this schedule."""
    return SCHEDULES[name][1](simulated(profile, name))


def without_waits_at_the_turn(profile: Profile) -> float:
    """Return the paper's rate of 1F1B-I, where the first rank waits for only one in pp messages
    of the last rank.

    The paper's script computes the time at which a micro-batch may enter a rank's next stage only
    for the first of each group of pp. It assumes that the others have arrived by then, which is
    wrong if messages take time.
    """
    interleave = profile.interleave("1F1B-I")
    schedule, costs = (
        build("interleaved_1f1b", profile.pp, profile.chunks, interleave),
        profile.costs(interleave),
    )
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
                start = (
                    max(clocks[rank], ends[needed] + costs.comm) if is_waited_for else clocks[rank]
                )
                ends[action] = clocks[rank] = start + costs.of(action.kind)
                positions[rank] += 1
    work = profile.chunks * (profile.f + profile.i + profile.w)
    return (max(clocks) - work) / max(clocks)


def _needed(schedule: Schedule, rank: int, action: Action) -> Action | None:
    offset = -1 if action.kind is Kind.F else 1
    return (
        None
        if schedule.receive_for(action) is None
        else action._replace(stage=action.stage + offset)
    )


def _turns(schedule: Schedule, needed: Action, rank: int) -> bool:
    return {schedule.rank_of(needed.stage), rank} == {0, schedule.pp - 1}


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table: published, simulated,
    and the difference where there is one.
    """
    columns = ["table", "model", "p", "m", *SCHEDULES, "1F1B-I, not waiting"]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for profile in profiles():
        yield table_row(profile)


def table_row(profile: Profile) -> str:
    """Return one row of the table."""
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
    return f"{published:.4f} {found:.4f}" + (
        f" ({difference:+.4f})" if abs(difference) > 1e-9 else ""
    )


if __name__ == "__main__":
    lines = "".join(line + "\n" for line in table())
    print(lines, end="")
    if "--write" in sys.argv[1:]:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(before + BEGIN + lines + END + rest.partition(END)[2], encoding="utf-8")
