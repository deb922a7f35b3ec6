"""The cards of a placement: every rank in a chip of its row,
for degrees of one digit and of two.
"""

from __future__ import annotations

import re

import pytest

from meshwright.mesh import Grid, nodes_of
from meshwright_plan.page.placement import placement_cards

ROW = re.compile(r'<tr style="--pp:(\d+)"><td>([^<]*)</td><td class="ranks">(.*?)</td></tr>')


@pytest.mark.parametrize(
    "grid",
    [
        Grid(pp=2, dp=2, tp=2),
        Grid(pp=16, dp=2, tp=2),
        Grid(pp=2, dp=16, tp=2),
        Grid(pp=2, dp=2, cp=16),
        Grid(pp=12, dp=11),
    ],
)
def test_each_rank_has_a_chip_beside_its_coordinates(grid: Grid) -> None:
    rows = ROW.findall(placement_cards(grid, nodes_of(-(-grid.size // 8), 8)[: grid.size]))
    assert rows
    for pp_rank, where, chips in rows:
        ranks = [int(rank) for rank in re.findall(r"<span>([^<]*)</span>", chips)]
        at = grid.coordinates(ranks[0])
        cp = f" cp{at.cp_rank}" if grid.cp > 1 else ""
        assert (where, int(pp_rank)) == (f"pp{at.pp_rank} dp{at.dp_rank}{cp}", at.pp_rank)
        assert [grid.coordinates(rank).tp_rank for rank in ranks] == list(range(grid.tp))


def test_a_group_that_straddles_nodes_names_its_part() -> None:
    rows = ROW.findall(placement_cards(Grid(pp=16, tp=2), ["a", "b"] * 16))
    assert rows[0] == ("0", "pp0 dp0 tp0", "<span>0</span> ") and rows[-1][1] == "pp15 dp0 tp1"


def test_a_long_group_is_one_chip() -> None:
    assert "<span>0-15</span>" in placement_cards(Grid(tp=16), nodes_of(1, 16))
