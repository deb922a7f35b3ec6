"""Search for the origin of NaN and Inf in a rejected step: its rank, layer and samples.

A healthy step costs next to nothing. The scalars that every step all-reduces over all ranks carry
the NaN or Inf to all ranks in the same step. Copies of a gradient that the norm does not count are
checked by ranks that would wait anyway.

    1. state left by the step                       weights; losses; unreduced gradients of this rank: with ZeRO-1 those
                                                    outside its shard, since the shard holds the sum
                                                    over replicas; with ZeRO-2 and -3 none
    2. replay of the step (on_nonfinite = "stop")   the same samples, and dropout is a function of sample and layer: the
                                                    same numbers. No sums over replicas, no
                                                    optimizer. Each module's output and each
                                                    gradient is checked as it is computed
    3. gather of all evidence                       the same verdict on all ranks

NaN and Inf spread to all later values, so the first finding is the cause. In forward that is the
lowest stage, then the first call within one micro-batch. Tensor-parallel ranks make these calls in
lockstep, so the rank of origin can be distinguished from ranks that received the value in a sum. In
backward it is the highest stage, then the last parameter. If weights are not finite, the step is
not replayed. If the replay is finite, the hardware is suspected; compiled layers too, because they
are replayed without torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.sharding import BucketSlot, ShardedParameters
from meshwright.mesh import Axis, Grid
from meshwright.parts import Parts
from meshwright.pipeline.executor import RowResult
from meshwright.pipeline.values import Feed
from meshwright.watch.nonfinite.evidence import (
    MAX_FINDINGS,
    Evidence,
    EvidenceKind,
    backward_order,
    broken,
    cause,
)
from meshwright.watch.nonfinite.replay import compiled_layers, losses, positions_of, replay_step
from meshwright.watch.ranks import ranks_at


def collect_evidence(parts: Parts, feed: Feed, result: RowResult) -> list[Evidence]:
    """Return this rank's weights, losses and gradients
    that are not finite after a rejected step.
    """
    evidence = []
    for index, replica in parts.replicas.items():
        positions = positions_of(parts.executor.stages[index])
        evidence += _weights(parts, index, replica, positions)[:MAX_FINDINGS]
        gradients = _gradients(parts, index, replica, positions, feed)
        evidence += sorted(gradients, key=backward_order)[:MAX_FINDINGS]
    return evidence + losses(parts, feed, result, _replica_ranks(parts))[:MAX_FINDINGS]


def _replica_ranks(parts: Parts) -> tuple[int, ...]:
    grid, dp_rank = parts.mesh.grid, parts.mesh.at.dp_rank
    return tuple(rank for rank in range(grid.size) if grid.coordinates(rank).dp_rank == dp_rank)


def _weights(
    parts: Parts, index: int, replica: Replica, positions: dict[int, int]
) -> list[Evidence]:
    buckets = (*replica.buckets, *replica.frozen_shards)
    sharded = [
        (slot.member, _local_weights(bucket, slot)) for bucket in buckets for slot in bucket.slots
    ]
    evidence = []
    for member, weights in sharded + [
        (member, member.parameter.detach()) for member in replica.frozen
    ]:
        problem = broken(weights)
        if problem is not None:
            position = positions[id(member.parameter)]
            at = parts.mesh.at.dp_rank
            evidence.append(
                Evidence(
                    EvidenceKind.WEIGHT,
                    (parts.mesh.rank,),
                    index,
                    position,
                    member.info.name,
                    problem,
                    at,
                )
            )
    return sorted(evidence, key=lambda each: each.position)


def _local_weights(bucket: ShardedParameters, slot: BucketSlot) -> Tensor:
    """Return this rank's weights of one parameter, flat: all of them,
    or its padded rows under ZeRO-3.
    """
    return bucket.master if bucket.flat is None else bucket.flat[slot.start : slot.stop]


def _pieces(bucket: ShardedParameters) -> Iterator[tuple[BucketSlot, int, Tensor]]:
    """Yield (slot, shard index, gradient) for each piece of a gradient on this rank,
    split at shard boundaries.

    The gradient is flat: (numel of the piece,).
    """
    begin, end = bucket.shard_range
    size = max(1, end - begin)
    gradient, offset = bucket.shard_gradient, begin
    if bucket.flat_gradient is not None:  # outside the shard: this rank's contribution to the sum
        gradient, offset, begin, end = bucket.flat_gradient, 0, 0, bucket.numel
    for slot in bucket.slots:
        for shard in range(slot.start // size, -(-slot.stop // size)):
            start, stop = max(slot.start, shard * size), min(slot.stop, (shard + 1) * size)
            if begin <= start and stop <= end:
                yield slot, shard, gradient[start - offset : stop - offset]


def _gradients(
    parts: Parts, index: int, replica: Replica, positions: dict[int, int], feed: Feed
) -> list[Evidence]:
    """Return the gradient pieces of one stage that are not finite, each with its candidate ranks.

    A piece is either this rank's own gradient of the whole step, or a sum over several ranks.
    """
    mesh, evidence = parts.mesh, []
    samples = tuple(
        sample
        for m in range(parts.executor.schedule.chunks)
        for sample in feed.sample_indices(m).tolist()
    )
    for bucket in replica.buckets:
        summed_over_dp = bucket.holders.replicas.size > 1
        own_shard = bucket.holders.shard_group.rank
        for slot, shard, gradient in _pieces(bucket):
            problem = broken(gradient, is_gradient=True)
            if problem is None:
                continue
            axes = []
            if shard == own_shard:
                axes = [Axis.TP] * bool(bucket.holders.partial_over)
                axes += [Axis.PP] * (bucket.holders.tied is not None)
                # replicas that keep their contributions to this shard check those: then only this
                # rank is a candidate
                is_kept = (
                    bucket.keeps_gradient and bucket.holders.copies_group.size == 1 and not axes
                )
                axes += [Axis.DP, Axis.CP] * (summed_over_dp and not is_kept)
            if axes or (shard == own_shard and summed_over_dp):
                kind = EvidenceKind.SUM
            else:
                kind = EvidenceKind.GRADIENT
            ranks = _ranks_along(mesh.grid, mesh.rank, axes)
            tie = bucket.holders.tied
            if tie is not None:
                pp_ranks = {mesh.grid.coordinates(rank).pp_rank for rank in tie.ranks.ranks}
                ranks = tuple(
                    rank for rank in ranks if mesh.grid.coordinates(rank).pp_rank in pp_ranks
                )
            evidence.append(
                Evidence(
                    kind,
                    ranks,
                    index,
                    positions[id(slot.member.parameter)],
                    slot.member.info.name,
                    problem,
                    mesh.at.dp_rank,
                    None,
                    () if Axis.DP in axes else samples,
                    (mesh.at.tp_rank, shard),
                )
            )
    return evidence


def _ranks_along(grid: Grid, rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the ranks whose coordinates differ from those of ``rank`` along these axes only."""
    ranks = {rank}
    for axis in axes:
        ranks = {other for each in ranks for other in grid.group(axis, each)}
    return tuple(sorted(ranks))


