"""Replica drift: comparison of tensors that must be bitwise equal on several ranks, and the error that names copies.

    tensor                      equal on all ranks of           a difference comes from
    weights                     dp (experts: their replicas)    a bit flipped in memory, a faulty link, a kernel that
      replicated over tp        dp, tp                          adds in another order on one rank
      tied                      dp, tied stages (, tp)
    moments, fp32 masters       dp with zero = 0, else the groups that have their own shards (, tp, tied)
    frozen parameters           dp (, tp, tied)
    running buffers             tp

A check is cheap. Each flat tensor is hashed to one number: the sum of its bits as integers, which any single flipped
bit changes. One small all-reduce per group compares the largest and smallest hash over the ranks that hold a copy. Only
if they differ are the single parameters hashed and gathered, so that the message can name the parameter and the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import ShardedParameters, Tie
from meshwright.errors import DriftError
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.optimizer import read_states
from meshwright.parts import Parts
from meshwright.watch.ranks import numbers, ranks_at

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_NAMED = 4
"""Limit of further tensors that the message names."""


class ReplicatedTensor(NamedTuple):
    """A tensor of this rank that other ranks hold copies of, and its named pieces."""

    what: str
    """Prefix of the parameter's name in messages: ``""`` for a weight, ``"the moment exp_avg of "``."""
    tensor: Tensor
    pieces: tuple[tuple[str, Tensor], ...]
    over_dp: Group | None
    """Group of the replicas that hold equal copies; None for buffers, which are compared over tp alone."""
    over_tp: bool
    tied: Tie | None
    shard: int = 0
    """Index of the optimizer state's shard; 0 for tensors that are not sharded."""
    is_expert: bool = False
    """True for experts sharded over ep ranks."""


class NamedPiece(NamedTuple):
    """Identity of a part of a parameter; all ranks that hold it must hold equal bits."""

    what: str
    name: str
    first: int | None
    """tp rank of the part, or the first rank with the same experts; None when all tp ranks hold it."""
    shard: int


def bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, () int64; a single flipped bit always changes it."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().view(-1)
    size = flat.element_size()
    aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(WORDS[8 if aligned else size]).sum(dtype=torch.int64)


def replicated_tensors(parts: Parts) -> Iterator[ReplicatedTensor]:
    """Yield this rank's tensors that other ranks hold copies of, in the same order on all ranks with copies.

    Blocks until posted all-gathers of weights are done.
    """
    index = 0
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        for bucket in replica.buckets:
            states, steps = read_states(parts.optimizer, index)
            index += 1
            moments = {f"{_moment_name(name)} of ": state for name, state in states.items()} if steps else {}
            if bucket.flat is not None:
                yield _of_bucket("", bucket, bucket.flat, parts.mesh.replicas_of(is_expert=bucket.kind.is_expert))
            if bucket.flat is None or bucket.is_mixed_precision:
                moments["" if bucket.flat is None else "the master of "] = bucket.master
            for what, tensor in moments.items():
                yield _of_bucket(what, bucket, tensor, bucket.sharding.copies, bucket.sharding.shard.rank)
        for bucket in replica.frozen_shards:
            yield _of_bucket("", bucket, bucket.master, bucket.sharding.copies, bucket.sharding.shard.rank)
        for member in replica.frozen:
            kind, parameter = member.kind, member.parameter.detach()
            named = ((member.info.name, parameter),)
            replicas = parts.mesh.replicas_of(is_expert=kind.is_expert)
            yield ReplicatedTensor(
                "", parameter, named, replicas, kind.replicated_over_tp, kind.tied, is_expert=kind.is_expert
            )
    for name, buffer in parts.running().items():
        yield ReplicatedTensor("the buffer ", buffer, ((name, buffer),), over_dp=None, over_tp=True, tied=None)


def _moment_name(name: str) -> str:
    return "the momentum" if name == "momentum" else f"the moment {name}"


def _of_bucket(
    what: str, bucket: ShardedParameters, tensor: Tensor, over_dp: Group, shard: int = 0
) -> ReplicatedTensor:
    """Return a bucket's tensor with its named pieces. ``tensor``: flat, the whole bucket or this rank's shard of it."""
    begin, end = (0, bucket.numel) if tensor.numel() == bucket.numel else bucket.shard_range
    pieces = []
    for slot in bucket.slots:
        start, stop = max(slot.start, begin), min(slot.stop, end)
        if start < stop:
            pieces.append((slot.member.info.name, tensor[start - begin : stop - begin]))
    return ReplicatedTensor(
        what,
        tensor,
        tuple(pieces),
        over_dp,
        bucket.kind.replicated_over_tp,
        bucket.kind.tied,
        shard,
        bucket.kind.is_expert,
    )


def check_drift(parts: Parts) -> None:
    """Compare all copies that must be bitwise equal. Collective over all ranks, between two steps; blocks.

    Each group all-reduces 16 bytes per tensor that it holds copies of.

    Raises:
        DriftError: on every rank, when some copies differ.
    """
    mesh = parts.mesh
    tensors: list[ReplicatedTensor] = []
    hashes = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    for each in replicated_tensors(parts):  # 8-bit states are dequantised one at a time, and freed after hashing
        hashes = torch.cat([hashes, bits(each.tensor).view(1).to(mesh.device)])
        tensors.append(each._replace(tensor=hashes, pieces=()))
    over_dp: dict[tuple[int, ...], list[int]] = defaultdict(list)
    groups = {each.over_dp.ranks: each.over_dp for each in tensors if each.over_dp is not None}
    for index, each in enumerate(tensors):
        if each.over_dp is not None:
            over_dp[each.over_dp.ranks].append(index)
    over_tp = [index for index, each in enumerate(tensors) if each.over_tp]
    differs = _differs(mesh.tp, hashes, over_tp)
    for ranks, indices in over_dp.items():
        differs |= _differs(groups[ranks], hashes, indices)
    for group, copies in _ties(tensors):
        differs |= _differs(group, hashes, [first for first, *_ in copies])
        for first, *others in copies:
            for other in others:  # copies in two stages of this rank
                differs[other] |= hashes[other] != hashes[first]
    any_differs = differs.any().long()
    mesh.world.all_reduce(any_differs, "max").wait()
    if any_differs.item():
        raise DriftError("MW-WATCH-001", _message(parts, differs.tolist()))


