"""This rank's pieces of a checkpoint.

Every rank writes a part of what it holds: of each bucket its shard, divided over the ranks with
copies of it. A rank thus writes about 1/n of a stage's bytes, for n ranks that hold it, and nothing
is gathered:

    ZeRO-1, shard_factor = 2      shard of ranks 0, 2      shard of ranks 1, 3
    written by                    | rank 0  | rank 2  |    | rank 1  | rank 3  |

Which elements a rank writes follows from the blueprint alone (``Holders.saved_range``). The
exceptions are whole tensors of one rank: running buffers, states with less than one number per
element, and parameters without elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.checkpoint import TensorKind, TensorPiece
from meshwright.data_parallel.members import shard_weights
from meshwright.data_parallel.sharding import (
    BucketSlot,
    ShardedParameters,
    StageParameter,
    slot_parts,
)
from meshwright.mesh.holders import Holders
from meshwright.model.buffers import is_saved
from meshwright.optimizer import evaluated_weights, factors_of, read_states
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts


def saved_running(parts: Parts) -> dict[str, Tensor]:
    """Return the running buffers of this rank's stages that a checkpoint holds, by name."""
    layers = parts.blueprint.model.layers
    return {name: buffer for name, buffer in parts.running().items() if is_saved(layers, name)}


def frozen_names(parts: Parts) -> frozenset[str]:
    """Return the names of this rank's parameters that are not trained."""
    names = set()
    for replica in parts.replicas.values():
        names |= {member.info.name for member in replica.frozen}
        for bucket in replica.frozen_shards:
            names |= {slot.member.info.name for slot in bucket.slots}
    return frozenset(names)


def saved_pieces(parts: Parts, with_frozen: bool = True) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of a checkpoint. No communication.

    ``with_frozen``: frozen weights too, beside those of adapters.
    """
    mesh = parts.mesh
    if mesh.replicas.rank == 0 and mesh.at.tp_rank == 0:
        for name, buffer in saved_running(parts).items():
            yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer)
    index = 0
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        yield from _replicated_pieces(
            each for each in replica.frozen if with_frozen or is_adapter(each.info.name)
        )
        for bucket in replica.frozen_shards:
            if with_frozen or is_of_adapters(bucket):
                yield from _bucket_pieces(TensorKind.WEIGHTS, bucket, shard_weights(bucket))
        for bucket in replica.buckets:
            yield from _trained_pieces(bucket, parts.optimizer, index)
            if bucket.holders.is_saved and mesh.at.tp_rank == 0:  # every holder has whole ones
                for name, info, tensor in factors_of(parts.optimizer, index):
                    yield TensorPiece(TensorKind(name), info, tensor)
            index += 1


def is_of_adapters(bucket: ShardedParameters) -> bool:
    """Return whether all parameters of a bucket are an adapter's."""
    return all(is_adapter(slot.member.info.name) for slot in bucket.slots)


def _trained_pieces(
    bucket: ShardedParameters, optimizer: FlatOptimizer, index: int
) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of a bucket: weights, master weights and states with one number
    per element. ``index``: of its shard in the optimizer.
    """
    evaluated = evaluated_weights(optimizer, index)
    is_average = evaluated is not bucket.master
    yield from _bucket_pieces(
        TensorKind.WEIGHTS,
        bucket,
        evaluated.to(bucket.dtype) if is_average else shard_weights(bucket),
    )
    if bucket.is_mixed_precision:
        yield from _bucket_pieces(TensorKind.MASTER, bucket, evaluated)
    states, _ = read_states(optimizer, index)
    states |= {name: shards[index] for name, shards in optimizer.added.items()}
    for name, shard in states.items():
        yield from _bucket_pieces(TensorKind(name), bucket, shard)


def _bucket_pieces(
    kind: TensorKind, bucket: ShardedParameters, shard: Tensor
) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of one flat shard (numel/n,) of a bucket."""
    first = bucket.shard_range[0]
    for part in slot_parts(bucket.slots, *bucket.holders.saved_range(bucket.numel)):
        elements = shard[part.start - first : part.stop - first]
        yield TensorPiece(kind, part.slot.member.info, elements, part.position)
    if bucket.holders.is_saved:
        yield from _empty_pieces(kind, bucket.slots, shard.dtype)


def _replicated_pieces(members: Iterable[StageParameter]) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of weights that every replica has whole.

    Those with the same holders are divided together, as if they followed each other in one bucket.
    """
    by_holders: dict[Holders, list[BucketSlot]] = {}
    for member in members:
        slots = by_holders.setdefault(member.holders, [])
        start = slots[-1].stop if slots else 0
        slots.append(BucketSlot(member, start, start + member.parameter.numel()))
    for holders, slots in by_holders.items():
        for part in slot_parts(slots, *holders.saved_range(slots[-1].stop)):
            weights = part.slot.member.parameter.detach().reshape(-1)
            elements = weights[part.position : part.position + part.stop - part.start]
            yield TensorPiece(TensorKind.WEIGHTS, part.slot.member.info, elements, part.position)
        if holders.is_saved:
            dtype = slots[0].member.parameter.dtype
            yield from _empty_pieces(TensorKind.WEIGHTS, slots, dtype)


def _empty_pieces(
    kind: TensorKind, slots: Iterable[BucketSlot], dtype: torch.dtype
) -> Iterator[TensorPiece]:
    """Yield the parameters without elements, which lie in no rank's range."""
    for slot in slots:
        if slot.start == slot.stop:
            yield TensorPiece(kind, slot.member.info, torch.empty(0, dtype=dtype), 0)
