"""Search for the origin of NaN and Inf in a rejected step: its rank, layer and samples.

A healthy step costs next to nothing. The scalars that every step all-reduces over all ranks show the NaN or Inf to all
ranks, in the same step. Copies of a gradient that the norm does not count are checked by ranks that would wait anyway.

    1. state left by the step                       weights; losses; gradients that are a rank's own: with ZeRO-1
                                                    those outside its own shard, since its shard holds the sum over
                                                    replicas; with ZeRO-2 and -3 none
    2. replay of the step (on_nonfinite = "stop")   the same samples, and dropout is a function of sample and layer: the
                                                    same numbers. No sums over replicas, no optimizer. Each module's
                                                    output and each gradient is checked as it is computed
    3. gather of all evidence                       the same verdict on all ranks

NaN and Inf spread to all later values, so the first finding is the cause. In forward that is the lowest stage, then the
first call within one micro-batch. Tensor-parallel ranks make these calls in step, so the rank where it began can be
distinguished from ranks that received it in a sum. In backward it is the highest stage, then the last parameter. If
weights are not finite, the step is not replayed. If the replay is finite, the hardware is suspected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.sharding import BucketSlot, ShardedParameters
from meshwright.mesh.grid import Axis, Grid
from meshwright.parts import Parts
from meshwright.pipeline.executor import Feed, RowResult
from meshwright.watch.nonfinite.evidence import MOST, Evidence, EvidenceKind, backward_order, broken, cause
from meshwright.watch.nonfinite.replay import losses, positions_of, replay_step
from meshwright.watch.ranks import ranks_at


def collect_evidence(parts: Parts, feed: Feed, result: RowResult) -> list[Evidence]:
    """Return this rank's weights, losses and gradients that are not finite after a rejected step."""
    found = []
    for index, replica in parts.replicas.items():
        positions = positions_of(parts.executor.stages[index])
        found += _weights(parts, index, replica, positions)[:MOST]
        gradients = _gradients(parts, index, replica, positions, feed)
        found += sorted(gradients, key=backward_order)[:MOST]
    return found + losses(parts, feed, result, _replica_ranks(parts))[:MOST]


def _replica_ranks(parts: Parts) -> tuple[int, ...]:
    grid, dp_rank = parts.mesh.grid, parts.mesh.at.dp_rank
    return tuple(rank for rank in range(grid.size) if grid.coordinates(rank).dp_rank == dp_rank)


def _weights(parts: Parts, index: int, replica: Replica, positions: dict[int, int]) -> list[Evidence]:
    own = [(slot.member, _held_weights(bucket, slot)) for bucket in replica.buckets for slot in bucket.slots]
    found = []
    for member, weights in own + [(member, member.parameter.detach()) for member in replica.frozen]:
        wrong = broken(weights)
        if wrong is not None:
            position = positions[id(member.parameter)]
            at = parts.mesh.at.dp_rank
            found.append(
                Evidence(EvidenceKind.WEIGHT, (parts.mesh.rank,), index, position, member.info.name, wrong, at)
            )
    return sorted(found, key=lambda each: each.position)


def _held_weights(bucket: ShardedParameters, slot: BucketSlot) -> Tensor:
    """Return the weights of one parameter that this rank holds, flat: all, or under ZeRO-3 its padded rows."""
    return bucket.master if bucket.flat is None else bucket.flat[slot.start : slot.stop]


