"""Handles of posted collectives and point-to-point transfers.
A failed wait names the operation and the peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from meshwright.errors import CommunicationError
from meshwright.mesh.activity import Activity, Waits


class GroupMembers(Protocol):
    """Ranks of a group, as :class:`meshwright.mesh.comm.Group` stores them.

    comm.py imports this file: with the class itself each would need the other to be read.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    activity: Activity

    def waits_in(self, operation: str, number: int) -> Waits:
        """Return the description of a collective of this group that blocks."""


class BlockingCollective(NamedTuple):
    """Description of a collective without a handle."""

    group: GroupMembers
    operation: str
    number: int

    def waits(self) -> Waits:
        """Return the operation that blocks this rank."""
        return self.group.waits_in(self.operation, self.number)


@dataclass(eq=False)
class CollectiveHandle:
    """A posted collective; without arguments, one that is complete."""

    work: Any = None
    """torch's ``Work``; None: nothing was sent."""
    operation: str = ""
    """Description, such as ``all-reduce of (3,)``."""
    keep: Sequence[Tensor] = ()
    """Tensors to keep alive until the collective is done."""
    finish: Callable[[], object] | None = None
    """Computation on the result, called once at the end of ``wait``."""
    group: GroupMembers | None = None
    number: int = 0
    """Number of the collective among those of its group, from 1."""
    posted_s: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Block (on CUDA: the current stream) until done, then finish.
        Raise CommunicationError on failure.
        """
        if self.work is not None:
            assert self.group is not None
            group, activity = self.group, self.group.activity
            activity.waits(self)
            try:
                self.work.wait()
            except RuntimeError as error:
                among = f"{self.operation} among the {group.name} ranks {list(group.ranks)}"
                raise _failure(group, among, self.posted_s, error) from error
            finally:
                activity.waits(None)
        if self.finish is not None:
            self.finish()
            self.finish = None
        self.work, self.keep = None, ()

    def join(self) -> None:
        """Make the current CUDA stream wait too, besides the stream that calls ``wait``.
        Does not run ``finish``.
        """
        if self.work is not None:
            self.work.wait()

    def waits(self) -> Waits:
        """Return the operation that ``wait`` blocks for."""
        assert self.group is not None
        return self.group.waits_in(self.operation, self.number)


@dataclass(eq=False)
class TransferHandle:
    """Sends or receives that were posted together."""

    works: Sequence[Any]
    """torch's ``Work`` objects: one per tensor, or one for all (NCCL)."""
    operation: Callable[[], str]
    """Function that returns the description, such as ``1RECV_F3``.
    Called only on failure and by the watchdog.
    """
    keep: Sequence[Tensor]
    """Tensors to keep alive until done: gloo reads the sent ones until then."""
    group: GroupMembers
    peers: Sequence[int]
    """Position of each tensor's peer in the group."""
    sends: bool = False
    finish: Callable[[], None] | None = None
    """Function that copies received tensors to the device, called once at the end of ``wait``;
    None: none needed.
    """
    position: int = 0
    """Index in ``works`` of the one that blocks."""
    posted_s: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Block (on CUDA: the current stream) until all are done.
        Raise CommunicationError on failure.
        """
        if not self.works:
            return
        activity = self.group.activity
        activity.waits(self)
        try:
            for position, work in enumerate(self.works):
                self.position = position
                work.wait()
        except RuntimeError as error:
            raise _failure(self.group, self.operation(), self.posted_s, error) from error
        finally:
            activity.waits(None)
        self.works = self.keep = ()
        if self.finish is not None:
            self.finish()
            self.finish = None

    def done(self) -> bool:
        """Return True when ``wait`` would not block."""
        return all(work.is_completed() for work in self.works)

    def waits(self) -> Waits:
        """Return the transfer that ``wait`` blocks for."""
        has_one_each = len(self.works) == len(self.peers)
        peers = [self.peers[self.position]] if has_one_each else sorted(set(self.peers))
        ranks = tuple(self.group.ranks[peer] for peer in peers)
        return Waits("send" if self.sends else "receive", ranks, self.operation())


def _failure(
    group: GroupMembers, operation: str, posted_s: float, error: RuntimeError
) -> CommunicationError:
    """Return the error of a failed operation, with the first line of torch's message."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    waited_s = time.monotonic() - posted_s
    return CommunicationError(
        "MW-MESH-001",
        f"rank {group.ranks[group.rank]}: {operation} failed after {waited_s:.1f} s: {reason}",
    )
