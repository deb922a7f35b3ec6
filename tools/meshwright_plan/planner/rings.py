"""Rates of all-reduces by the length of their ring, measured by all ranks of a job at once: how a network congests.

    node_rings      rings of neighbouring ranks of a node            2, half, all of its ranks
    cluster_rings   rings of one rank per node, of equal local rank  2, half, all of the nodes

All rings of one length run at once, as gradient all-reduces do in training. Each length is measured with two messages:
a small one gives the latency of a hop, a large one the rate.
"""

from __future__ import annotations

import time
from statistics import median_high
from typing import Literal

import torch

from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import open_mesh
from meshwright_plan.planner.hardware import Ring
from meshwright_plan.planner.links import rounds

Rings = dict[Literal["node_rings", "cluster_rings"], list[Ring]]
SMALL, LARGE = 2**12, {"cpu": 2**19, "cuda": 2**26}
"""Elements of the two messages, float32; the larger one by type of device."""
REPEATS, MESSAGES = 5, 10


def lengths(number: int) -> list[int]:
    """Return the lengths that are measured among ``number`` ranks or nodes: 2, half and all, if they divide it."""
    return sorted({each for each in (2, number // 2, number) if each > 1 and number % each == 0})


def measure_ring(group: Group, device: torch.device) -> Ring:
    """Measure all-reduces over ``group``. Collective and blocking; the other groups of its axis measure meanwhile."""

    def seconds(elements: int) -> float:
        whole, found = torch.zeros(elements, device=device), []
        for repeat in range(REPEATS + 1):  # the first warms up
            group.barrier()
            start_s = time.perf_counter()
            for _ in range(MESSAGES):
                group.all_reduce(whole).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found += [(time.perf_counter() - start_s) / MESSAGES] if repeat else []
        return median_high(found)

    small_s, large_s = seconds(SMALL), seconds(LARGE[device.type])
    others = group.size - 1
    on_wire = 4 * (LARGE[device.type] - SMALL) * 2 * others / group.size
    hop_s = small_s / (rounds(group.size) * others)
    return Ring(size=group.size, bytes_per_s=on_wire / max(large_s - small_s, 1e-9), latency_s=hop_s)


def measure_rings(device: str, world_size: int, ranks_per_node: int) -> Rings:
    """Measure the rings inside nodes and across them; the result is that of the slowest rank. Collective.

    Args:
        device: as ``train.device``.
        world_size: ranks of the job.
        ranks_per_node: neighbouring ranks, as many on each node.
    """
    nodes, found = world_size // ranks_per_node, Rings()
    for length in lengths(ranks_per_node):
        mesh = open_mesh(Grid(1, world_size // length, length), device)
        found.setdefault("node_rings", []).append(_slowest(measure_ring(mesh.tp, mesh.device), mesh.world))
    for length in lengths(nodes):
        mesh = open_mesh(Grid(nodes // length, length, ranks_per_node), device)
        found.setdefault("cluster_rings", []).append(_slowest(measure_ring(mesh.replicas, mesh.device), mesh.world))
    return found


def _slowest(ring: Ring, world: Group) -> Ring:
    rates, latencies = zip(*world.gather_objects([ring.bytes_per_s, ring.latency_s]), strict=True)
    return Ring(size=ring.size, bytes_per_s=min(rates), latency_s=max(latencies))


def rings_to_toml(rings: Rings) -> list[str]:
    """Return the lines of the rings' tables in a hardware file."""
    lines = []
    for name, found in rings.items():
        for ring in found:
            lines += ["", f"[[{name}]]", f"size = {ring.size}"]
            lines += [f"bytes_per_s = {ring.bytes_per_s:.4g}", f"latency_s = {ring.latency_s:.4g}"]
    return lines


def check_nodes(names: list[str]) -> int:
    """Return the ranks of a node from the node of each rank.

    Raises:
        UserError: one rank alone, nodes with different numbers of ranks, or ranks of a node that are not neighbours.
    """
    first = names.count(names[0])
    placed = [names[at] for at in range(0, len(names), first)]
    if len(names) < 2:
        raise UserError(
            "MW-PLANNER-008", "calibrate --rings: this is one rank alone: start it by srun or torchrun, on two or more"
        )
    if names != [name for name in placed for _ in range(first)] or len({*placed}) < len(placed):
        counts = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
        raise UserError(
            "MW-PLANNER-009",
            f"calibrate --rings: the nodes have different numbers of ranks, or theirs are not neighbours ({counts}): "
            f"start as many on each, node by node",
        )
    return first
