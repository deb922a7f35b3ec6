"""Groups of expert parallelism, and the rows that a fake one has."""

from __future__ import annotations

import torch

from meshwright.mesh import expert_group, expert_replicas
from meshwright.mesh.fake import fake_mesh
from meshwright.mesh.grid import Grid


def test_groups_of_the_grid() -> None:
    grid = Grid(pp=2, dp=2, tp=2, cp=2, ep=4)
    assert str(grid) == "pp 2 x dp 2 x cp 2 x tp 2, ep 4" and grid.size == 16
    assert expert_group(grid, 6) == (4, 5, 6, 7) and expert_group(grid, 9) == (8, 9, 10, 11)
    assert expert_replicas(grid, 6) == (2, 6) and expert_replicas(grid, 9) == (9, 13)
    groups = {expert_group(grid, rank) for rank in range(grid.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))


def test_a_fake_group_shares_rows_out_evenly() -> None:
    with fake_mesh(Grid(dp=4, ep=4), 1) as mesh:
        assert mesh.ep.ranks == (0, 1, 2, 3) and mesh.expert_replicas.ranks == (1,)
        assert mesh.ep.host_counts(torch.zeros(2, 4), 10) == [[3, 3, 2, 2]] * 2
