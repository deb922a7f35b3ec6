"""Replica drift: comparison of tensors that must be bitwise equal on several ranks,
and the error that names copies.

    tensor                      equal on all ranks of
    weights, frozen ones too    each group of holders.whole_copies, and the tied stages
    moments, fp32 masters       each group of holders.copies: of ranks with this shard; and the tied stages
    running buffers             tp

A difference comes from a bit flipped in memory, a faulty link, or a kernel that adds in another order
on one rank.

A check is cheap. Each flat tensor is hashed to one number: the sum of its bits as integers, which
any single flipped bit changes. One small all-reduce per group compares the largest and smallest
hash over the ranks that hold a copy. Only if they differ are the single parameters hashed and
gathered, so that the message can name the parameter and the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import ShardedParameters, slot_parts
from meshwright.errors import DriftError
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders
from meshwright.optimizer import read_states
from meshwright.parts import Parts
from meshwright.watch.ranks import numbers, ranks_at

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_NAMED = 4
"""Limit of further tensors that the message names."""


class ReplicatedTensor(NamedTuple):
    """A tensor of this rank that other ranks hold copies of, and its named pieces."""

    what: str
    """Prefix of the parameter's name in messages: ``""`` for a weight,
    ``"the moment exp_avg of "``.
    """
    tensor: Tensor
    pieces: tuple[tuple[str, Tensor], ...]
    copies: tuple[Group, ...]
    """Groups of ranks with equal copies, on this stage."""
    holders: Holders = Holders()
    """Holders of its parameters: here of their slices and ties."""
    shard: int = 0
    """Index of the optimizer state's shard; 0 for tensors that are not sharded."""


class NamedPiece(NamedTuple):
    """Identity of a part of a parameter; all ranks that hold it must hold equal bits."""

    what: str
    name: str
    slice: int
    """Index of the slice among the tp or ep ranks; 0 of a whole parameter."""
    shard: int


def bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, () int64;
    a single flipped bit always changes it.
    """
    flat = (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        .detach()
        .contiguous()
        .view(-1)
    )
    size = flat.element_size()
    aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(WORDS[8 if aligned else size]).sum(dtype=torch.int64)


def replicated_tensors(parts: Parts) -> Iterator[ReplicatedTensor]:
    """Yield this rank's tensors that other ranks hold copies of,
    in the same order on all ranks with copies.

    Blocks until posted all-gathers of weights are done.
    """
    index = 0
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        for bucket in replica.buckets:
            states, steps = read_states(parts.optimizer, index)
            index += 1
            moments = {}
            if steps:
                moments = {f"{_moment_name(name)} of ": state for name, state in states.items()}
            if bucket.flat is not None:
                yield _of_bucket("", bucket, bucket.flat)
            if bucket.flat is None or bucket.is_mixed_precision:
                moments["" if bucket.flat is None else "the master of "] = bucket.master
            for what, tensor in moments.items():
                yield _of_bucket(what, bucket, tensor)
        for bucket in replica.frozen_shards:
            yield _of_bucket("", bucket, bucket.master)
        for member in replica.frozen:
            parameter, holders = member.parameter.detach(), member.holders
            named = ((member.info.name, parameter),)
            yield ReplicatedTensor("", parameter, named, holders.whole_copies, holders)
    for name, buffer in parts.running().items():
        yield ReplicatedTensor("the buffer ", buffer, ((name, buffer),), (parts.mesh.tp,))


def _moment_name(name: str) -> str:
    return "the momentum" if name == "momentum" else f"the moment {name}"


def _of_bucket(what: str, bucket: ShardedParameters, tensor: Tensor) -> ReplicatedTensor:
    """Return a bucket's tensor with its named pieces. ``tensor``: flat,
    the whole bucket or this rank's shard of it.
    """
    holders, is_whole = bucket.holders, tensor.numel() == bucket.numel
    begin, end = (0, bucket.numel) if is_whole else bucket.shard_range
    pieces = [
        (part.slot.member.info.name, tensor[part.start - begin : part.stop - begin])
        for part in slot_parts(bucket.slots, begin, end)
    ]
    copies = holders.whole_copies if is_whole else holders.copies
    shard = 0 if is_whole else holders.shard_group.rank
    return ReplicatedTensor(what, tensor, tuple(pieces), copies, holders, shard)


def check_drift(parts: Parts) -> None:
    """Compare all copies that must be bitwise equal. Collective over all ranks, between two steps;
    blocks.

    Each group all-reduces 16 bytes per tensor that it holds copies of.

    Raises:
        DriftError: on every rank, when some copies differ.
    """
    mesh = parts.mesh
    tensors: list[ReplicatedTensor] = []
    hashes = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    # 8-bit states are dequantised one at a time, and freed after hashing
    for each in replicated_tensors(parts):
        hashes = torch.cat([hashes, bits(each.tensor).view(1).to(mesh.device)])
        tensors.append(each._replace(tensor=hashes, pieces=()))
    differs = torch.zeros(len(hashes), dtype=torch.bool, device=mesh.device)
    groups = {mesh.tp.ranks: mesh.tp}
    indices_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, each in enumerate(tensors):
        for group in each.copies:
            groups[group.ranks] = group
            indices_of[group.ranks].append(index)
    for ranks, group in groups.items():  # in the same order on all ranks of a group
        differs |= _differs(group, hashes, indices_of[ranks])
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
    """Return a mask (num_tensors,) bool of the hashes that differ within a group.
    Collective over the group; blocks.

    One all-reduce of 16 bytes per index. ``hashes``: (num_tensors,) int64. ``indices``: the hashes
    to compare; the others stay False.
    """
    differs = torch.zeros(len(hashes), dtype=torch.bool, device=hashes.device)
    if group.size > 1 and indices:
        own = hashes[list(indices)]
        # the smallest h has the largest ~h; -h overflows for the smallest integer
        extremes = torch.cat([own, ~own])
        group.all_reduce(extremes, "max").wait()
        largest, smallest = extremes[: len(own)], ~extremes[len(own) :]
        differs[list(indices)] = largest != smallest
    return differs


def _ties(tensors: Sequence[ReplicatedTensor]) -> list[tuple[Group, list[list[int]]]]:
    """Return the groups that hold tied weights, each with the indices of this rank's copies,
    tie by tie.

    The order is the same on all ranks.
    """
    groups: dict[tuple[int, ...], Group] = {}
    copies: dict[tuple[int, ...], dict[tuple[str, str], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for index, each in enumerate(tensors):
        tie = each.holders.tied
        if tie is not None:
            groups[tie.ranks.ranks] = tie.ranks
            copies[tie.ranks.ranks][tie.name, each.what].append(index)
    return [
        (groups[ranks], [copies[ranks][key] for key in sorted(copies[ranks])])
        for ranks in sorted(groups)
    ]


# ----------------------------------------------------------------------------------------------------
# the error message


def _message(parts: Parts, differs: Sequence[bool]) -> str:
    """Return the error message: the tensors that differ, and their ranks. The same on every rank.

    Collective over all ranks (two gathers of objects); blocks. ``differs``: a flag for each of
    :func:`replicated_tensors`.
    """
    mesh, flagged = parts.mesh, zip(replicated_tensors(parts), differs, strict=True)
    own_suspects = {
        (each.what, name)
        for each, is_different in flagged
        if is_different
        for name, _ in each.pieces
    }
    suspects = {pair for pairs in mesh.world.gather_objects(own_suspects) for pair in pairs}
    own: list[tuple[NamedPiece, int]] = []
    for each in replicated_tensors(parts):
        for name, tensor in each.pieces:
            if (each.what, name) in suspects:
                piece = NamedPiece(each.what, name, each.holders.slices.rank, each.shard)
                own.append((piece, int(bits(tensor))))
    copies: dict[NamedPiece, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, hashes in enumerate(mesh.world.gather_objects(own, NamedPiece)):
        for piece, number in hashes:
            copies[piece][number].append(rank)
    step = parts.state.step
    different = [(piece, list(ranks.values())) for piece, ranks in copies.items() if len(ranks) > 1]
    if not different:
        names = ", ".join(sorted(name for _, name in suspects)[:MAX_NAMED])
        text = (
            f"replicas differ after step {step} in the padding between the parameters of a bucket"
            f" ({names})"
        )
    else:
        piece, ranks = different[0]
        text = (
            f"replicas of {piece.what}{piece.name} differ after step {step}:"
            f" {differing_pieces(mesh.grid, ranks)}"
        )
        others = list(dict.fromkeys(f"{each.what}{each.name}" for each, _ in different[1:]))
        if others:
            more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
            text += f". So do those of {', '.join(others[:MAX_NAMED])}{more}"
    return (
        f"{text}. This step is not saved: the same command resumes from the last checkpoint. Copies"
        " drift apart by faults of memory, device or network: if it recurs, exclude the machines"
        " of these ranks; if it recurs on others, run `meshwright verify`: a replicated layer may"
        " get only a shard of its input features"
    )


def differing_pieces(grid: Grid, copies: Sequence[Sequence[int]]) -> str:
    """Return a phrase that names the ranks to blame.

    Ranks outside the majority are to blame; without a majority all ranks are named.

    ``copies``: one list of ranks for each distinct bit pattern.
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
