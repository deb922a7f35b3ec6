"""Collectives and point-to-point exchanges over one group.

A :class:`Group` of one rank does nothing and needs no torch.distributed: the same code runs in a
single plain process. Every call is counted in the mesh's :class:`~meshwright.mesh.traffic.Traffic`
(traffic.py has the formulas of the bytes on the wire). Calls that do not block return a handle
(handles.py), whose ``wait`` blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import CommunicationError
from meshwright.mesh.activity import Activity, Waits
from meshwright.mesh.handles import BlockingCollective, CollectiveHandle, TransferHandle
from meshwright.mesh.messages import MAX_BYTES, decode, encode
from meshwright.mesh.staged import Transfer, through_host
from meshwright.mesh.traffic import Traffic
from meshwright.mesh.turns import Turns

__all__ = [
    "CollectiveHandle",
    "Group",
    "Transfer",
    "TransferHandle",
    "place_of",
    "tensor_bytes",
]

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renames both and deprecates the old names; 2.11 and 2.12 have only these
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def even_shares(total: int, size: int) -> list[int]:
    """Return ``total`` shared out evenly over ``size`` ranks, the rest to the first ones."""
    share, rest = divmod(total, size)
    return [share + (rank < rest) for rank in range(size)]


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and the offset of its first element in it,
    valid while the storage lives.

    Tensors on the meta device have both too, but no address.
    """
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


