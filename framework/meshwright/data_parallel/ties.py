"""Weights that several pipeline stages hold (tied, such as embedding and head): their groups, and
the sum of their gradients.

    stage 0   embedding.weight   gradient of the lookup   |
    stage 3   head.weight        gradient of the logits   |  sum_ties, in STEP: both hold the sum

Each copy takes the same update from the same sum, so the copies stay equal without a broadcast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh


def tied_groups(
    stages_of: Mapping[str, Sequence[int]], rank_of: Callable[[int], int], mesh: Mesh
) -> dict[str, Group]:
    """Return canonical name -> group of the ranks that hold copies of a weight tied across stages.

    The ranks differ in pp alone. Collective over all ranks: it makes process groups.

    Args:
        stages_of: canonical name of each parameter -> the stages that hold it, in order.
        rank_of: pipeline rank of a stage.
    """
    groups: dict[tuple[int, ...], Group] = {}
    found: dict[str, Group] = {}
    for name, stages in sorted(stages_of.items()):
        pp_ranks = tuple(sorted({rank_of(stage) for stage in stages}))
        if len(stages) > 1:
            if pp_ranks not in groups:
                groups[pp_ranks] = mesh.stage_group(pp_ranks)
            found[name] = groups[pp_ranks]
    return found


def sum_ties(buckets: Iterable[ShardedParameters]) -> None:
    """Sum the gradients of each tied weight over its copies, and store the sum in every copy.
    Blocks.

    Copies on one rank are added directly. Copies on several ranks are all-reduced, this rank's
    shard only: 2 m (n-1)/n bytes per rank, m = bytes of the shard, n = ranks with a copy. The order
    is by name, the same on all ranks.

    Every rank that holds a tied weight must call it at the end of its row, after all stages are
    reduced. A stage's REDUCE would be too early: stages finish at different times, and a rank that
    blocks there could delay messages that the other stage still needs.
    """
    copies: dict[str, list[ShardedParameters]] = defaultdict(list)
    for bucket in buckets:
        if bucket.holders.tied is not None:
            copies[bucket.holders.tied.name].append(bucket)
    for name in sorted(copies):
        first, *others = copies[name]
        assert first.holders.tied is not None
        for other in others:
            first.shard_gradient.add_(other.shard_gradient)
        first.sum_shard(first.holders.tied.ranks)
    for first, *others in copies.values():
        first.wait()
        for other in others:
            other.shard_gradient.copy_(first.shard_gradient)