def _differs(group: Group, hashes: Tensor, indices: Sequence[int]) -> Tensor:
    """Return a mask (num_tensors,) bool of the hashes that differ within a group. Collective over the group; blocks.

    One all-reduce of 16 bytes per index. ``hashes``: (num_tensors,) int64. ``indices``: the hashes to compare; the
    others stay False.
    """
    differs = torch.zeros(len(hashes), dtype=torch.bool, device=hashes.device)
    if group.size > 1 and indices:
        own = hashes[list(indices)]
        extremes = torch.cat([own, ~own])  # the smallest h has the largest ~h; -h overflows for the smallest integer
        group.all_reduce(extremes, "max").wait()
        largest, smallest = extremes[: len(own)], ~extremes[len(own) :]
        differs[list(indices)] = largest != smallest
    return differs


def _ties(tensors: Sequence[ReplicatedTensor]) -> list[tuple[Group, list[list[int]]]]:
    """Return the groups that hold tied weights, each with the indices of this rank's copies, tie by tie.

    The order is the same on all ranks.
    """
    groups: dict[tuple[int, ...], Group] = {}
    copies: dict[tuple[int, ...], dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, each in enumerate(tensors):
        if each.tied is not None:
            ranks = each.tied.ranks.ranks
            groups[ranks] = each.tied.ranks
            copies[ranks][each.tied.name, each.what].append(index)
    return [(groups[ranks], [copies[ranks][key] for key in sorted(copies[ranks])]) for ranks in sorted(groups)]


# ---------------------------------------------------------------------------------------------------- the error message


def _message(parts: Parts, differs: Sequence[bool]) -> str:
    """Return the error message: the tensors that differ, and their ranks. The same on every rank.

    Collective over all ranks (two gathers of objects); blocks. ``differs``: a flag for each of
    :func:`replicated_tensors`.
    """
    mesh, flagged = parts.mesh, zip(replicated_tensors(parts), differs, strict=True)
    own_suspects = {(each.what, name) for each, is_different in flagged if is_different for name, _ in each.pieces}
    suspects = {pair for pairs in mesh.world.gather_objects(own_suspects) for pair in pairs}
    own: list[tuple[NamedPiece, int]] = []
    for each in replicated_tensors(parts):
        for name, tensor in each.pieces:
            if (each.what, name) in suspects:
                own.append((NamedPiece(each.what, name, _part(mesh, each), each.shard), int(bits(tensor))))
    copies: dict[NamedPiece, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, hashes in enumerate(mesh.world.gather_objects(own, NamedPiece)):
        for piece, number in hashes:
            copies[piece][number].append(rank)
    step = parts.state.step
    different = [(piece, list(ranks.values())) for piece, ranks in copies.items() if len(ranks) > 1]
    if not different:
        names = ", ".join(sorted(name for _, name in suspects)[:MAX_NAMED])
        text = f"replicas differ after step {step} in the padding between the parameters of a bucket ({names})"
    else:
        piece, ranks = different[0]
        text = f"replicas of {piece.what}{piece.name} differ after step {step}: {differing_pieces(mesh.grid, ranks)}"
        others = list(dict.fromkeys(f"{each.what}{each.name}" for each, _ in different[1:]))
        if others:
            more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
            text += f". So do those of {', '.join(others[:MAX_NAMED])}{more}"
    return (
        f"{text}. This step is not saved: the same command resumes from the last checkpoint. Copies drift apart by "
        f"faults of memory, device or network: if it recurs, exclude the machines of these ranks; if it recurs on "
        f"others, run `meshwright verify`: a replicated layer may get only a shard of its input features"
    )


def _part(mesh: Mesh, each: ReplicatedTensor) -> int | None:
    """Return an index that identifies this rank's part of the tensor: equal on all ranks with a copy of the part."""
    if each.over_tp:
        return None
    return mesh.expert_replicas.ranks[0] if each.is_expert else mesh.at.tp_rank


def differing_pieces(grid: Grid, copies: Sequence[Sequence[int]]) -> str:
    """Return a phrase that names the ranks to blame.

    ``copies``: one list of ranks for each distinct bit pattern. Ranks outside the majority are to blame; without a
    majority all ranks are named.
    """
    ordered = sorted((sorted(ranks) for ranks in copies), key=lambda ranks: (-len(ranks), ranks))
    total = sum(map(len, ordered))
    if 2 * len(ordered[0]) > total:
        odd = sorted(rank for ranks in ordered[1:] for rank in ranks)
        verb = "is" if len(odd) == 1 else "are"
        same = f"the other {len(ordered[0])} copies (ranks {numbers(ordered[0])})"
        return f"{ranks_at(grid, odd)} {verb} unlike {same}"
    parties = " and ".join(ranks_at(grid, ranks) for ranks in ordered)
    which = "which one is wrong" if total == 2 else "which ones are wrong"
    return f"{parties} hold different bits, and of {total} copies it is unknown {which}"