class Group:
    """Communication group of one axis (or of all ranks). ``name`` is the axis,
    ``ranks`` are global, in order.
    """

    stages_messages = False
    """True in tests on CPU: send messages through host memory, as gloo must on CUDA (staged.py)."""
    takes_turns = True
    """True where messages are in flight while this rank computes; False in dry runs,
    where pairs run in order.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        process_group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        activity: Activity | None = None,
        key: str = "",
    ) -> None:
        """Create a group. ``key``: name in the activity,
        for groups with equal names and ranks (links).
        """
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        """Position of this rank in ``ranks``."""
        self.process_group = process_group
        self.traffic = traffic if traffic is not None else Traffic()
        self.activity = activity if activity is not None else Activity()
        self.turns = Turns()
        """Turns of the two computations of a pair:
        one runs while messages of the other are in flight.
        """
        self._key = key or f"{name}-{zlib.crc32(repr(ranks).encode()):08x}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied layer communicates over the same group

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks={list(self.ranks)}, rank={self.rank})"

    def chunks(self, starts: Sequence[int]) -> Iterator[int]:
        """Yield the starts of the chunks to run of a long computation:
        all of them (a dry run runs only the first).
        """
        yield from starts

    def begin_collective(self, operation: str, tensor: Tensor, parts: int = 1) -> None:
        """Count and record a blocking collective on the bare process group,
        as megatron-core makes it.

        The message has ``parts`` times the bytes of ``tensor``. A meta tensor has no bytes to send:
        nothing is counted.
        """
        if tensor.is_meta:
            return
        self._count(operation, tensor_bytes(tensor) * parts)
        self.activity.waits(
            BlockingCollective(self, operation.replace("_", "-"), self.activity.posts(self._key))
        )

    def end_collective(self) -> None:
        """Record the end of that collective."""
        self.activity.waits(None)

    def waits_in(self, operation: str, number: int) -> Waits:
        """Return the description of a collective of this group that blocks."""
        others = tuple(rank for rank in self.ranks if rank != self.ranks[self.rank])
        return Waits("collective", others, operation, self.name, self._key, number)

    def _count(self, operation: str, message_bytes: int) -> None:
        self.traffic.add(self.name, operation, self.size, message_bytes)

    def _handle(
        self,
        work: Any,
        what: str,
        keep: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
    ) -> CollectiveHandle:
        return CollectiveHandle(work, what, keep, finish, self, self.activity.posts(self._key))

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", finish: Callable[[], object] | None = None
    ) -> CollectiveHandle:
        """All-reduce in place. Does not block: ``wait`` on the handle blocks,
        then calls ``finish``.

        Wire: 2 M (n-1)/n bytes.
        """
        if self.size == 1 or tensor.is_meta:
            return CollectiveHandle(finish=finish)
        assert tensor.is_contiguous(), "a sum into a copy would be lost"
        self._count("all_reduce", tensor_bytes(tensor))
        work = dist.all_reduce(tensor, REDUCTIONS[op], group=self.process_group, async_op=True)
        return self._handle(work, f"all-reduce of {tuple(tensor.shape)}", [tensor], finish)

    def all_gather(self, out: Tensor, part: Tensor) -> CollectiveHandle:
        """All-gather: ``out`` (n x part, M bytes) = every rank's ``part`` in order. M (n-1)/n sent.
        Does not block.
        """
        if self.size == 1:
            if place_of(out) != place_of(part):
                out.copy_(part.view_as(out))
            return CollectiveHandle()
        if out.is_meta:
            return CollectiveHandle()
        self._count("all_gather", tensor_bytes(out))
        work = _all_gather(out, part, group=self.process_group, async_op=True)
        return self._handle(work, f"all-gather into {tuple(out.shape)}", [out, part])

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> CollectiveHandle:
        """Reduce-scatter: ``part`` = this rank's slice of the sum of every rank's ``whole`` (n x
        part, dim 0). Does not block.

        ``part`` may be a slice of ``whole``. Wire: M (n-1)/n bytes, M = bytes of ``whole``.
        """
        if self.size == 1:
            if place_of(part) != place_of(whole):
                part.copy_(whole.view_as(part))
            return CollectiveHandle()
        self._count("reduce_scatter", tensor_bytes(whole))
        what = f"reduce-scatter of {tuple(whole.shape)}"
        if whole.device.type == "cpu" or dist.get_backend(self.process_group) == "gloo":
            # gloo's own is an all-reduce and a copy, 2 M (n-1)/n bytes: here each rank gets the
            # slices of its part, and wait() sums them in rank order
            slices = torch.empty_like(whole)
            work = dist.all_to_all_single(slices, whole, group=self.process_group, async_op=True)
            of_ranks = slices.view(self.size, *part.shape)
            return self._handle(work, what, [whole], lambda: torch.sum(of_ranks, 0, out=part))
        work = _reduce_scatter(part, whole, group=self.process_group, async_op=True)
        return self._handle(work, what, [part, whole])

    def all_to_all(
        self, out: Tensor, whole: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveHandle:
        """Exchange elements all to all, with unequal splits. Does not block.

        ``whole`` (flat) is split into ``sizes`` elements for each rank, in group order. ``out``
        (flat) receives ``out_sizes`` elements from each rank.

        Wire: M (n-1)/n bytes, M = bytes of ``whole``: exact for equal splits.
        """
        if whole.is_meta:
            return CollectiveHandle()
        if self.size == 1:
            out.copy_(whole)
            return CollectiveHandle()
        self._count("all_to_all", tensor_bytes(whole))
        work = dist.all_to_all_single(
            out, whole, list(out_sizes), list(sizes), group=self.process_group, async_op=True
        )
        return self._handle(work, f"all-to-all of {tuple(whole.shape)}", [out, whole])

    def host_counts(self, counts: Tensor, total: int) -> list[list[int]]:
        """Return counts (rows, n), such as elements to and from each rank, as lists. On CUDA the
        host waits; on meta each row is ``total`` in even shares.
        """
        if counts.is_meta:
            return [even_shares(total, self.size)] * len(counts)
        on_host: list[list[int]] = counts.tolist()
        return on_host

    def broadcast(self, tensor: Tensor, source: int = 0) -> CollectiveHandle:
        """Broadcast ``tensor`` from group position ``source``, in place. Does not block.

        Wire: M (n-1)/n bytes.
        """
        if self.size == 1:
            return CollectiveHandle()
        self._count("broadcast", tensor_bytes(tensor))
        work = dist.broadcast(tensor, self.ranks[source], group=self.process_group, async_op=True)
        return self._handle(
            work, f"broadcast of {tuple(tensor.shape)} from rank {self.ranks[source]}", [tensor]
        )

    def transfer(
        self, tensors: Sequence[Tensor], peer: int, sends: bool, what: Callable[[], str]
    ) -> TransferHandle | None:
        """Send these tensors to ``peer``, or receive into them. Does not block.
        Returns None without tensors.

        Messages between an ordered pair of ranks are matched in the order in which they are posted.
        ``what`` is called on failure. Wire: the bytes of the sent tensors.
        """
        if not tensors:
            return None
        if sends:
            for tensor in tensors:
                self._count("send", tensor_bytes(tensor))
        finish = None
        if self.stages_messages or (
            tensors[0].is_cuda and dist.get_backend(self.process_group) == "gloo"
        ):
            tensors, finish = through_host(tensors, sends)
        if tensors[0].is_cuda:
            works = self._coalesced([Transfer(tensor, peer, sends) for tensor in tensors])
        else:
            # what dist.isend and irecv come to, without their checks: there are many small messages
            assert self.process_group is not None
            post = self.process_group.send if sends else self.process_group.recv
            works = [post([tensor], peer, 0) for tensor in tensors]
        return TransferHandle(works, what, tensors, self, [peer] * len(tensors), sends, finish)

    def exchange(
        self, transfers: Sequence[Transfer], what: Callable[[], str]
    ) -> list[TransferHandle]:
        """Post sends and receives with several peers; with NCCL as one batch,
        so that no order of them can deadlock.
        """
        if transfers[0].tensor.is_cuda and dist.get_backend(self.process_group) != "gloo":
            for tensor, _, sends in transfers:
                if sends:
                    self._count("send", tensor_bytes(tensor))
            tensors = [transfer.tensor for transfer in transfers]
            peers = [transfer.peer for transfer in transfers]
            return [TransferHandle(self._coalesced(transfers), what, tensors, self, peers)]
        posted = (self.transfer([tensor], peer, sends, what) for tensor, peer, sends in transfers)
        return [handle for handle in posted if handle is not None]

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

        Sent as JSON (mesh/messages.py): plain Python values, and the NamedTuples and Enums in
        ``kinds``. Two all-gathers, of the lengths and of the bytes padded to the longest.

        Raises:
            CommunicationError: a message cannot be decoded, or is too long.
        """
        if self.size == 1:
            return [value]
        message = encode(value, kinds)
        if len(message) > MAX_BYTES:
            raise CommunicationError(
                "MW-MESH-002",
                f"a value of {len(message)} bytes is more than ranks gather ({MAX_BYTES})",
            )
        self.activity.waits(
            BlockingCollective(self, "gathering of small values", self.activity.posts(self._key))
        )
        device = "cuda" if dist.get_backend(self.process_group) == "nccl" else "cpu"
        lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        _all_gather(lengths, torch.tensor([len(message)], device=device), group=self.process_group)
        longest = int(lengths.max())
        if not 0 < longest <= MAX_BYTES or int(lengths.min()) < 1:
            raise CommunicationError(
                "MW-MESH-003",
                f"ranks say that they send {lengths.tolist()} bytes: at most {MAX_BYTES} can be",
            )
        mine = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device=device)
        _all_gather(everyone, mine, group=self.process_group)
        self.activity.waits(None)
        rows = everyone.cpu().view(self.size, longest)
        return [
            decode(row[:length].numpy().tobytes(), kinds)
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def exchange_objects(self, values: Sequence[Any], *kinds: type) -> list[Any]:
        """Send ``values[i]`` to rank i of the group; return what each rank has sent, in group order.
        On CPU; blocks. Sent as in :meth:`gather_objects`.

        Raises:
            CommunicationError: a message cannot be decoded, or is too long.
        """
        messages = [encode(value, kinds) for value in values]
        lengths = torch.tensor([len(message) for message in messages])
        out_lengths = torch.empty_like(lengths)
        self.all_to_all(out_lengths, lengths, [1] * self.size, [1] * self.size).wait()
        if int(out_lengths.max()) > MAX_BYTES or int(out_lengths.min()) < 1:
            raise CommunicationError(
                "MW-MESH-019",
                f"ranks say that they send {out_lengths.tolist()} bytes: at most {MAX_BYTES} can be",
            )
        whole = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
        out = torch.empty(int(out_lengths.sum()), dtype=torch.uint8)
        self.all_to_all(out, whole, out_lengths.tolist(), lengths.tolist()).wait()
        parts = torch.split(out, out_lengths.tolist())
        return [decode(part.numpy().tobytes(), kinds) for part in parts]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the group as a DeviceMesh for torch's fully_shard. Does not communicate."""
        assert self.process_group is not None
        return DeviceMesh.from_group(self.process_group, device_type)

    def barrier(self) -> None:
        """Block until every rank of the group has called this."""
        if self.size > 1:
            work = dist.barrier(group=self.process_group, async_op=True)
            self._handle(work, "barrier").wait()
