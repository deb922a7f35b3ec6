"""Spread of groups over nodes: equal to a count over all ranks of a job,
and what it does to predicted times.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_plan.planner.experts import exchange_s
from meshwright_plan.planner.hardware import Ring, read_hardware
from meshwright_plan.planner.layer_profile import GroupMessages
from meshwright_plan.planner.links import Spread, leaves_node, spread_of
from meshwright_plan.planner.rates import PerformanceModel


def counted(size: int, stride: int, linked: int, num_ranks: int) -> Spread:
    """Spread of all groups, rank by rank."""
    fewest, nodes = size, 1
    for start in range(0, num_ranks, size * stride):
        for offset in range(stride):
            members = Counter((start + offset + index * stride) // linked for index in range(size))
            if len(members) > 1:
                fewest, nodes = min(fewest, *members.values()), max(nodes, len(members))
    return Spread(fewest, nodes)


@given(
    size=st.integers(1, 20),
    stride=st.integers(1, 12),
    linked=st.sampled_from([1, 2, 3, 4, 6, 8, 16, 72]),
    groups=st.integers(1, 20),
)
def test_every_group_is_counted(size: int, stride: int, linked: int, groups: int) -> None:
    num_ranks = size * stride * groups
    assert spread_of(size, stride, linked, num_ranks) == counted(size, stride, linked, num_ranks)


@given(
    source=st.integers(0, 40),
    shift=st.integers(0, 40),
    ranks=st.integers(1, 30),
    linked=st.integers(1, 16),
)
def test_every_message_of_a_stage_is_counted(
    source: int, shift: int, ranks: int, linked: int
) -> None:
    expected = any((source + i) // linked != (source + shift + i) // linked for i in range(ranks))
    assert leaves_node(source, source + shift, ranks, linked) == expected


@pytest.mark.parametrize(
    ("cluster", "size", "stride", "adapters"),
    [
        ("h100", 8, 1, None),
        ("h100", 3, 2, 1),
        ("h100", 12, 1, 4),
        ("h100", 24, 1, 8),
        ("gb200", 16, 4, 2),
    ],
)
def test_a_ring_has_the_adapters_of_its_emptiest_node(
    cluster: str, size: int, stride: int, adapters: Any
) -> None:
    performance = PerformanceModel.of(read_hardware(cluster))
    hardware, fractions = performance.hardware, performance.fractions
    within = hardware.node_link.bytes_per_s * fractions.node_link
    across = hardware.cluster_link.bytes_per_s * fractions.cluster_link * (adapters or 0)
    found = performance.group_link(size, stride)
    assert found.bytes_per_s == pytest.approx(within if adapters is None else min(within, across))


def test_a_job_in_one_domain_leaves_it_nowhere() -> None:
    performance = PerformanceModel.of(read_hardware("gb200"))
    assert performance.hardware.linked_devices == 72
    assert (
        performance._replace(num_ranks=64).group_link(16, 1).bytes_per_s
        > performance.group_link(16, 1).bytes_per_s
    )


@pytest.mark.parametrize(
    ("nodes", "linked"),
    [(1, 4), (16, 64), (18, 72), (19, 40), (36, 72), (54, 72), (64, 64), (65, 68), (2048, 72)],
)
def test_nodes_of_a_job_are_spread_evenly_over_domains(nodes: int, linked: int) -> None:
    gb200, h100 = (PerformanceModel.of(read_hardware(name)) for name in ("gb200", "h100"))
    assert gb200._replace(num_ranks=4 * nodes).linked_ranks == linked
    assert h100._replace(num_ranks=8 * nodes).linked_ranks == 8


def test_experts_of_64_ranks_stay_in_their_domain() -> None:
    """DeepSeek-V3 on 256 GB200 takes 16 nodes of each NVL72.
    With whole domains every second group straddles two.
    """
    performance = PerformanceModel.of(read_hardware("gb200"))
    message = GroupMessages("all_to_all", 1, 2**30, "ep")
    within = exchange_s(performance._replace(num_ranks=64), 64, [message])
    assert exchange_s(performance._replace(num_ranks=256), 64, [message]) == within
    # four whole domains
    assert exchange_s(performance._replace(num_ranks=288), 32, [message]) > 3 * within


def test_experts_of_a_group_that_crosses_nodes_send_most_rows_away() -> None:
    performance = PerformanceModel.of(read_hardware("h100"))
    message = GroupMessages("all_to_all", 1, 2**30, "ep")
    within, across = exchange_s(performance, 4, [message]), exchange_s(performance, 6, [message])
    assert across > 3 * within  # ranks 6 to 11: two on one node, four on the next


def test_measured_rings_replace_the_links_of_experts_and_their_latency_is_counted_once() -> None:
    h100 = read_hardware("h100")
    slow = Ring(size=2, bytes_per_s=1e9, latency_s=1e-5)
    measured = PerformanceModel.of(
        h100.model_copy(update={"node_rings": [slow], "cluster_rings": [slow]})
    )
    message = GroupMessages("all_to_all", 1, 2**30, "ep")
    assert exchange_s(measured, 8, [message]) == pytest.approx(2**30 / 1e9, rel=1e-3)
    assert exchange_s(measured, 16, [message]) > 20 * exchange_s(
        PerformanceModel.of(h100), 16, [message]
    )
    assert measured.group_link(2, 1).seconds(0.0, 1, "all_gather") == pytest.approx(1e-5)
    assert measured.group_link(2, 8).seconds(0.0, 1, "all_gather") == pytest.approx(2e-5)