def _pieces(bucket: ShardedParameters) -> Iterator[tuple[BucketSlot, int, Tensor]]:
    """Yield (slot, shard index, gradient) for each parameter, split at shard boundaries, if this rank holds it.

    The gradient is flat: (numel of the piece,).
    """
    begin, end = bucket.shard_range
    size = max(1, end - begin)
    held, offset = bucket.shard_gradient, begin
    if bucket.flat_gradient is not None:  # outside this rank's shard it is its own contribution to the sum
        held, offset, begin, end = bucket.flat_gradient, 0, 0, bucket.numel
    for slot in bucket.slots:
        for shard in range(slot.start // size, -(-slot.stop // size)):
            start, stop = max(slot.start, shard * size), min(slot.stop, (shard + 1) * size)
            if begin <= start and stop <= end:
                yield slot, shard, held[start - offset : stop - offset]


def _gradients(parts: Parts, index: int, replica: Replica, positions: dict[int, int], feed: Feed) -> list[Evidence]:
    """Return the gradient pieces of one stage that are not finite, each with its candidate ranks.

    A piece is either this rank's own gradient of the whole step, or a sum over several ranks.
    """
    mesh, found = parts.mesh, []
    samples = tuple(
        sample for m in range(parts.blueprint.schedule.chunks) for sample in feed.sample_indices(m).tolist()
    )
    for bucket in replica.buckets:
        summed_over_dp = bucket.sharding.num_replicas > 1
        mine = bucket.sharding.shard.rank
        for slot, shard, gradient in _pieces(bucket):
            wrong = broken(gradient, is_gradient=True)
            if wrong is None:
                continue
            axes = []
            if shard == mine:
                axes = [Axis.TP] * (bucket.kind.sum_over_tp and mesh.tp.size > 1)
                axes += [Axis.PP] * (bucket.kind.tied is not None)
                # what the others gave to my shard lies with them, where they keep it: finite there, it was not here
                with_them = bucket.keeps_gradient and bucket.sharding.copies.size == 1 and not axes
                axes += [Axis.DP] * (summed_over_dp and not with_them)
            of = EvidenceKind.SUM if axes or (shard == mine and summed_over_dp) else EvidenceKind.GRADIENT
            ranks = _ranks_along(mesh.grid, mesh.rank, axes)
            if bucket.kind.tied is not None:
                holders = {mesh.grid.coordinates(rank).pp_rank for rank in bucket.kind.tied.ranks.ranks}
                ranks = tuple(rank for rank in ranks if mesh.grid.coordinates(rank).pp_rank in holders)
            found.append(
                Evidence(
                    of,
                    ranks,
                    index,
                    positions[id(slot.member.parameter)],
                    slot.member.info.name,
                    wrong,
                    mesh.at.dp_rank,
                    None,
                    () if Axis.DP in axes else samples,
                    (mesh.at.tp_rank, shard),
                )
            )
    return found


def _ranks_along(grid: Grid, rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the ranks whose coordinates differ from those of ``rank`` along these axes only."""
    ranks = {rank}
    for axis in axes:
        ranks = {other for each in ranks for other in grid.group(axis, each)}
    return tuple(sorted(ranks))


def find_cause(parts: Parts, feed: Feed, *, again: bool) -> str:
    """Find the cause of NaN or Inf in a rejected step. Collective over all ranks; blocks.

    Args:
        parts: the parts of this rank, with the result of the rejected step.
        feed: the samples of that step.
        again: replay the step if the state left by it does not show the cause in a weight.

    Returns:
        Text for the message, the same on every rank.
    """
    assert parts.last is not None
    grid = parts.mesh.grid
    left = _from_all(parts, collect_evidence(parts, feed, parts.last))
    at_first = cause(left, grid)
    if not again or (at_first is not None and any(each.of is EvidenceKind.WEIGHT for each in left)):
        return at_first.text if at_first is not None else "where it began cannot be told: no rank has it any more"
    second = cause(_from_all(parts, replay_step(parts, feed)), grid)
    if second is not None:
        return second.text
    prefix = f"{at_first.text}. " if at_first is not None else ""
    suspects = ranks_at(grid, at_first.ranks if at_first is not None else range(grid.size))
    return f"{prefix}It did not come again when the step was computed a second time: look at the hardware of {suspects}"


def _from_all(parts: Parts, mine: list[Evidence]) -> list[Evidence]:
    return [each for found in parts.mesh.world.gather_objects(mine, Evidence, EvidenceKind) for each in found]
