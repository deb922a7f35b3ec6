"""Exchange of a step's mirrors between nodes: each rank sends its own to a rank of the next node.

    rank -> holder     sizes of what follows
    rank -> holder     mark and report, as text
    holder -> rank     1: there is memory for the bytes; 0: there is none
    rank -> holder     bytes of the file, from memory into memory; those of the frozen weights once

Messages go over a group of their own, so that a thread may exchange them beside a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.memory import SLOTS, MirrorCopy, MirroredShard
from meshwright.errors import CommunicationError
from meshwright.mesh.comm import Group
from meshwright.mesh.handles import TransferHandle
from meshwright.system.bounded import MAX_MANIFEST_BYTES

MESSAGE_BYTES = 2**28
"""Largest message; larger files go in several."""


class MirrorExchange:
    """This rank's part in the exchange: what it sends, and the copies that it holds."""

    def __init__(
        self, group: Group, directory: Path, holders: Mapping[int, int], shard_names: Sequence[str]
    ) -> None:
        """Exchange over ``group``, of all ranks.

        Args:
            directory: memory of this node.
            holders: rank that holds the copy of each rank's mirror.
            shard_names: those of all ranks.
        """
        self._group = group
        self._holder = holders[group.rank]
        self._copies = {
            rank: MirrorCopy(directory, shard_names[rank])
            for rank, holder in holders.items()
            if holder == group.rank
        }

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent so far."""
        return self._group.traffic.counts["host", "send"].wire_bytes

    def run(self, own: MirroredShard | None) -> None:
        """Send this rank's mirror of a step, and receive those that it holds copies of. Blocks.

        ``own``: None if it could not be written; its holder then receives none.

        Raises:
            OSError: this node has no memory for a copy, or the holder has none.
            CommunicationError: a rank is lost.
        """
        sends = self._send_head(own)
        problem: OSError | None = None
        begun: dict[int, tuple[str, str, list[Tensor]]] = {}
        for rank, copy in self._copies.items():
            head, texts = self._receive_head(rank)
            if not head[1]:
                continue  # the other rank has none
            try:
                begun[rank] = _begin(copy, head, texts)
            except OSError as error:
                problem = error
            sends += self._post(
                [torch.tensor([int(rank in begun)])], rank, "the answer to a mirror"
            )
        if own is not None:
            answer = torch.empty(1, dtype=torch.int64)
            self._receive([answer], self._holder, "the answer to a mirror")
            if int(answer):
                frozen = [] if own.frozen is None else [own.frozen]
                sends += self._post(_messages([own.data, *frozen]), self._holder, "a mirror")
            else:
                problem = problem or OSError(0, f"rank {self._holder} has no memory for the copy")
        for rank, (slot, mark, memory) in begun.items():
            self._receive(_messages(memory), rank, "a mirror")
            self._copies[rank].complete(slot, mark)
        for handle in sends:
            handle.wait()
        if problem is not None:
            raise problem

    def clear(self) -> None:
        """Remove the copies."""
        for copy in self._copies.values():
            copy.clear()

    def _send_head(self, own: MirroredShard | None) -> list[TransferHandle]:
        """Post the sizes of this rank's mirror, and its texts."""
        if own is None:
            return self._post(
                [torch.zeros(6, dtype=torch.int64)], self._holder, "sizes of a mirror"
            )
        mark, report = own.mark.encode(), own.report.encode()
        frozen_size = 0 if own.frozen is None else own.frozen.numel()
        head = torch.tensor(
            [
                SLOTS.index(own.slot),
                len(mark),
                len(report),
                own.data.numel(),
                frozen_size,
                int(own.has_frozen),
            ]
        )
        texts = torch.frombuffer(bytearray(mark + report), dtype=torch.uint8)
        return self._post([head, texts], self._holder, "sizes of a mirror")

    def _receive_head(self, rank: int) -> tuple[list[int], bytes]:
        """Receive the sizes of a mirror, and its mark and report; no mark if there is none."""
        head = torch.empty(6, dtype=torch.int64)
        self._receive([head], rank, "sizes of a mirror")
        sizes: list[int] = head.tolist()
        _, mark_size, report_size, *_ = sizes
        if not mark_size:
            return sizes, b""
        if not 0 <= mark_size + report_size <= MAX_MANIFEST_BYTES:
            raise CommunicationError(
                "MW-RUN-066", f"rank {rank} announces a mirror with a report of {report_size} bytes"
            )
        texts = torch.empty(mark_size + report_size, dtype=torch.uint8)
        self._receive([texts], rank, "the report of a mirror")
        return sizes, texts.numpy().tobytes()

    def _post(self, tensors: Sequence[Tensor], peer: int, what: str) -> list[TransferHandle]:
        handle = self._group.transfer(tensors, peer, True, lambda: f"sending {what}")
        assert handle is not None
        return [handle]

    def _receive(self, tensors: Sequence[Tensor], peer: int, what: str) -> None:
        handle = self._group.transfer(tensors, peer, False, lambda: f"receiving {what}")
        assert handle is not None
        handle.wait()


def _begin(copy: MirrorCopy, head: Sequence[int], texts: bytes) -> tuple[str, str, list[Tensor]]:
    """Prepare a copy; return its slot, its mark and the memory for its bytes.

    Raises:
        OSError: the memory is full.
    """
    slot_index, mark_size, _, size, frozen_size, has_frozen = head
    slot = SLOTS[slot_index]
    mark, report = texts[:mark_size].decode(), texts[mark_size:].decode()
    memory = copy.begin(slot, report, size, frozen_size, has_frozen=bool(has_frozen))
    return slot, mark, memory


def _messages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Divide bytes into messages."""
    return [part for tensor in tensors for part in torch.split(tensor, MESSAGE_BYTES)]
