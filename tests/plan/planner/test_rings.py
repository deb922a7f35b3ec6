"""Rings of a hardware file: rates by length in a plan, and their measurement by the ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright_launch.pool import RankPool
from meshwright_plan.planner.hardware import Ring, read_hardware
from meshwright_plan.planner.links import ring_link
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.rings import check_nodes, lengths, measure_rings

RINGS = [
    Ring(size=2, bytes_per_s=8e9, latency_s=1e-5),
    Ring(size=8, bytes_per_s=4e9, latency_s=3e-5),
    Ring(size=128, bytes_per_s=1e9, latency_s=5e-5),
]


def test_rates_between_measured_lengths() -> None:
    """Seconds per byte are linear in the logarithm of the length; beyond the longest the rate stays."""
    assert ring_link(RINGS, 2) == RINGS[0] and ring_link(RINGS, 8).bytes_per_s == pytest.approx(4e9)
    assert ring_link(RINGS, 4).bytes_per_s == pytest.approx(1 / (0.5 / 8e9 + 0.5 / 4e9))
    assert ring_link(RINGS, 32).latency_s == pytest.approx(4e-5)
    assert ring_link(RINGS, 1024) == RINGS[-1]


def seconds(size: int, stride: int, **rings: list[Ring]) -> float:
    hardware = read_hardware("h100").model_copy(update=rings)
    return PerformanceModel.of(hardware).group_link(size, stride).seconds(1e9, kind="all_reduce")


def test_longer_rings_across_nodes_are_slower() -> None:
    """One rank of each node; several of a node use the link of each."""
    assert seconds(2, 8, cluster_rings=RINGS) == pytest.approx(1e9 / 8e9, rel=0.01)
    assert seconds(128, 8, cluster_rings=RINGS) == pytest.approx(1e9 / 1e9, rel=0.01)
    assert seconds(512, 2, cluster_rings=RINGS) == pytest.approx(1e9 / 4e9, rel=0.05)
    assert seconds(2, 8) < seconds(2, 8, cluster_rings=RINGS), "without rings: the file's link, whatever the length"
    assert seconds(2, 8) == pytest.approx(seconds(1024, 8), rel=0.1)


def test_rings_inside_a_node() -> None:
    assert seconds(8, 1, node_rings=RINGS[:2]) == pytest.approx(1e9 / 4e9, rel=0.01)
    assert seconds(2, 1, node_rings=RINGS[:2]) == pytest.approx(1e9 / 8e9, rel=0.01)
    assert seconds(16, 8, node_rings=RINGS[:2]) == seconds(16, 8), "one rank of each node has no ring inside"


def test_messages_of_a_cpu_follow_the_rings() -> None:
    """Links by kind were measured between as many ranks as cores."""
    update: dict[str, Any] = {"messages": {"all_reduce": RINGS[1], "send": RINGS[1]}, "processors": 8, "kind": "cpu"}
    hardware = read_hardware("h100").model_copy(update=update | {"node_rings": RINGS[:2]})
    link = PerformanceModel.of(hardware).group_link(2, 1)
    assert link.seconds(1e9, kind="all_reduce") == pytest.approx(1e9 / 8e9, rel=0.01)
    assert link.seconds(1e9, kind="send") == pytest.approx(1e9 / 4e9, rel=0.01)


@pytest.mark.parametrize(
    ("number", "expected"), [(1, []), (2, [2]), (5, [5]), (6, [2, 3, 6]), (8, [2, 4, 8]), (9, [9]), (128, [2, 64, 128])]
)
def test_lengths(number: int, expected: list[int]) -> None:
    assert lengths(number) == expected


def test_nodes_are_alike() -> None:
    assert check_nodes(["a", "a", "b", "b"]) == 2
    for names in (["a"], ["a", "a", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(UserError, match=r"MW-PLANNER-00[89]"):
            check_nodes(names)


def rings_of(rank: int, world_size: int, ranks_per_node: int) -> dict[str, Any]:
    return {name: [ring.size for ring in rings] for name, rings in measure_rings("cpu", world_size, 2).items()}


def test_all_ranks_measure_all_lengths(pool: RankPool) -> None:
    """Four ranks as two nodes of two."""
    found = pool.run(rings_of, 4, 2)
    assert found == [{"node_rings": [2], "cluster_rings": [2]}] * 4


@pytest.mark.long
def test_the_command_adds_rings_to_a_file(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "meshwright_launch"]
    words += ["calibrate", "--rings", "--cluster", "h100", "--out", str(tmp_path / "mine.toml")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert "all-reduce over 4 ranks of a node" in done.stdout
    found, known = read_hardware(str(tmp_path / "mine.toml")), read_hardware("h100")
    assert [ring.size for ring in found.node_rings] == [2, 4]
    assert found.model_copy(update={"node_rings": []}) == known
