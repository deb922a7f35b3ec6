"""Placement of the ranks on nodes as HTML: a card for each node,
a row in it for each tensor-parallel group.

node0: ranks 0-3           a colour for each pipeline rank
pp0 dp0  [0] [1]
pp0 dp1  [2] [3]
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from meshwright.mesh.grid import Grid
from meshwright.mesh.placement import place_ranks
from meshwright_plan.page.render import SHARED, render


def placement_cards(grid: Grid, nodes: Sequence[str]) -> Markup:
    """Return the placement of ``grid`` as HTML; ``nodes[rank]`` is the name of a rank's node.

    What is abridged in the text of :func:`meshwright.mesh.draw_placement` is abridged here.
    """
    drawn = place_ranks(grid, nodes)
    middle = (len(drawn.boxes) + 1) // 2
    return Markup(render(SHARED / "placement.html.j2", drawn=drawn, middle=middle))
