"""Replicas that drift apart: what must be the same bits on several ranks is compared, and what is not is named.

    what                        the same on all ranks of        told apart by
    weights                     dp                              a bit flipped in memory, a faulty link, a kernel that
      replicated over tp        dp, tp                          adds in another order on one rank
      tied                      dp, tied stages (, tp)
    moments, fp32 masters       dp with zero = 0, else the groups that have their own shards (, tp, tied)
    frozen parameters           dp (, tp, tied)
    running buffers             tp

A check is cheap: each flat tensor is one number, the sum of its bits as integers, which any single flipped bit changes;
the numbers' largest and smallest over the ranks that hold it go round in one small all-reduce per axis. Only when they
differ are single tensors hashed and gathered, so that the parameter and the rank can be named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import ShardedParameters, Tie, kind_of
from meshwright.errors import DriftError
from meshwright.mesh.comm import Group
from meshwright.mesh.grid import Grid
from meshwright.parts import Parts
from meshwright.watch.ranks import numbers, ranks_at

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_NAMED = 4
"""Further tensors that are named in the message."""


class ReplicatedTensor(NamedTuple):
    """A tensor of this rank of which others hold copies, and the named pieces of it."""

    what: str
    """Before the name of a parameter: ``""`` for a weight, ``"the moment exp_avg of "``."""
    tensor: Tensor
    pieces: tuple[tuple[str, Tensor], ...]
    over_dp: Group | None
    """The replicas that hold the same."""
    over_tp: bool
    tied: Tie | None
    shard: int = 0
    """Which one it is of those that differ among replicas."""


class NamedPiece(NamedTuple):
    """What must be equal: a parameter's part, wherever a copy of it is held."""

    what: str
    name: str
    tp_rank: int | None
    """None: all tp ranks hold it."""
    shard: int


def bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers, () int64; a single flipped bit always changes it."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().view(-1)
    size = flat.element_size()
    aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(WORDS[8 if aligned else size]).sum(dtype=torch.int64)


def replicated_tensors(parts: Parts) -> Iterator[ReplicatedTensor]:
    """All of this rank that others hold too, in an order that they share. Blocks until weights are whole."""
    index = 0
    for replica in parts.replicas.values():
        replica.ready_all()
        for bucket in replica.buckets:
            states, steps = parts.optimizer.states(index)
            index += 1
            stepped = {f"{_called(name)} of ": state for name, state in states.items()} if steps else {}
            if bucket.flat is not None:
                yield _of_bucket("", bucket, bucket.flat, parts.mesh.dp)
            if bucket.flat is None or not bucket.same_dtype:
                stepped["" if bucket.flat is None else "the master of "] = bucket.master
            for what, tensor in stepped.items():
                yield _of_bucket(what, bucket, tensor, bucket.sharding.copies, bucket.sharding.shard.rank)
        for member in replica.frozen:
            kind, parameter = kind_of(member), member.parameter.detach()
            named = ((member.info.name, parameter),)
            yield ReplicatedTensor("", parameter, named, parts.mesh.dp, kind.replicated_over_tp, kind.tied)
    for name, buffer in parts.running().items():
        yield ReplicatedTensor("the buffer ", buffer, ((name, buffer),), over_dp=None, over_tp=True, tied=None)


def _called(name: str) -> str:
    return "the momentum" if name == "momentum" else f"the moment {name}"


def _of_bucket(
    what: str, bucket: ShardedParameters, tensor: Tensor, over_dp: Group, shard: int = 0
) -> ReplicatedTensor:
    """``tensor``: flat, the whole bucket or my shard of it."""
    begin, end = (0, bucket.numel) if tensor.numel() == bucket.numel else bucket.shard_range
    pieces = []
    for place in bucket.places:
        start, stop = max(place.start, begin), min(place.stop, end)
        if start < stop:
            pieces.append((place.member.info.name, tensor[start - begin : stop - begin]))
    return ReplicatedTensor(
        what, tensor, tuple(pieces), over_dp, bucket.kind.replicated_over_tp, bucket.kind.tied, shard
    )


def check_drift(parts: Parts) -> None:
    """Compare all that must be the same. Every rank calls it, between two steps.

    Raises:
        DriftError: on every rank, when some copies are not the same bits.
    """
    mesh = parts.mesh
    mine: list[ReplicatedTensor] = []
    hashes = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    for each in replicated_tensors(parts):  # what is kept in 8 bits is widened here, and let go again
        hashes = torch.cat([hashes, bits(each.tensor).view(1).to(mesh.device)])
        mine.append(each._replace(tensor=hashes, pieces=()))
    over_dp: dict[tuple[int, ...], list[int]] = defaultdict(list)
    groups = {each.over_dp.ranks: each.over_dp for each in mine if each.over_dp is not None}
    for index, each in enumerate(mine):
        if each.over_dp is not None:
            over_dp[each.over_dp.ranks].append(index)
    over_tp = [index for index, each in enumerate(mine) if each.over_tp]
    differs = _differs(mesh.tp, hashes, over_tp)
    for ranks, indices in over_dp.items():
        differs |= _differs(groups[ranks], hashes, indices)
    for group, copies in _ties(mine):
        differs |= _differs(group, hashes, [first for first, *_ in copies])
        for first, *others in copies:
            for other in others:  # of two stages of this rank
                differs[other] |= hashes[other] != hashes[first]
    apart = differs.any().long()
    mesh.world.all_reduce(apart, "max").wait()
    if apart.item():
        raise DriftError(_message(parts, differs.tolist()))


