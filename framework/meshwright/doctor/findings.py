"""Faults that would end a run or slow down all ranks, and the nodes to leave out.
Pure functions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.doctor.facts import Facts
from meshwright.doctor.links import LinkMeasurement, by_node, slow_pairs
from meshwright.doctor.nodes import unshared_directory, wrong_clocks

SLOW = 0.5
"""Share below which a rate is reported: a node's of the other nodes' median,
a link's of its two nodes' best.
"""
EXPECTED = 0.8
"""Share of the rate in the cluster file below which a node is reported."""
CLOCK_S = 1.0


class Finding(NamedTuple):
    """Fault found by the check."""

    text: str
    nodes: tuple[str, ...] = ()
    """Nodes that a job should leave out because of it."""


def judge(
    facts: Sequence[Facts],
    links: Sequence[LinkMeasurement],
    *,
    expected_bytes_per_s: float | None = None,
) -> list[Finding]:
    """Return all faults, the worst first. ``expected_bytes_per_s``:
    expected rate of a link across nodes.
    """
    return [*_disk(facts), *_clocks(facts), *_versions(facts), *_links(links, expected_bytes_per_s)]


def _disk(facts: Sequence[Facts]) -> list[Finding]:
    unshared = [each.host for each in facts if not each.sees_directory]
    return [
        *([Finding(unshared_directory(unshared))] if unshared else []),
        *(
            Finding(f"{each.host} cannot write into the run's directory: {each.disk_problem}")
            for each in facts
            if each.disk_problem is not None
        ),
    ]


def _clocks(facts: Sequence[Facts]) -> list[Finding]:
    ahead_s = {each.host: each.clock_s for each in facts}
    return [Finding(*wrong) for wrong in wrong_clocks(ahead_s, CLOCK_S)]


def _versions(facts: Sequence[Facts]) -> list[Finding]:
    columns = [
        (f"{name} is", [each.versions[index][1] for each in facts])
        for index, (name, _) in enumerate(facts[0].versions)
    ]
    columns.append(("the devices are", [each.device for each in facts]))
    findings = []
    for name, values in columns:
        usual = Counter(values).most_common(1)[0][0]
        others = {
            each.host: value for each, value in zip(facts, values, strict=True) if value != usual
        }
        if others:
            listed = ", ".join(f"{value} on {host}" for host, value in others.items())
            findings.append(Finding(f"{name} {usual}, but {listed}", tuple(others)))
    return findings


def _links(links: Sequence[LinkMeasurement], expected: float | None) -> list[Finding]:
    best = by_node(links)
    slow: dict[str, Finding] = {}
    for node, rate in sorted(best.items(), key=lambda each: each[1]):
        usual = statistics.median(other for name, other in best.items() if name != node)
        if len(best) > 2 and rate < SLOW * usual:
            comparison = f"others reach {gbit(usual)}"
        elif expected is not None and rate < EXPECTED * expected:
            comparison = f"the cluster file has {gbit(expected)}"
        else:
            continue
        slow[node] = Finding(f"the link of {node} is slow: {gbit(rate)}, {comparison}", (node,))
    pairs = [
        Finding(
            f"between {link.nodes[0]} and {link.nodes[1]} there is {gbit(link.bytes_per_s)}, while"
            " both reach more with others: look at the switches between them"
        )
        for link in slow_pairs(links, SLOW)
        if not slow.keys() & set(link.nodes)
    ]
    return [*slow.values(), *pairs]


def gbit(bytes_per_s: float) -> str:
    """Format a rate as ``0.957 Gbit/s``."""
    return f"{8 * bytes_per_s / 1e9:.3g} Gbit/s"