def find_cause(parts: Parts, feed: Feed, *, replay: bool) -> str:
    """Find the cause of NaN or Inf in a rejected step. Collective over all ranks; blocks.

    Args:
        parts: the parts of this rank, with the result of the rejected step.
        feed: the samples of that step.
        replay: replay the step, unless a weight is not finite.

    Returns:
        Text for the message, the same on every rank.
    """
    assert parts.last is not None
    grid = parts.mesh.grid
    evidence = _gather(parts, collect_evidence(parts, feed, parts.last))
    first = cause(evidence, grid)
    if not replay or any(each.kind is EvidenceKind.WEIGHT for each in evidence):
        if first is not None:
            return first.text
        return "the origin is unknown: no rank holds the value any more"
    replayed = cause(_gather(parts, replay_step(parts, feed)), grid)
    if replayed is not None:
        return replayed.text
    prefix = f"{first.text}. " if first is not None else ""
    suspects = ranks_at(grid, first.ranks if first is not None else range(grid.size))
    how = advice = ""
    if any(parts.mesh.world.gather_objects(bool(compiled_layers(parts)))):
        how = ", its layers without torch.compile"
        advice = "; if it happens again, set train.compile = false"
    return (
        f"{prefix}It did not recur when the step was replayed{how}: check the hardware of"
        f" {suspects}{advice}"
    )


def _gather(parts: Parts, own: list[Evidence]) -> list[Evidence]:
    """Gather the evidence of all ranks. Collective over all ranks; blocks."""
    return [
        each
        for of_rank in parts.mesh.world.gather_objects(own, Evidence, EvidenceKind)
        for each in of_rank
    ]
