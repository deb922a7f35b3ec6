"""A run over several nodes is refused where they do not share its directory, or the time."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest

from meshwright.doctor.nodes import check_nodes, wrong_clocks
from meshwright.errors import ConfigError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright_launch.pool import RankPool

HOUR_S = 3600.0


def refused(
    rank: int, world_size: int, directories: list[Path], ahead_s: list[float], num_nodes: int
) -> str:
    """What a rank is told whose node sees that directory and whose clock is so far ahead;
    "" when it may go on.
    """
    mesh = open_mesh(Grid(pp=world_size), "cpu")
    mesh.nodes[:] = [f"n{each % num_nodes}" for each in range(world_size)]
    now = time.time
    with mock.patch("time.time", lambda: now() + ahead_s[rank]):
        try:
            check_nodes(mesh, directories[rank])
        except ConfigError as error:
            return str(error)
        finally:
            close_mesh(mesh)
    return ""


def answers(
    pool: RankPool, directories: list[Path], ahead_s: list[float], num_nodes: int = 3
) -> list[str]:
    found: list[str] = pool.run(refused, 3, directories, ahead_s, num_nodes)
    assert not [
        left for directory in set(directories) if directory.exists() for left in directory.iterdir()
    ]
    return found


def test_nodes_that_share_both(pool: RankPool, tmp_path: Path) -> None:
    assert answers(pool, [tmp_path] * 3, [0.0, 5.0, -5.0]) == [""] * 3


def test_a_directory_of_a_nodes_own(pool: RankPool, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    told = answers(pool, [shared, own, shared], [0.0] * 3)
    assert len(set(told)) == 1 and told[0].startswith(
        "n1 does not see the run's directory as rank 0 does: run.dir"
    )
    assert answers(pool, [shared, own, tmp_path / "none"], [0.0] * 3)[2].startswith(
        "n1 and n2 do not see"
    )


def test_a_clock_that_is_an_hour_off(pool: RankPool, tmp_path: Path) -> None:
    told = answers(pool, [tmp_path] * 3, [0.0, 0.0, HOUR_S])
    assert (
        len(set(told)) == 1
        and told[0].startswith("the clock of n2 is 3,600.")
        and "ahead of the others'" in told[0]
    )
    told = answers(pool, [tmp_path] * 3, [-HOUR_S, 0.0, 0.0])
    assert (
        len(set(told)) == 1
        and told[0].startswith("the clock of n0 is 3,600.")
        and "behind the others'" in told[0]
    )


def test_one_node_has_one_clock_and_one_disk(pool: RankPool, tmp_path: Path) -> None:
    assert answers(pool, [tmp_path] * 3, [0.0, 0.0, HOUR_S], num_nodes=1) == [""] * 3


@pytest.mark.parametrize("off_s", [3.0, -3.0])
def test_of_two_clocks_none_is_in_the_middle(off_s: float) -> None:
    (found,) = wrong_clocks({"a": 0.0, "b": off_s}, 2.0)
    assert found == ("the clocks of a and b are 3.0 s apart: set them (NTP)", ())
    assert not wrong_clocks({"a": 0.0, "b": off_s}, 4.0)
