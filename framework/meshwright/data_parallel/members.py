"""Parameters of a stage: assignment to buckets, full tensors from shards, gradient sums of tied weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.data_parallel.sharding import BucketKind, ShardedParameters, StageParameter, Tie, accumulation_dtype
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.optimizer import MatrixShard, MatrixSlot, ShardLayout, ShardPlace
from meshwright.parameters import ParameterInfo


def members_of(layers: nn.Sequential) -> list[tuple[str, nn.Parameter, str]]:
    """Return (parameter name, parameter, layer name) of each distinct parameter, in the model's order."""
    seen: set[int] = set()
    found = []
    for layer_name, layer in layers.named_children():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{layer_name}.{name}", parameter, layer_name))
    return found


def tied_groups(stages_of: Mapping[str, Sequence[int]], rank_of: Callable[[int], int], mesh: Mesh) -> dict[str, Group]:
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


def stage_members(
    stage: int,
    layers: nn.Sequential,
    infos: Mapping[str, ParameterInfo],
    canonical: Callable[[str], str],
    stages_of: Mapping[str, Sequence[int]],
    tied: Mapping[str, Group],
) -> list[StageParameter]:
    """Return the parameters of a stage, frozen ones included, with their ties and shapes.

    Args:
        canonical: function from a parameter's name to its canonical name, the same for all tied copies.
        stages_of: canonical name of each parameter -> the stages that hold it, in order.
        tied: canonical name of each tied weight -> the ranks that hold it, see :func:`tied_groups`.
    """
    members = []
    for name, parameter, layer in members_of(layers):
        known = canonical(name)
        tie = Tie(known, tied[known], stages_of[known][0] == stage) if known in tied else None
        members.append(StageParameter(infos[known], parameter, layer, tie))
    return members


def plan_buckets(members: Sequence[StageParameter], bucket_bytes: int) -> list[list[StageParameter]]:
    """Group members into buckets of one kind and about ``bucket_bytes`` of gradient, last layer first as in backward.

    A tied weight has a bucket of its own, because the stages that hold it must reduce the same elements. Buckets are in
    the order in which backward completes them. A bucket with the norms of all layers therefore comes last.
    """
    buckets: list[list[StageParameter]] = []
    open_buckets: dict[BucketKind, list[StageParameter]] = {}
    filled: dict[BucketKind, int] = {}
    completed_at: dict[int, int] = {}
    for position, member in enumerate(reversed(members)):
        kind = member.kind
        size = member.parameter.numel() * accumulation_dtype(member.parameter.dtype).itemsize
        if kind.tied is not None or kind not in open_buckets or filled[kind] + size > bucket_bytes:
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(member)
        filled[kind] += size
        completed_at[id(open_buckets[kind])] = position
    return sorted(buckets, key=lambda bucket: completed_at[id(bucket)])


def parameter_at(bucket: ShardedParameters, element: int) -> str:
    """Return the name of the parameter with this element of the rank's shard; of padding, of the parameter before."""
    at = bucket.shard_range[0] + element
    return max((slot for slot in bucket.slots if slot.start <= at), key=lambda slot: slot.start).member.info.name


def shard_layout(bucket: ShardedParameters, holders: Group | None, seed: int) -> ShardLayout:
    """Return the layout of weights in this rank's shard of a bucket, for optimizers that are not element-wise.

    Args:
        holders: ranks with the parts of weights that tp cuts; None if the optimizer needs no whole weights. Weights
            that tp does not cut have their parts in the shard group.
        seed: seed of the run, for stochastic rounding of each element.
    """
    slots = tuple((slot.member.info, slot.start) for slot in bucket.slots)
    among, tie = holders_of(bucket, holders), bucket.kind.tied
    place = ShardPlace(slots, bucket.shard_range[0], seed)
    return ShardLayout(place, matrix_shard(bucket, among), among, None if tie is None else tie.ranks)


def matrix_shard(bucket: ShardedParameters, among: Group | None) -> MatrixShard | None:
    """Return the matrices of a bucket for a whole-matrix optimizer (Muon), else None. Newton-Schulz avoids float16.

    ``among``: the ranks with parts of the bucket's weights.
    """
    if not bucket.kind.is_matrix:
        return None
    assert among is not None
    slots = tuple(MatrixSlot(slot.member.info, slot.start) for slot in bucket.slots)
    dtype = torch.float32 if bucket.dtype == torch.float16 else bucket.dtype
    return MatrixShard(slots, bucket.numel, among, among.size // bucket.sharding.shard.size, dtype)


def holders_of(bucket: ShardedParameters, holders: Group | None) -> Group | None:
    """Return the ranks with parts of a bucket's weights; ``holders``: those of weights that tp cuts, or None."""
    is_cut = not bucket.kind.replicated_over_tp and not bucket.kind.is_expert
    return holders if holders is None or is_cut else bucket.sharding.shard


def full_tensor(bucket: ShardedParameters, shard: Tensor) -> Tensor:
    """All-gather a full flat tensor (numel,) from shards (numel/n,). Collective over the shard group; blocks.

    Bytes on the wire per rank: M (n-1)/n, M = bytes of the full tensor.
    """
    if not bucket.is_sharded:
        return shard
    shard = shard.to(bucket.device).contiguous()
    flat = torch.empty(bucket.numel, dtype=shard.dtype, device=bucket.device)
    bucket.sharding.shard.all_gather(flat, shard).wait()
    return flat


def full_weights(bucket: ShardedParameters) -> Tensor:
    """Return the full flat weights (numel,) in the training dtype. Under ZeRO-3 collective over the shard group."""
    return full_tensor(bucket, bucket.master).to(bucket.dtype) if bucket.flat is None else bucket.flat


def sum_ties(buckets: Iterable[ShardedParameters]) -> None:
    """Sum the gradients of each tied weight over its copies, and store the sum in every copy. Blocks.

    Copies on one rank are added directly. Copies on several ranks are all-reduced, this rank's shard only: 2 m (n-1)/n
    bytes per rank, m = bytes of the shard, n = ranks with a copy. The order is by name, the same on all ranks.

    Every rank that holds a tied weight must call it at the end of its row, after all stages are reduced. A stage's
    REDUCE would be too early: stages finish at different times, and a rank that blocks there could delay messages
    that the other stage still needs.
    """
    copies: dict[str, list[ShardedParameters]] = defaultdict(list)
    for bucket in buckets:
        if bucket.kind.tied is not None:
            copies[bucket.kind.tied.name].append(bucket)
    for name in sorted(copies):
        first, *others = copies[name]
        assert first.kind.tied is not None
        for other in others:
            first.shard_gradient.add_(other.shard_gradient)
        first.sum_shard(first.kind.tied.ranks)
    for first, *others in copies.values():
        first.wait()
        for other in others:
            other.shard_gradient.copy_(first.shard_gradient)
