"""Price of the mirror in host memory (``watch.mirror``): memory of a node, and seconds beside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.blueprint import Blueprint
from meshwright.run.mirror_size import mirror_bytes, mirror_size
from meshwright.terminal.format import format_size
from meshwright_plan.planner.hardware import Hardware


class MirrorLinks(NamedTuple):
    """Rates of what a mirror goes through, per device, and the host memory of a node."""

    host_bytes_per_s: float
    cluster_bytes_per_s: float
    node_memory_bytes: int

    @staticmethod
    def of(hardware: Hardware) -> MirrorLinks:
        """Return those of a cluster."""
        between = hardware.cluster_send or hardware.cluster_link
        return MirrorLinks(
            hardware.host_link.bytes_per_s, between.bytes_per_s, hardware.host_memory_bytes
        )


def mirror_lines(
    blueprint: Blueprint,
    nodes: Sequence[str],
    links: MirrorLinks | None = None,
    step_s: float = 0.0,
) -> list[str]:
    """Return lines on the mirror of a run; none without ``watch.mirror``.

    Args:
        nodes: name of the node of each rank.
        links: None: no seconds are known.
        step_s: predicted seconds of a step.
    """
    if not blueprint.config.watch.mirror:
        return []
    size = mirror_size(blueprint, nodes)
    held, sent = max(size.held.values()), max(size.sent)
    of_node = f" of {format_size(links.node_memory_bytes)}" if links is not None else ""
    of_whom = "its ranks'" if len(size.held) == 1 else "its ranks' and those of the node before"
    first = f"the last two steps: {format_size(round(held))}{of_node} of a node's memory, {of_whom}"
    if links is None:
        more = f"; a rank sends {format_size(round(sent))} in a step" if sent else ""
        return [first + more]
    copied_s = max(each.changing for each in mirror_bytes(blueprint)) / links.host_bytes_per_s
    sent_s = sent / links.cluster_bytes_per_s
    is_hidden = copied_s + sent_s <= step_s
    how = "hidden behind" if is_hidden else "longer than"
    to_next = f", {format_size(round(sent))} to the next node in {sent_s:.2g} s" if sent else ""
    waits = "" if is_hidden else ", which waits for it"
    lines = [
        first,
        f"each step a rank copies to the host in {copied_s:.2g} s{to_next}:",
        f"{how} a step of {step_s:.3g} s{waits}, on links that are free",
    ]
    if held > links.node_memory_bytes:
        lines.append("the memory of a node is too small for it")
    return lines
