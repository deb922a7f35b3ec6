"""Holders of a parameter: the ranks with its slices, its copies and the terms of its gradient.

    a parameter that          slices   replicas, in shards     further copies   partial sums
    tp cuts                   tp       dp x cp                 -                -
    every tp rank holds       -        dp x cp                 tp               tp, where a rank used it for some tokens
    ep cuts (experts)         ep       with the same experts   -                -
    several stages hold       as above, and a tie: the ranks with its copies, which differ in pp alone

    4 replicas, shard_factor = 2  replicas 0 1 | 2 3      neighbours are a shard group: together one full copy (HSDP);
                                  shard    0 1 | 0 1      equal shards are a copies group: 0 2, 1 3

A gradient is summed over each group in turn: shards, copies of the shard, partial sums, ties. A norm
counts an element on the rank that is first in every group of copies. A drift check compares the copies
of each group. In a checkpoint the holders of a parameter write a part of it each.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh

_ALONE = Group("alone", (0,), 0)


class Tie(NamedTuple):
    """Membership of a stage's parameter in a weight that is tied across stages."""

    name: str
    """Canonical name, the same for all copies."""
    ranks: Group
    """Group of the ranks that hold a copy, this rank included.
    It has one rank when all copies are on this rank.
    """
    is_first: bool
    """True for the copy on the first stage that holds the weight.
    Only this copy is counted in norms and saved.
    """


class Holders(NamedTuple):
    """Groups of this rank for one parameter of a stage. A group of one rank: this rank alone."""

    slices: Group = _ALONE
    """tp or ep ranks, each with another slice of the parameter."""
    replicas: Group = _ALONE
    """Ranks with this slice that see other samples or tokens: each holds it, or a shard of it."""
    shard_group: Group = _ALONE
    """Replicas that hold one shard each of a bucket. With one rank, a bucket is not sharded."""
    copies_group: Group = _ALONE
    """Replicas that hold the same shard, one from each shard group. With one rank,
    no other replica holds it.
    """
    copied_over: tuple[Group, ...] = ()
    """Further groups of ranks with copies: tp, for a parameter that it does not cut."""
    partial_over: tuple[Group, ...] = ()
    """Those of ``copied_over`` whose ranks have partial sums of the gradient."""
    parts: Group | None = None
    """Ranks that hold the shards of all slices: those of a whole weight, of experts those of a rank.
    None where tp cuts the parameter and the optimizer needs no whole weights.
    """
    tied: Tie | None = None
    """Tie to the copies on other stages; None for a weight that is not tied."""

    @property
    def copies(self) -> tuple[Group, ...]:
        """Groups of ranks with this rank's shard, on this stage."""
        return (*self.copied_over, self.copies_group)

    @property
    def whole_copies(self) -> tuple[Group, ...]:
        """Groups of ranks with this rank's slice, gathered from its shards, on this stage."""
        return (*self.copied_over, self.replicas)

    @property
    def is_counted(self) -> bool:
        """True on the one rank that counts this rank's shard in norms."""
        is_first = all(group.rank == 0 for group in self.copies)
        return is_first and (self.tied is None or self.tied.is_first)

    @property
    def is_saved(self) -> bool:
        """True on the one rank that reports this rank's slice, and saves what cannot be divided."""
        return self.is_counted and self.shard_group.rank == 0

    def range_of(self, numel: int) -> tuple[int, int]:
        """Return this rank's [start, stop) in a flat tensor of ``numel`` elements;
        shards divide ``numel`` evenly.
        """
        per_shard = numel // self.shard_group.size
        return self.shard_group.rank * per_shard, (self.shard_group.rank + 1) * per_shard

    def saved_range(self, numel: int) -> tuple[int, int]:
        """Return the [start, stop) of a flat tensor of ``numel`` elements that this rank writes to a
        checkpoint: its shard, divided evenly over the ranks with copies of it.

        Of a tied weight, the ranks of the first stage write all. No communication.
        """
        start, stop = 0, numel
        for group in (self.shard_group, *self.copies):
            size = stop - start
            start, stop = (start + size * (group.rank + each) // group.size for each in (0, 1))
        is_written = self.tied is None or self.tied.is_first
        return (start, stop) if is_written else (start, start)


def open_holders(
    mesh: Mesh,
    shard_factor: int = 1,
    expert_shard_factor: int = 1,
    *,
    needs_whole_weights: bool = False,
) -> dict[str | None, Holders]:
    """Make the groups of a stage's parameters. Collective over all ranks; blocks.

    Args:
        shard_factor: number of shards of the optimizer state; 1: every replica holds all of it.
        expert_shard_factor: the same for the experts; ignored with ep = 1.
        needs_whole_weights: make the groups of the ranks that together hold a weight that tp cuts.

    Returns:
        axis that cuts a parameter -> its holders; None: no axis does.
    """
    shard_group, copies_group = mesh.split(mesh.replicas, shard_factor)
    of_experts = expert_shard_factor if mesh.ep.size > 1 else 1
    expert_shards, expert_copies = mesh.split(mesh.expert_replicas, of_experts)
    whole = Holders(
        replicas=mesh.replicas,
        shard_group=shard_group,
        copies_group=copies_group,
        copied_over=(mesh.tp,),
        parts=shard_group,
    )
    parts = mesh.over_tp(shard_group) if needs_whole_weights else None
    return {
        None: whole,
        "tp": whole._replace(slices=mesh.tp, copied_over=(), parts=parts),
        "ep": Holders(
            slices=mesh.ep,
            replicas=mesh.expert_replicas,
            shard_group=expert_shards,
            copies_group=expert_copies,
            parts=expert_shards,
        ),
    }
