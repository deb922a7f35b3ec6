"""Collectives and point-to-point exchanges over one group: handles, byte counts, errors that name the peers.

A :class:`Group` of one rank does nothing and needs no torch.distributed: the same code runs in a single plain process.
Every call is counted in the mesh's :class:`Traffic` with the bytes that a rank puts on the wire by the ring formulas
(n ranks, a message of M bytes, the whole tensor):

    all-reduce 2 M (n-1)/n     all-gather, reduce-scatter M (n-1)/n     send M
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import CommunicationError
from meshwright.mesh.activity import Activity, Waits
from meshwright.mesh.messages import MAX_BYTES, decode, encode

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renames both and warns of the old names, which are all that 2.11 and 2.12 have
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

WIRE_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


class Counted(NamedTuple):
    """Calls of one kind and the bytes that this rank put on the wire in them."""

    calls: int = 0
    wire_bytes: float = 0.0


@dataclass
class Traffic:
    """Traffic of this rank up to now: ``counts[(group name, operation)]``."""

    counts: dict[tuple[str, str], Counted] = field(default_factory=lambda: defaultdict(Counted))

    def add(self, group: str, operation: str, size: int, message_bytes: int) -> None:
        """Count one call with a message of ``message_bytes`` (the whole tensor) among ``size`` ranks."""
        calls, wire_bytes = self.counts[group, operation]
        self.counts[group, operation] = Counted(calls + 1, wire_bytes + WIRE_FACTORS[operation](size) * message_bytes)

    def reset(self) -> None:
        """Start counting anew."""
        self.counts.clear()

    def wire_bytes(self, group: str) -> float:
        """Return the bytes on the wire of all operations of one group."""
        return sum(counted.wire_bytes for (name, _), counted in self.counts.items() if name == group)


class Handle:
    """A posted operation. ``wait`` blocks (on CUDA: the current stream) until it is done; safe to call twice."""

    def __init__(
        self,
        works: Sequence[Any],
        what: str | Callable[[], str],
        keep: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        group: Group | None = None,
        peers: Sequence[int] = (),
        sends: bool = False,
        number: int = 0,
    ) -> None:
        self._works = works
        self._finish = finish  # what is left to do here when the message has come
        self._what = what
        self._keep = keep  # gloo reads a sent tensor until the send is done
        self._group = group
        self._peers = peers  # of a collective none; of each work one, or of all works together
        self._sends = sends
        self._number = number
        self._at = 0
        self._posted_s = time.monotonic()

    def wait(self) -> None:
        """Block until done; a failure becomes a :class:`CommunicationError` that names the operation and the peers."""
        if self._works:
            assert self._group is not None
            activity = self._group.activity
            activity.waits(self)
            try:
                for at, work in enumerate(self._works):
                    self._at = at
                    work.wait()
            except RuntimeError as error:
                waited_s = time.monotonic() - self._posted_s
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise CommunicationError(
                    "MW-MESH-001", f"{self._named()} failed after {waited_s:.1f} s: {reason}"
                ) from error
            finally:
                activity.waits(None)
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._works = self._keep = ()

    def join(self) -> None:
        """Make the current CUDA stream wait too, in addition to the stream that will call ``wait``."""
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        """Return True when ``wait`` would not block."""
        return all(work.is_completed() for work in self._works)

    def waits(self) -> Waits:
        """Return the operation that ``wait`` blocks for."""
        assert self._group is not None
        what = self._what if isinstance(self._what, str) else self._what()
        if self._number:
            return self._group.waits_in(what, self._number)
        one_each = len(self._works) == len(self._peers)
        peers = [self._peers[self._at]] if one_each else sorted(set(self._peers))
        ranks = tuple(self._group.ranks[peer] for peer in peers)
        return Waits("send" if self._sends else "receive", ranks, what)

    def _named(self) -> str:
        assert self._group is not None
        me, what = self._group.ranks[self._group.rank], self._what if isinstance(self._what, str) else self._what()
        among = f" among the {self._group.name} ranks {list(self._group.ranks)}" if self._number else ""
        return f"rank {me}: {what}{among}"


class _Blocking(NamedTuple):
    """Description of a blocking collective, which has no handle."""

    group: Group
    what: str
    number: int

    def waits(self) -> Waits:
        return self.group.waits_in(self.what, self.number)


class Transfer(NamedTuple):
    """One tensor to or from a peer of the group (its position in the group)."""

    tensor: Tensor
    peer: int
    sends: bool


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and the offset of its first element in it, valid while the storage lives.

    Tensors on the meta device have both too, but no address.
    """
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


