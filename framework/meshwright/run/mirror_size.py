"""Bytes of a run's mirror in host memory, and on the wire: from the blueprint, before any rank exists.

    memory of a node   2 x (tensors that steps change) + 1 x (frozen weights), of its own ranks and, with several
                       nodes, of as many of the node before
    sent by a rank     its share of the tensors that steps change, in each step

A stage's tensors are divided evenly over its ranks (pieces.py), so that this holds for any ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.blueprint import Blueprint
from meshwright.checkpoint.memory import SLOTS
from meshwright.checkpoint.preflight import SavedTensor
from meshwright.mesh.neighbours import holders_on_next_nodes
from meshwright.run.tensors import saved_factors, saved_tensors, tensors_bytes


class MirrorBytes(NamedTuple):
    """Bytes of one copy of a rank's mirror: those of the tensors, without headers."""

    changing: float
    frozen: float

    @property
    def held(self) -> float:
        """Bytes that one place holds: both slots, which share the frozen weights."""
        return len(SLOTS) * self.changing + self.frozen


class MirrorSize(NamedTuple):
    """Bytes of a run's mirror on given nodes."""

    held: dict[str, float]
    """Host memory of each node."""
    sent: list[float]
    """Bytes that each rank sends to the next node in a step; 0 on one node."""


def mirror_bytes(blueprint: Blueprint) -> list[MirrorBytes]:
    """Return the bytes of a rank of each pipeline rank."""
    pp, per_stage = blueprint.grid.pp, blueprint.grid.size // blueprint.grid.pp
    frozen: list[list[SavedTensor]] = [[] for _ in range(pp)]
    changing: list[list[SavedTensor]] = [[] for _ in range(pp)]
    factors: list[list[SavedTensor]] = [[] for _ in range(pp)]
    pp_rank_of = _pp_rank_of_layers(blueprint)
    running = set(blueprint.running)
    for tensor in saved_tensors(blueprint):
        pp_rank = pp_rank_of[tensor.name.partition(".")[0]]
        is_frozen = not tensor.trained and tensor.name not in running
        (frozen if is_frozen else changing)[pp_rank].append(tensor)
    for tensor in saved_factors(blueprint):
        factors[pp_rank_of[tensor.name.partition(".")[0]]].append(tensor)
    return [
        MirrorBytes(
            tensors_bytes(blueprint, changing[pp_rank], factors[pp_rank]) / per_stage,
            tensors_bytes(blueprint, frozen[pp_rank]) / per_stage,
        )
        for pp_rank in range(pp)
    ]


def mirror_size(blueprint: Blueprint, nodes: Sequence[str]) -> MirrorSize:
    """Return the bytes of a run's mirror; ``nodes``: name of the node of each rank."""
    of_pp_rank = mirror_bytes(blueprint)
    of_rank = [of_pp_rank[blueprint.grid.coordinates(rank).pp_rank] for rank in range(len(nodes))]
    holders = holders_on_next_nodes(nodes)
    held = dict.fromkeys(nodes, 0.0)
    for rank, num_bytes in enumerate(of_rank):
        held[nodes[rank]] += num_bytes.held
        if holders:
            held[nodes[holders[rank]]] += num_bytes.held
    return MirrorSize(held, [each.changing if holders else 0.0 for each in of_rank])


def _pp_rank_of_layers(blueprint: Blueprint) -> dict[str, int]:
    """Return the pipeline rank of each layer, by name."""
    names = [name for name, _ in blueprint.model.layers.named_children()]
    return {
        names[layer]: blueprint.schedule.rank_of(stage)
        for stage, layers in enumerate(blueprint.stages)
        for layer in layers
    }
