"""Groups of context parallelism on the ranks of the grid."""

from __future__ import annotations

import torch

from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright_launch.pool import RankPool


def groups(rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    mesh = open_mesh(Grid(pp=1, dp=2, tp=2, cp=2), "cpu")
    found = []
    for group in (mesh.replicas, mesh.cp, mesh.tp):
        members = torch.zeros(group.size, dtype=torch.int64)
        group.all_gather(members, torch.tensor([rank])).wait()
        found.append(tuple(members.tolist()))
    close_mesh(mesh)
    return tuple(found)


def test_groups_reach_the_ranks_of_the_grid(pool: RankPool) -> None:
    found = pool.run(groups, 8)
    for rank in range(8):
        replicas = tuple(range(rank % 2, 8, 2))
        cp = tuple(sorted({rank, rank ^ 2}))
        assert found[rank] == (replicas, cp, (rank - rank % 2, rank - rank % 2 + 1))
