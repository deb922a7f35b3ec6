"""Rings of a hardware file: rates by length in a plan."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright_plan.planner.hardware import Ring, read_hardware
from meshwright_plan.planner.links import ring_link
from meshwright_plan.planner.rates import PerformanceModel

RINGS = [
    Ring(size=2, bytes_per_s=8e9, latency_s=1e-5),
    Ring(size=8, bytes_per_s=4e9, latency_s=3e-5),
    Ring(size=128, bytes_per_s=1e9, latency_s=5e-5),
]


def test_rates_between_measured_lengths() -> None:
    """Seconds per byte are linear in the logarithm of the length;
    beyond the longest the rate stays.
    """
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
    assert seconds(2, 8) < seconds(2, 8, cluster_rings=RINGS), (
        "without rings: the file's link, whatever the length"
    )
    assert seconds(2, 8) == pytest.approx(seconds(1024, 8), rel=0.1)


def test_rings_inside_a_node() -> None:
    assert seconds(8, 1, node_rings=RINGS[:2]) == pytest.approx(1e9 / 4e9, rel=0.01)
    assert seconds(2, 1, node_rings=RINGS[:2]) == pytest.approx(1e9 / 8e9, rel=0.01)
    assert seconds(16, 8, node_rings=RINGS[:2]) == seconds(16, 8), (
        "one rank of each node has no ring inside"
    )


def test_messages_of_a_cpu_follow_the_rings() -> None:
    """Links by kind were measured between as many ranks as cores."""
    update: dict[str, Any] = {
        "messages": {"all_reduce": RINGS[1], "send": RINGS[1]},
        "processors": 8,
        "kind": "cpu",
    }
    hardware = read_hardware("h100").model_copy(update=update | {"node_rings": RINGS[:2]})
    link = PerformanceModel.of(hardware).group_link(2, 1)
    assert link.seconds(1e9, kind="all_reduce") == pytest.approx(1e9 / 8e9, rel=0.01)
    assert link.seconds(1e9, kind="send") == pytest.approx(1e9 / 4e9, rel=0.01)
