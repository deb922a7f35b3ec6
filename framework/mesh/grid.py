"""The grid of ranks, pp x dp x tp with tp innermost: pure arithmetic, so that it runs for 16,384 ranks on a laptop.

rank = (pp_rank x dp + dp_rank) x tp + tp_rank

  pp=2 dp=2 tp=2 on 2 nodes of 4         a tp group is a run of neighbours and stays inside a node;
  node 0   | 0 1 | 2 3 |   pp_rank 0     its stage's replicas come next; the next pipeline rank is
  node 1   | 4 5 | 6 7 |   pp_rank 1     the farthest away: it sends the least.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from meshwright.errors import MeshError


class Axis(StrEnum):
    """Parallelism axes, outermost first."""

    PP = "pp"
    DP = "dp"
    TP = "tp"


class Coordinates(NamedTuple):
    """Coordinates of a rank on each axis."""

    pp_rank: int
    dp_rank: int
    tp_rank: int


class Grid(NamedTuple):
    """Degree of each axis. Ranks, coordinates and groups are derived from it."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        return (at.pp_rank * self.dp + at.dp_rank) * self.tp + at.tp_rank

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank, the inverse of :meth:`rank`."""
        assert 0 <= rank < self.size, (rank, self.size)
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(pp_rank, dp_rank, tp_rank)

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return {Axis.PP: self.pp, Axis.DP: self.dp, Axis.TP: self.tp}[axis]

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, in the order of that axis; contains
        ``rank``."""
        at = self.coordinates(rank)
        field = f"{axis}_rank"
        return tuple(self.rank(at._replace(**{field: i})) for i in range(self.degree(axis)))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return all groups of an axis, by their first rank: a partition of the ranks."""
        return sorted({self.group(axis, rank) for rank in range(self.size)})


def check_placement(grid: Grid, nodes: list[str], *, tp_across_nodes: bool = False) -> None:
    """Check that no tp group straddles nodes; raise :class:`MeshError` with the drawn mesh otherwise.
    ``nodes[rank]`` is the name of the rank's node."""
    if len(nodes) != grid.size:
        raise MeshError(
            "MW-MESH-005",
            f"the mesh pp={grid.pp} x dp={grid.dp} x tp={grid.tp} has {grid.size} ranks, the nodes have {len(nodes)}: "
            f"change a degree or the number of processes so that both agree",
        )
    if tp_across_nodes:
        return
    for ranks in grid.groups(Axis.TP):
        found = list(dict.fromkeys(nodes[rank] for rank in ranks))
        if len(found) > 1:
            from meshwright.mesh.view import draw

            raise MeshError(
                "MW-MESH-006",
                f"the tensor-parallel group of ranks {ranks[0]}..{ranks[-1]} straddles the nodes {', '.join(found)}: "
                f"its traffic is in every layer and belongs inside a node. Choose parallel.tp so that it divides the "
                f"ranks of a node, or allow it with --parallel.tp_across_nodes=true\n\n{draw(grid, nodes)}",
            )


MOST_DEVICES = 2**20
"""Most devices of a cluster that are enumerated."""


def nodes_of(num_nodes: int, devices_per_node: int) -> list[str]:
    """Return the node name of each rank of a regular cluster: ``node0`` holds the first ``devices_per_node`` ranks.

    Raises:
        MeshError: more than MOST_DEVICES of them.
    """
    if num_nodes * devices_per_node > MOST_DEVICES:
        raise MeshError(
            "MW-MESH-007",
            f"{num_nodes:,} nodes of {devices_per_node:,} devices are {num_nodes * devices_per_node:,} devices, and at "
            f"most {MOST_DEVICES:,} are laid out: give fewer nodes",
        )
    return [f"node{rank // devices_per_node}" for rank in range(num_nodes * devices_per_node)]
