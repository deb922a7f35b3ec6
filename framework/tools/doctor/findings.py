"""Faults that would end a run or slow down all ranks, and the nodes to leave out. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.tools.doctor.facts import Facts
from meshwright.tools.doctor.links import LinkMeasurement, by_node, slow_pairs
from meshwright.tools.doctor.nodes import unseen, wrong_clocks

SLOW = 0.5
"""Share of the usual rate on this cluster below which a node or link is reported."""
EXPECTED = 0.8
"""Share of the rate in the cluster file below which a node is reported."""
CLOCK_S = 1.0


class Finding(NamedTuple):
    """Fault found by the check."""

    text: str
    nodes: tuple[str, ...] = ()
    """Nodes that a job should leave out because of it."""


def judge(
    facts: Sequence[Facts], links: Sequence[LinkMeasurement], *, expected_bytes_per_s: float | None = None
) -> list[Finding]:
    """Return all faults, the worst first. ``expected_bytes_per_s``: expected rate of a link across nodes."""
    return [*_disk(facts), *_clocks(facts), *_versions(facts), *_links(links, expected_bytes_per_s)]


def _disk(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    blind = [each.host for each in facts if not each.sees_directory]
    if blind:
        found.append(Finding(unseen(blind)))
    for each in facts:
        if each.disk_problem is not None:
            found.append(Finding(f"{each.host} cannot write into the run's directory: {each.disk_problem}"))
    return found


def _clocks(facts: Sequence[Facts]) -> list[Finding]:
    ahead_s = {each.host: each.clock_s for each in facts}
    return [Finding(*wrong) for wrong in wrong_clocks(ahead_s, CLOCK_S)]


def _versions(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for index, (name, _) in enumerate(facts[0].versions):
        seen = Counter(each.versions[index][1] for each in facts)
        if len(seen) > 1:
            usual = seen.most_common(1)[0][0]
            others = {each.host: each.versions[index][1] for each in facts if each.versions[index][1] != usual}
            told = ", ".join(f"{version} on {host}" for host, version in others.items())
            found.append(Finding(f"{name} is {usual}, but {told}", tuple(others)))
    devices = Counter(each.device for each in facts)
    if len(devices) > 1:
        usual = devices.most_common(1)[0][0]
        others = {each.host: each.device for each in facts if each.device != usual}
        told = ", ".join(f"{device} on {host}" for host, device in others.items())
        found.append(Finding(f"the devices are {usual}, but {told}", tuple(others)))
    return found


def _links(links: Sequence[LinkMeasurement], expected: float | None) -> list[Finding]:
    best, found = by_node(links), []
    named: set[str] = set()
    for node, rate in sorted(best.items(), key=lambda each: each[1]):
        others = [other for name, other in best.items() if name != node]
        usual = statistics.median(others)
        if len(best) > 2 and rate < SLOW * usual:
            found.append(
                Finding(f"the link of {node} is slow: {gbit(rate)}, others reach {gbit(usual)}", (node,)),
            )
            named.add(node)
        elif expected is not None and rate < EXPECTED * expected:
            found.append(
                Finding(f"the link of {node} is slow: {gbit(rate)}, and it is said to have {gbit(expected)}", (node,)),
            )
            named.add(node)
    for link in slow_pairs(links, SLOW):
        if not named & set(link.nodes):
            found.append(
                Finding(
                    f"between {link.nodes[0]} and {link.nodes[1]} there is {gbit(link.bytes_per_s)}, while both reach "
                    f"more with others: look at the switches between them",
                )
            )
    return found


def gbit(bytes_per_s: float) -> str:
    """Format a rate as ``0.957 Gbit/s``."""
    return f"{8 * bytes_per_s / 1e9:.3g} Gbit/s"
