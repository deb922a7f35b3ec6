"""Placement of the ranks on nodes as HTML: a card for each node, a row in it for each tensor-parallel group.

node0: ranks 0-3           a colour for each pipeline rank
pp0 dp0  [0] [1]
pp0 dp1  [2] [3]
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from meshwright.mesh.grid import Grid
from meshwright.mesh.placement import GroupRow, NodeBox, place_ranks

ROW = Markup('<tr{style}><td>{where}</td><td class="ranks">{ranks}</td></tr>')
CARD = Markup('<table class="node"><caption>{title}</caption>{rows}</table>')
MORE = Markup('<div class="node more">{count:,} more nodes</div>')


def placement_cards(grid: Grid, nodes: Sequence[str]) -> Markup:
    """Return the placement of ``grid`` as HTML; ``nodes[rank]`` is the name of a rank's node.

    What is abridged in the text of :func:`meshwright.mesh.draw_placement` is abridged here.
    """
    drawn = place_ranks(grid, nodes)
    cards = [_card(box) for box in drawn.boxes]
    if drawn.num_left_out:
        cards.insert((len(cards) + 1) // 2, MORE.format(count=drawn.num_left_out))
    return Markup('<p class="soft">{}</p><div class="nodes">{}</div><table class="groups">{}</table>').format(
        drawn.head, Markup("").join(cards), Markup("").join(_line(line) for line in drawn.groups)
    )


def _card(box: NodeBox) -> Markup:
    return CARD.format(title=box.title, rows=Markup("").join(map(_row, box.rows)))


def _row(row: GroupRow) -> Markup:
    """Return a row: the coordinates, then each rank or range of ranks in a chip of its pipeline rank's colour."""
    if row.pp_rank is None:
        return Markup('<tr><td colspan="2">{}</td></tr>').format(row.text)
    chips = Markup(" ").join(Markup("<span>{}</span>").format(rank) for rank in row.ranks)
    return ROW.format(style=Markup(' style="--pp:{}"').format(row.pp_rank), where=row.where, ranks=chips)


def _line(line: str) -> Markup:
    """Return a line about groups as a table row: its name, and the rest."""
    name, _, rest = line.strip().partition("  ")
    return Markup("<tr><th>{}</th><td>{}</td></tr>").format(name, rest.strip())
