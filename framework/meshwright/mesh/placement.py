"""Placement of the ranks of a mesh on nodes, checked and drawn as text: pure,
for 8 ranks and for 16,384.

┌ node0: ranks 0-3 ┐      a box per node, a row per tensor-parallel group in it:
│ pp0 dp0  tp  0 1 │      its pipeline rank, its replica, its ranks in the order of tp
│ pp0 dp1  tp  2 3 │
└──────────────────┘
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from meshwright.errors import MeshError
from meshwright.mesh.expert_groups import expert_replicas
from meshwright.mesh.grid import Axis, Coordinates, Grid

WIDTH = 80
MOST_BOXES = 8
MOST_ROWS = 16
MOST_COLUMNS = 24
MOST_PIPELINES = 4
MOST_STAGES = 4

MAX_DEVICES = 2**20
"""Maximum number of devices of a cluster that :func:`nodes_of` enumerates."""

Item = TypeVar("Item")


class GroupRow(NamedTuple):
    """A tensor-parallel group, or the part of it in one node."""

    text: str
    """Row of the drawing, aligned with blanks; the number left out in an abridged list."""
    where: str = ""
    """Coordinates, and the range of tp ranks if the group straddles nodes."""
    ranks: tuple[str, ...] = ()
    """Ranks in the order of tp, or one range of them; the number left out stands between them."""
    pp_rank: int | None = None
    """None: the row stands for rows that are left out."""


class NodeBox(NamedTuple):
    """A node and the groups in it."""

    title: str
    rows: tuple[GroupRow, ...]


class RankPlacement(NamedTuple):
    """The ranks of a mesh on their nodes, abridged to what fits a screen."""

    head: str
    boxes: tuple[NodeBox, ...]
    num_left_out: int
    """Nodes left out in the middle."""
    groups: tuple[str, ...]
    """Lines about the groups of each axis."""


def nodes_of(num_nodes: int, devices_per_node: int) -> list[str]:
    """Return the node name of each rank of a regular cluster:
    ``node0`` holds the first ``devices_per_node`` ranks.
    """
    num_devices = num_nodes * devices_per_node
    if num_devices > MAX_DEVICES:
        raise MeshError(
            "MW-MESH-007",
            f"{num_nodes:,} nodes of {devices_per_node:,} devices are {num_devices:,} devices, and"
            f" at most {MAX_DEVICES:,} are laid out: give fewer nodes",
        )
    return [f"node{rank // devices_per_node}" for rank in range(num_devices)]


def check_placement(
    grid: Grid,
    nodes: Sequence[str],
    *,
    tp_across_nodes: bool = False,
    ep_across_nodes: bool = False,
) -> None:
    """Check that no tp group and no ep group straddles nodes;
    ``nodes[rank]`` is the name of a rank's node.

    Raises:
        MeshError: a group straddles nodes (the first is named, and the mesh drawn), or ``nodes``
            has another length.
    """
    if len(nodes) != grid.size:
        raise MeshError(
            "MW-MESH-005",
            f"the mesh {grid} has {grid.size} ranks, the nodes have {len(nodes)}: "
            "change a degree or the number of processes so that both agree",
        )
    for ranks in [] if tp_across_nodes else _all_groups(grid, Axis.TP):
        nodes_used = list(dict.fromkeys(nodes[rank] for rank in ranks))
        if len(nodes_used) > 1:
            raise MeshError(
                "MW-MESH-006",
                f"the tensor-parallel group of ranks {ranks[0]}..{ranks[-1]} straddles the nodes"
                f" {', '.join(nodes_used)}: its traffic is in every layer and belongs inside a node."
                " Choose parallel.tp so that it divides the ranks of a node, or allow it with"
                f" --parallel.tp_across_nodes=true\n\n{draw_placement(grid, nodes)}",
            )
    for first in [] if ep_across_nodes else range(0, grid.size, grid.ep):
        nodes_used = list(dict.fromkeys(nodes[first : first + grid.ep]))
        if len(nodes_used) > 1:
            raise MeshError(
                "MW-MESH-018",
                f"the expert-parallel group of ranks {first}..{first + grid.ep - 1} straddles the"
                f" nodes {', '.join(nodes_used)}: every layer of experts exchanges tokens in it. Choose"
                " parallel.ep so that it divides the ranks of a node, or allow it with"
                f" --parallel.ep_across_nodes=true\n\n{draw_placement(grid, nodes)}",
            )


def _all_groups(grid: Grid, axis: Axis) -> list[tuple[int, ...]]:
    """Return all groups of an axis, by their first rank: a partition of the ranks."""
    firsts = (rank for rank in range(grid.size) if not grid.coordinates(rank).along(axis))
    return [grid.group(axis, rank) for rank in firsts]


def draw_placement(grid: Grid, nodes: Sequence[str]) -> str:
    """Draw the ranks of ``grid`` on their nodes, as text of many lines.

    Many nodes, replicas and pipeline ranks are abridged to the first and the last. A
    tensor-parallel group that straddles nodes is drawn in parts, with a remark.
    """
    head, shown, num_left_out, groups = place_ranks(grid, nodes)
    half = (len(shown) + 1) // 2 if num_left_out else len(shown)
    boxes = [_frame(box) for box in shown]
    lines = [head, "", *_side_by_side(boxes[:half])]
    if num_left_out:
        lines += [f"    ... {num_left_out:,} more nodes ...", *_side_by_side(boxes[half:])]
    wrapped = [
        textwrap.fill(line, WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
        for line in groups
    ]
    return "\n".join([*lines, "", *wrapped])


def place_ranks(grid: Grid, nodes: Sequence[str]) -> RankPlacement:
    """Return what a drawing of the ranks of ``grid`` on their nodes shows."""
    assert len(nodes) == grid.size, (len(nodes), grid)
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    names, sizes = list(ranks_of), sorted({len(ranks) for ranks in ranks_of.values()})
    head = (
        f"{grid} = {_count(grid.size, 'rank')} on {_count(len(names), 'node')} of"
        f" {' or '.join(map(str, sizes))}"
    )
    shown, num_left_out = _ends(names, MOST_BOXES)
    boxes = tuple(_box(grid, node, ranks_of[node]) for node in shown)
    groups = (
        *_tensor_parallel(grid, nodes),
        *_context_parallel(grid, nodes),
        *_expert_parallel(grid, nodes),
        *_data_parallel(grid, nodes),
        *_pipelines(grid, nodes),
    )
    return RankPlacement(head, boxes, num_left_out, groups)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _ends(items: Sequence[Item], most: int) -> tuple[list[Item], int]:
    """Return at most ``most`` of the items, from both ends, and the number left out between."""
    if len(items) <= most:
        return list(items), 0
    last = most // 2
    return [*items[: most - last], *items[len(items) - last :]], len(items) - most


def _with_gap(ends: list[Item], num_left_out: int, gap: Item) -> list[Item]:
    """Return the ends of a list with ``gap`` in the middle, if items are left out there."""
    middle = (len(ends) + 1) // 2
    return [*ends[:middle], gap, *ends[middle:]] if num_left_out else ends


def _elided(items: Sequence[str], most: int, what: str) -> list[str]:
    ends, num_left_out = _ends(items, most)
    return _with_gap(ends, num_left_out, f"... {num_left_out:,} more {what} ...")


def _box(grid: Grid, node: str, ranks: Sequence[int]) -> NodeBox:
    """Return a node with its ranks, a row per tensor-parallel group (or the part of it
    in this node).
    """
    groups: dict[Coordinates, list[int]] = {}
    for rank in ranks:
        groups.setdefault(replace(grid.coordinates(rank), tp_rank=0), []).append(rank)
    digits = len(str(ranks[-1]))
    rows: list[GroupRow] = []
    for at, members in groups.items():
        first, last = grid.coordinates(members[0]).tp_rank, grid.coordinates(members[-1]).tp_rank
        part = "" if len(members) == grid.tp else f"{first}-{last}" if last > first else f"{first}"
        row = " ".join(f"{rank:>{digits}}" for rank in members)
        chips = [str(rank) for rank in members]
        if len(row) > MOST_COLUMNS:
            row, chips = _span(members), _span_parts(members)
        cp = f" cp{_padded(at.cp_rank, grid.cp)}" if grid.cp > 1 else ""
        text = (
            f"pp{_padded(at.pp_rank, grid.pp)} dp{_padded(at.dp_rank, grid.dp)}{cp}  tp{part} "
            f" {row}"
        )
        where = (
            f"pp{at.pp_rank}"
            f" dp{at.dp_rank}{f' cp{at.cp_rank}' * (grid.cp > 1)}{f' tp{part}' * bool(part)}"
        )
        rows.append(GroupRow(text, where, tuple(chips), at.pp_rank))
    ends, num_left_out = _ends(rows, MOST_ROWS)
    title = f"{node}: rank{'s' * (len(ranks) > 1)} {_span(ranks)}"
    return NodeBox(
        title,
        tuple(_with_gap(ends, num_left_out, GroupRow(f"... {num_left_out:,} more groups ..."))),
    )


def _frame(box: NodeBox) -> list[str]:
    """Draw a node as lines of text."""
    title, rows = box.title, [row.text for row in box.rows]
    width = max(len(title), *map(len, rows))
    top = f"┌ {title} {'─' * (width - len(title))}┐"
    return [top, *(f"│ {row:<{width}} │" for row in rows), f"└{'─' * (width + 2)}┘"]


def _padded(number: int, count: int) -> str:
    return f"{number:<{len(str(count - 1))}}"


def _span(ranks: Sequence[int]) -> str:
    return " ".join(_span_parts(ranks))


def _span_parts(ranks: Sequence[int]) -> list[str]:
    """Return a range of neighbours as one text; otherwise a text for each rank, abridged."""
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    if whole and len(ranks) > 1:
        return [f"{ranks[0]}-{ranks[-1]}"]
    return _elided([str(rank) for rank in ranks], 8, "ranks")


def _side_by_side(boxes: Sequence[list[str]]) -> list[str]:
    """Lay out boxes in rows, as many as fit into the width."""
    lines: list[str] = []
    row: list[list[str]] = []
    for box in boxes:
        if row and sum(len(each[0]) + 1 for each in row) + len(box[0]) > WIDTH:
            lines += _joined(row)
            row = []
        row.append(box)
    return lines + _joined(row)


def _joined(row: Sequence[list[str]]) -> list[str]:
    height = max(map(len, row))
    padded = [box + [" " * len(box[0])] * (height - len(box)) for box in row]
    return [" ".join(parts).rstrip() for parts in zip(*padded, strict=True)]


def _num_nodes(ranks: Sequence[int], nodes: Sequence[str]) -> int:
    return len({nodes[rank] for rank in ranks})


def _tensor_parallel(grid: Grid, nodes: Sequence[str]) -> list[str]:
    if grid.tp == 1:
        return ["tensor parallel    off"]
    most = max(
        _num_nodes(grid.group(Axis.TP, rank), nodes) for rank in range(0, grid.size, grid.tp)
    )
    where = "each inside one node"
    if most > 1:
        where = f"ACROSS up to {most} nodes: slow, their traffic is in every layer"
    num_groups = _count(grid.size // grid.tp, "group")
    return [f"tensor parallel    {num_groups} of {grid.tp} neighbours, a row above; {where}"]


def _context_parallel(grid: Grid, nodes: Sequence[str]) -> list[str]:
    return [] if grid.cp == 1 else [f"context parallel   {_groups(grid, Axis.CP, nodes)}"]


def _expert_parallel(grid: Grid, nodes: Sequence[str]) -> list[str]:
    if grid.ep == 1:
        return []
    most = max(
        _num_nodes(range(first, first + grid.ep), nodes) for first in range(0, grid.size, grid.ep)
    )
    where = "each inside one node" if most == 1 else f"across up to {most:,} nodes"
    held = f"{_count(len(expert_replicas(grid, 0)), 'replica')} of each expert"
    return [
        f"expert parallel    {_count(grid.size // grid.ep, 'group')} of {grid.ep} neighbours,"
        f" {held}; {where}"
    ]


def _data_parallel(grid: Grid, nodes: Sequence[str]) -> list[str]:
    return [f"data parallel      {'off' if grid.dp == 1 else _groups(grid, Axis.DP, nodes)}"]


def _groups(grid: Grid, axis: Axis, nodes: Sequence[str]) -> str:
    groups = _all_groups(grid, axis)
    most = max(_num_nodes(group, nodes) for group in groups)
    where = "each inside one node" if most == 1 else f"across up to {most:,} nodes"
    example = " ".join(_elided([str(rank) for rank in groups[0]], 6, "ranks"))
    return f"{_count(len(groups), 'group')} of {grid.degree(axis):,}, as ranks {example}; {where}"


def _pipelines(grid: Grid, nodes: Sequence[str]) -> list[str]:
    if grid.pp == 1:
        return ["pipeline           off"]
    lines = [
        f"pipeline           {_count(grid.num_replicas, 'replica')} of {grid.pp} pipeline ranks,"
        " first to last:"
    ]
    replicas, num_left_out = _ends(range(grid.num_replicas), MOST_PIPELINES)
    paths = [_path(grid, nodes, *divmod(replica, grid.cp)) for replica in replicas]
    paths = _with_gap(paths, num_left_out, f"... {num_left_out:,} more replicas ...")
    return lines + [f"  {path}" for path in paths]


def _path(grid: Grid, nodes: Sequence[str], dp_rank: int, cp_rank: int) -> str:
    """Draw the pipeline of one replica: the ranks of each pipeline rank and their node."""
    stops: list[str] = []
    for pp_rank in range(grid.pp):
        ranks = grid.group(
            Axis.TP, grid.rank(Coordinates(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank))
        )
        stops.append(f"{nodes[ranks[0]]} [{_span(ranks)}]")
    cp = f" cp{_padded(cp_rank, grid.cp)}" if grid.cp > 1 else ""
    return (
        f"dp{_padded(dp_rank, grid.dp)}{cp} "
        f" {' → '.join(_elided(stops, MOST_STAGES, 'on the way'))}"
    )
