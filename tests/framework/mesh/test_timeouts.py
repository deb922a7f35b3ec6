"""Each group gives up after the time that the run asks for."""

from __future__ import annotations

import torch

from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright_launch.pool import RankPool


def limits_of_groups(rank: int, world_size: int) -> dict[str, float]:
    mesh = open_mesh(Grid(pp=2, dp=2), "cpu", timeout_s=77.0)
    groups = [mesh.pp, mesh.replicas, mesh.stage_group([0, 1])]
    found = {}
    for group in groups:
        assert group.process_group is not None
        backend = group.process_group._get_backend(torch.device("cpu"))
        found[group.name] = backend.options._timeout.total_seconds()  # type: ignore[attr-defined]
    return found


def test_groups_of_the_axes_keep_the_limit_of_the_run(pool: RankPool) -> None:
    """torch gives the groups of a DeviceMesh a limit of its own, half an hour with gloo."""
    assert pool.run(limits_of_groups, 4) == [{"pp": 77.0, "dp": 77.0, "tied": 77.0}] * 4
