"""Expert-parallel groups: pure arithmetic on the grid.

A stage's ranks are neighbours over tp, then cp, then dp. Each ep consecutive ones hold all experts
of a layer together.
"""

from __future__ import annotations

from meshwright.mesh.grid import Grid


def expert_group(grid: Grid, rank: int) -> tuple[int, ...]:
    """Return the ep ranks over which a layer's experts are distributed, in order;
    contains ``rank``.
    """
    first = rank - rank % grid.ep  # ep divides the ranks of a stage
    return tuple(range(first, first + grid.ep))


def expert_replicas(grid: Grid, rank: int) -> tuple[int, ...]:
    """Return the dp x cp x tp / ep ranks that hold the same experts as ``rank``, in order;
    contains ``rank``.
    """
    of_stage = grid.num_replicas * grid.tp
    first = rank - rank % of_stage
    return tuple(range(first + rank % grid.ep, first + of_stage, grid.ep))