class Group:
    """Communication group of one axis (or of all ranks). ``name`` is the axis, ``ranks`` are global, in order."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        process_group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        """Position of this rank in ``ranks``."""
        self.process_group = process_group
        self.traffic = traffic if traffic is not None else Traffic()
        self.activity = activity if activity is not None else Activity()
        self._key = f"{name}-{zlib.crc32(repr(ranks).encode()):08x}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copy of a layer talks to the same ranks

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks={list(self.ranks)}, rank={self.rank})"

    def chunks(self, starts: Sequence[int]) -> Iterator[int]:
        """Yield the starts of the chunks of a long computation on this rank, each of which is to be run."""
        yield from starts

    def begin_collective(self, operation: str, tensor: Tensor, parts: int = 1) -> None:
        """Count and record a blocking collective on the bare process group, as megatron-core makes it.

        The message has ``parts`` times the bytes of ``tensor``. A meta tensor has no bytes to send: nothing is counted.
        """
        if tensor.is_meta:
            return
        self._count(operation, tensor_bytes(tensor) * parts)
        self.activity.waits(_Blocking(self, operation.replace("_", "-"), self.activity.posts(self._key)))

    def end_collective(self) -> None:
        """Record the end of that collective."""
        self.activity.waits(None)

    def waits_in(self, what: str, number: int) -> Waits:
        """Return the description of a collective of this group that blocks."""
        others = tuple(rank for rank in self.ranks if rank != self.ranks[self.rank])
        return Waits("collective", others, what, self.name, self._key, number)

    def _count(self, operation: str, message_bytes: int) -> None:
        self.traffic.add(self.name, operation, self.size, message_bytes)

    def _handle(
        self, work: Any, what: str, keep: Sequence[Tensor] = (), finish: Callable[[], object] | None = None
    ) -> Handle:
        return Handle([work], what, keep, finish, self, number=self.activity.posts(self._key))

    def all_reduce(self, tensor: Tensor, op: str = "sum", finish: Callable[[], object] | None = None) -> Handle:
        """All-reduce in place. Does not block: ``wait`` on the handle blocks, then calls ``finish``.

        Wire: 2 M (n-1)/n bytes.
        """
        if self.size == 1 or tensor.is_meta:
            return Handle([], "")
        assert tensor.is_contiguous(), "a sum into a copy would be lost"
        self._count("all_reduce", tensor_bytes(tensor))
        work = dist.all_reduce(tensor, REDUCTIONS[op], group=self.process_group, async_op=True)
        return self._handle(work, f"all-reduce of {tuple(tensor.shape)}", [tensor], finish)

    def all_gather(self, out: Tensor, part: Tensor) -> Handle:
        """All-gather: ``out`` (n x part, flat along dim 0) = every rank's ``part`` in group order. Does not block."""
        if self.size == 1:
            if place_of(out) != place_of(part):
                out.copy_(part.view_as(out))
            return Handle([], "")
        self._count("all_gather", tensor_bytes(out))
        work = _all_gather(out, part, group=self.process_group, async_op=True)
        return self._handle(work, f"all-gather into {tuple(out.shape)}", [out, part])

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Handle:
        """Reduce-scatter: ``part`` = this rank's slice of the sum of every rank's ``whole`` (n x part, dim 0). Does not
        block.

        On CPU each rank sends every other its slice, and ``wait`` sums them in rank order: gloo's own reduce-scatter is
        an all-reduce and a copy, 2 M (n-1)/n on the wire. ``part`` may be a slice of ``whole``.
        """
        if self.size == 1:
            if place_of(part) != place_of(whole):
                part.copy_(whole.view_as(part))
            return Handle([], "")
        self._count("reduce_scatter", tensor_bytes(whole))
        if whole.device.type == "cpu":
            slices = torch.empty_like(whole)
            work = dist.all_to_all_single(slices, whole, group=self.process_group, async_op=True)
            return self._handle(
                work,
                f"reduce-scatter of {tuple(whole.shape)}",
                [whole],
                lambda: torch.sum(slices.view(self.size, *part.shape), 0, out=part),
            )
        work = _reduce_scatter(part, whole, group=self.process_group, async_op=True)
        return self._handle(work, f"reduce-scatter of {tuple(whole.shape)}", [part, whole])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Handle:
        """Broadcast ``tensor`` from group position ``source``, in place. Does not block. Wire: M (n-1)/n bytes."""
        if self.size == 1:
            return Handle([], "")
        self._count("broadcast", tensor_bytes(tensor))
        work = dist.broadcast(tensor, self.ranks[source], group=self.process_group, async_op=True)
        return self._handle(work, f"broadcast of {tuple(tensor.shape)} from rank {self.ranks[source]}", [tensor])

    def exchange(self, transfers: Sequence[Transfer], what: Callable[[], str]) -> tuple[Handle | None, Handle | None]:
        """Post point-to-point sends and receives together (one NCCL group: no order can deadlock). Does not block.

        Messages between an ordered pair of ranks are matched in the order in which they are posted. ``what`` is called
        on failure. Returns the handle of the sends (keeps the tensors alive) and that of the receives, each None if
        empty. Wire: the bytes of the sent tensors.
        """
        if not transfers:
            return None, None
        sent = [tensor for tensor, _, sends in transfers if sends]
        for tensor in sent:
            self._count("send", tensor_bytes(tensor))
        if transfers[0].tensor.is_cuda:
            works = self._coalesced(transfers)
            if len(works) != len(transfers):  # NCCL coalesces: one work for all
                peers = [transfer.peer for transfer in transfers]
                handle = Handle(works, what, [transfer.tensor for transfer in transfers], None, self, peers)
                return (handle if sent else None), (handle if len(sent) < len(transfers) else None)
        else:  # what dist.isend and irecv come to, without their checks: there are many small messages
            assert self.process_group is not None
            send, receive = self.process_group.send, self.process_group.recv
            works = [(send if sends else receive)([tensor], peer, 0) for tensor, peer, sends in transfers]
        posted: list[Any] = []
        arriving: list[Any] = []
        to: list[int] = []
        of: list[int] = []
        for work, (_, peer, sends) in zip(works, transfers, strict=True):
            (posted if sends else arriving).append(work)
            (to if sends else of).append(peer)
        return (
            Handle(posted, what, sent, None, self, to, sends=True) if posted else None,
            Handle(arriving, what, (), None, self, of) if arriving else None,
        )

    def _coalesced(self, transfers: Sequence[Transfer]) -> list[Any]:
        operations = [
            dist.P2POp(
                dist.isend if transfer.sends else dist.irecv,
                transfer.tensor,
                self.ranks[transfer.peer],
                group=self.process_group,
            )
            for transfer in transfers
        ]
        return dist.batch_isend_irecv(operations)

    def gather_objects(self, value: Any, *kinds: type) -> list[Any]:
        """Gather a small ``value`` of every rank, in group order. Blocks.

        Sent as JSON (framework/mesh/messages.py): plain Python values, and the NamedTuples and Enums in ``kinds``.
        Two all-gathers, of the lengths and of the bytes padded to the longest.

        Raises:
            CommunicationError: a message cannot be decoded, or is too long.
        """
        if self.size == 1:
            return [value]
        message = encode(value, kinds)
        if len(message) > MAX_BYTES:
            raise CommunicationError(
                "MW-MESH-002", f"a value of {len(message)} bytes is more than ranks gather ({MAX_BYTES})"
            )
        self.activity.waits(_Blocking(self, "gathering of small values", self.activity.posts(self._key)))
        device = "cuda" if dist.get_backend(self.process_group) == "nccl" else "cpu"
        lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        _all_gather(lengths, torch.tensor([len(message)], device=device), group=self.process_group)
        longest = int(lengths.max())
        if not 0 < longest <= MAX_BYTES or int(lengths.min()) < 1:
            raise CommunicationError(
                "MW-MESH-003", f"ranks say that they send {lengths.tolist()} bytes: at most {MAX_BYTES} can be"
            )
        mine = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device=device)
        _all_gather(everyone, mine, group=self.process_group)
        self.activity.waits(None)
        rows = everyone.cpu().view(self.size, longest)
        return [
            decode(row[:length].numpy().tobytes(), kinds) for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the group as a DeviceMesh for torch's fully_shard. Does not communicate."""
        assert self.process_group is not None
        return DeviceMesh.from_group(self.process_group, device_type)

    def barrier(self) -> None:
        """Block until every rank of the group has called this."""
        if self.size > 1:
            work = dist.barrier(group=self.process_group, async_op=True)
            self._handle(work, "barrier").wait()
