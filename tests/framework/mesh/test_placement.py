"""The drawing of a mesh, for few ranks and for many."""

from __future__ import annotations

import re

from meshwright.mesh import Grid, nodes_of
from meshwright.mesh.placement import WIDTH, draw_placement

EIGHT = """\
pp 2 x dp 2 x tp 2 = 8 ranks on 2 nodes of 4

┌ node0: ranks 0-3 ┐ ┌ node1: ranks 4-7 ┐
│ pp0 dp0  tp  0 1 │ │ pp1 dp0  tp  4 5 │
│ pp0 dp1  tp  2 3 │ │ pp1 dp1  tp  6 7 │
└──────────────────┘ └──────────────────┘

tensor parallel    4 groups of 2 neighbours, a row above; each inside one node
data parallel      4 groups of 2, as ranks 0 2; each inside one node
pipeline           2 replicas of 2 pipeline ranks, first to last:
  dp0  node0 [0-1] → node1 [4-5]
  dp1  node0 [2-3] → node1 [6-7]"""


def test_eight_ranks() -> None:
    assert draw_placement(Grid(pp=2, dp=2, tp=2), nodes_of(2, 4)) == EIGHT


def test_every_rank_of_four_nodes_stands_in_its_row() -> None:
    grid = Grid(pp=2, dp=8, tp=2)
    text = draw_placement(grid, nodes_of(4, 8))
    rows = re.findall(r"│ pp(\d+) +dp(\d+) +tp +(\d+) +(\d+) +│", text)
    assert sorted(int(rank) for row in rows for rank in row[2:]) == list(range(32))
    for pp_rank, dp_rank, first, second in rows:
        at = (grid.coordinates(int(first)), grid.coordinates(int(second)))
        assert [(c.pp_rank, c.dp_rank, c.tp_rank) for c in at] == [
            (int(pp_rank), int(dp_rank), 0),
            (int(pp_rank), int(dp_rank), 1),
        ]
    assert max(map(len, text.splitlines())) <= WIDTH


def test_two_thousand_nodes_fit_a_screen() -> None:
    text = draw_placement(Grid(pp=16, dp=128, tp=8), nodes_of(2048, 8))
    lines = text.splitlines()
    assert len(lines) < 50 and max(map(len, lines)) <= WIDTH
    assert (
        "16,384 ranks on 2,048 nodes of 8" in text
        and "2,040 more nodes" in text
        and "124 more replicas" in text
    )
    assert "pp15 dp127  tp  16376-16383" in text


def test_what_is_off_and_what_straddles_is_said() -> None:
    alone = draw_placement(Grid(), ["here"])
    assert "1 rank on 1 node" in alone and alone.count(" off") == 3
    across = draw_placement(Grid(tp=4), ["a", "a", "b", "b"])
    assert "ACROSS up to 2 nodes" in across and "pp0 dp0  tp2-3  2 3" in across
    uneven = draw_placement(Grid(dp=3), ["a", "b", "a"])
    assert "on 2 nodes of 1 or 2" in uneven and "┌ a: ranks 0 2" in uneven