def _differs(group: Group, hashes: Tensor, indices: Sequence[int]) -> Tensor:
    """True where the ranks of a group do not have the same number. One all-reduce."""
    found = torch.zeros(len(hashes), dtype=torch.bool, device=hashes.device)
    if group.size > 1 and indices:
        own = hashes[list(indices)]
        shared = torch.cat([own, ~own])  # the largest ~h is that of the smallest h; -h would overflow once
        group.all_reduce(shared, "max").wait()
        largest, smallest = shared[: len(own)], ~shared[len(own) :]
        found[list(indices)] = largest != smallest
    return found


def _ties(mine: Sequence[ReplicatedTensor]) -> list[tuple[Group, list[list[int]]]]:
    """The groups that hold tied weights, in one order on all ranks, each with the copies on this rank, tie by tie."""
    copies: dict[tuple[str, str], list[int]] = defaultdict(list)
    groups: dict[tuple[int, ...], Group] = {}
    for index, each in enumerate(mine):
        if each.tied is not None:
            copies[each.tied.name, each.what].append(index)
            groups[each.tied.ranks.ranks] = each.tied.ranks
    found = []
    for ranks in sorted(groups):
        here = [copies[key] for key in sorted(copies) if _tie(mine[copies[key][0]]).ranks.ranks == ranks]
        found.append((groups[ranks], here))
    return found


def _tie(each: ReplicatedTensor) -> Tie:
    assert each.tied is not None
    return each.tied


# ------------------------------------------------------------------------------------------------------------ the names


def _message(parts: Parts, differs: Sequence[bool]) -> str:
    """Which tensors, and on which ranks; the same on every rank. Gathers over the world."""
    mesh, all_held = parts.mesh, zip(replicated_tensors(parts), differs, strict=True)
    suspected = {(each.what, name) for each, bad in all_held if bad for name, _ in each.pieces}
    wanted = {pair for pairs in mesh.world.gather_objects(suspected) for pair in pairs}
    own: list[tuple[NamedPiece, int]] = []
    for each in replicated_tensors(parts):
        for name, tensor in each.pieces:
            if (each.what, name) in wanted:
                tp_rank = None if each.over_tp else mesh.at.tp_rank
                own.append((NamedPiece(each.what, name, tp_rank, each.shard), int(bits(tensor))))
    copies: dict[NamedPiece, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(mesh.world.gather_objects(own, NamedPiece)):
        for piece, number in found:
            copies[piece][number].append(rank)
    step = parts.state.step
    apart = [(piece, list(ranks.values())) for piece, ranks in copies.items() if len(ranks) > 1]
    if not apart:
        names = ", ".join(sorted(name for _, name in wanted)[:MOST_NAMED])
        text = f"replicas differ after step {step} between the parameters of a bucket ({names}), where all is zero"
    else:
        piece, ranks = apart[0]
        text = f"replicas of {piece.what}{piece.name} differ after step {step}: {differing_pieces(mesh.grid, ranks)}"
        others = list(dict.fromkeys(f"{each.what}{each.name}" for each, _ in apart[1:]))
        if others:
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            text += f". So do those of {', '.join(others[:MOST_NAMED])}{more}"
    return (
        f"{text}. Nothing is saved of it: the same command goes on from the last checkpoint. Copies drift apart by "
        f"faults of memory, device or network: if it comes again, leave these ranks' machines out"
    )


def differing_pieces(grid: Grid, copies: Sequence[Sequence[int]]) -> str:
    """Which ranks are to blame. ``copies``: the ranks that hold the same bits, for each of the bits that there are."""
    ordered = sorted((sorted(ranks) for ranks in copies), key=lambda ranks: (-len(ranks), ranks))
    total = sum(map(len, ordered))
    if 2 * len(ordered[0]) > total:
        odd = sorted(rank for ranks in ordered[1:] for rank in ranks)
        verb = "is" if len(odd) == 1 else "are"
        same = f"the other {len(ordered[0])} copies (ranks {numbers(ordered[0])})"
        return f"{ranks_at(grid, odd)} {verb} unlike {same}"
    parties = " and ".join(ranks_at(grid, ranks) for ranks in ordered)
    which = "which one is wrong" if total == 2 else "which ones are wrong"
    return f"{parties} hold different bits, and of {total} copies it cannot be told {which}"
