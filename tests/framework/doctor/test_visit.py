"""The visit itself, on ranks of this machine."""

from __future__ import annotations

import contextlib
import io
import tomllib
from pathlib import Path

from meshwright.config import RunConfig
from meshwright.doctor.rank import UnfitMachineError, expected_of, run_rank
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import layout, run_config
from tests.support.errors import raises


def visit(rank: int, world_size: int, config: RunConfig) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_rank(config)
    return said.getvalue()


def test_all_is_well(tmp_path: Path, pool: RankPool) -> None:
    """One machine: links inside it, an all-reduce of each axis."""
    config = run_config(tmp_path, tmp_path, parallel=layout("dp2,tp2"))
    first, *others = pool.run(visit, 4, config, timeout_s=120)
    assert "nothing is wrong" in first and others == ["", "", ""]
    assert "\ntp          0-1" in first and "\ndp          0 2" in first
    assert "\ngradients in buckets of " in first
    figures = tomllib.loads((tmp_path / "run" / "links.toml").read_text())
    assert figures["in_node"]["bytes_per_s"] > 1e7 and 0 < figures["in_node"]["latency_s"] < 1
    assert (tmp_path / "run" / "bad-nodes").read_text() == ""
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["bad-nodes", "links.toml"]


def test_what_is_wrong_is_an_error_of_rank_0(tmp_path: Path, pool: RankPool) -> None:
    """A directory in which nobody can write."""
    config = run_config(tmp_path, Path("/proc/self"), parallel=layout("dp2"), run={"name": "fd"})
    with raises("MW-DOCTOR-002") as caught:
        pool.run(visit, 2, config, timeout_s=120)
    assert isinstance(caught.value.__cause__, UnfitMachineError) and caught.value.rank == 0


def test_what_a_cluster_is_said_to_have(tmp_path: Path) -> None:
    place = tmp_path / "cluster.toml"
    place.write_text("[across_nodes]\nbytes_per_s = 25e9\n")
    assert expected_of(place) == 25e9
    place.write_text("[in_node]\n")
    assert expected_of(place) is None
    place.write_text("[")
    with raises("MW-DOCTOR-003", "cluster.toml"):
        expected_of(place)
