"""Parameters of a stage: assignment to buckets, and full tensors from shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.data_parallel.sharding import (
    BucketKind,
    ShardedParameters,
    StageParameter,
    accumulation_dtype,
)
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders, Tie
from meshwright.optimizer import MatrixShard, MatrixSlot, ShardLayout, ShardPlace
from meshwright.parameters import ParameterInfo


def members_of(layers: nn.Sequential) -> list[tuple[str, nn.Parameter, str]]:
    """Return (parameter name, parameter, layer name) of each distinct parameter,
    in the model's order.
    """
    seen: set[nn.Parameter] = set()
    members = []
    for layer_name, layer in layers.named_children():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if parameter not in seen:
                seen.add(parameter)
                members.append((f"{layer_name}.{name}", parameter, layer_name))
    return members


def stage_members(
    stage: int,
    layers: nn.Sequential,
    infos: Mapping[str, ParameterInfo],
    canonical: Callable[[str], str],
    stages_of: Mapping[str, Sequence[int]],
    holders_by_axis: Mapping[str | None, Holders],
    tied: Mapping[str, Group],
) -> list[StageParameter]:
    """Return the parameters of a stage, frozen ones included, with their holders and shapes.

    Args:
        canonical: function from a parameter's name to its canonical name, the same for all tied
            copies.
        stages_of: canonical name of each parameter -> the stages that hold it, in order.
        holders_by_axis: from :func:`~meshwright.mesh.holders.open_holders`.
        tied: canonical name of each tied weight -> the ranks that hold it, from
            :func:`~.ties.tied_groups`.
    """
    members = []
    for local_name, parameter, layer in members_of(layers):
        name = canonical(local_name)
        info = infos[name]
        holders = holders_by_axis[info.sliced_over]
        if info.is_partial:
            holders = holders._replace(partial_over=holders.copied_over)
        if name in tied:
            tie = Tie(name, tied[name], is_first=stages_of[name][0] == stage)
            holders = holders._replace(tied=tie)
        members.append(StageParameter(info, parameter, layer, holders))
    return members


def plan_buckets(
    members: Sequence[StageParameter], bucket_bytes: int
) -> list[list[StageParameter]]:
    """Group members into buckets of one kind and about ``bucket_bytes`` of gradient,
    last layer first as in backward.

    A tied weight has a bucket of its own, because the stages that hold it must reduce the same
    elements. Buckets are in the order in which backward completes them. A bucket with the norms of
    all layers therefore comes last.
    """
    buckets: list[list[StageParameter]] = []
    open_buckets: dict[BucketKind, list[StageParameter]] = {}
    filled: dict[BucketKind, int] = {}
    completed_at: dict[int, int] = {}
    for position, member in enumerate(reversed(members)):
        kind = member.kind
        size = member.parameter.numel() * accumulation_dtype(member.parameter.dtype).itemsize
        is_tied = kind.holders.tied is not None
        if is_tied or kind not in open_buckets or filled[kind] + size > bucket_bytes:
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(member)
        filled[kind] += size
        completed_at[id(open_buckets[kind])] = position
    return sorted(buckets, key=lambda bucket: completed_at[id(bucket)])


def parameter_at(bucket: ShardedParameters, element: int) -> str:
    """Return the name of the parameter with this element of the rank's shard; of padding,
    of the parameter before.
    """
    position = bucket.shard_range[0] + element
    *_, last = (slot for slot in bucket.slots if slot.start <= position)  # slots are in order
    return last.member.info.name


def shard_layout(bucket: ShardedParameters, seed: int) -> ShardLayout:
    """Return the layout of weights in this rank's shard of a bucket,
    for optimizers that are not element-wise.

    ``seed``: seed of the run, for stochastic rounding of each element.
    """
    slots = tuple((slot.member.info, slot.start) for slot in bucket.slots)
    return ShardLayout(
        place=ShardPlace(slots, bucket.shard_range[0], seed),
        matrices=matrix_shard(bucket),
        holders=bucket.holders,
    )


def matrix_shard(bucket: ShardedParameters) -> MatrixShard | None:
    """Return the matrices of a bucket for a whole-matrix optimizer, else None.
    Newton-Schulz avoids float16.
    """
    if not bucket.kind.is_matrix:
        return None
    parts, shard_group = bucket.holders.parts, bucket.holders.shard_group
    assert parts is not None
    slots = tuple(MatrixSlot(slot.member.info, slot.start) for slot in bucket.slots)
    dtype = torch.float32 if bucket.dtype == torch.float16 else bucket.dtype
    return MatrixShard(slots, bucket.numel, parts, parts.size // shard_group.size, dtype)


def full_tensor(bucket: ShardedParameters, shard: Tensor) -> Tensor:
    """All-gather a full flat tensor (numel,) from shards (numel/n,).
    Collective over the shard group; blocks.

    Bytes on the wire per rank: M (n-1)/n, M = bytes of the full tensor.
    """
    if not bucket.is_sharded:
        return shard
    shard = shard.to(bucket.device).contiguous()
    flat = torch.empty(bucket.numel, dtype=shard.dtype, device=bucket.device)
    bucket.holders.shard_group.all_gather(flat, shard).wait()
    return flat


def full_weights(bucket: ShardedParameters) -> Tensor:
    """Return the full flat weights (numel,) in the training dtype.
    Under ZeRO-3 collective over the shard group.
    """
    if bucket.flat is not None:
        return bucket.flat
    return full_tensor(bucket, bucket.master).to(bucket.dtype)


def shard_weights(bucket: ShardedParameters) -> Tensor:
    """Return this rank's shard (numel/n,) of the weights in the training dtype.
    No communication.
    """
    if bucket.flat is None:
        return bucket.master.to(bucket.dtype)
    start, stop = bucket.shard_range
    return bucket.flat[start:stop]
