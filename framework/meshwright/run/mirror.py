"""Observer that mirrors every step in host memory, for a recovery without a lost step.

    rank    step k                  step k + 1
    main    ... update | after_step | forward, backward | join | sums over all ranks, update | ...
    thread                copy to this node's memory, exchange |
                          with the next node

Where the ranks are on several nodes, each also sends its mirror to a rank of the next node, which keeps a
copy in its own memory (mirror_exchange.py): a lost node loses no shard.

NOTE [one step on all ranks]: at any moment some step is complete, on every rank and with every holder of
a copy. Before the sums of step k + 1 each rank joins its thread: its mirror of step k is complete, it has
received the copies that it holds, and its own has been sent. A rank begins to overwrite step k - 1 after its
update of step k + 1, and so after the sums, to which all ranks have come. So as long as any rank has not
come to the sums of step k + 1, step k - 1 is whole everywhere; and as soon as any rank has begun to
overwrite it, step k is. This holds from the second step of a launch on. In its first step, and before, the
step that the launch has resumed from takes the place of k - 1: its slot is the other one. Of a node that was
lost, it is on the nodes that held the copies only. All of this holds for a launch with another layout too: what
lies in the slot that it overwrites first is no step that anybody resumes from.

The join is also before the update, which changes what the thread copies, and before a callback's
``before_step``, which may. Buffers that forward changes are copied before the thread starts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.checkpoint import CheckpointMetadata, TensorPiece
from meshwright.checkpoint.files import shard_names
from meshwright.checkpoint.memory import SLOTS, MirrorWriter, remove_others
from meshwright.mesh.neighbours import holders_on_next_nodes, ranks_of_nodes
from meshwright.parts import NOT_MIRRORED, Observer, Parts, StepEvent
from meshwright.run.base import fingerprint, saves_frozen
from meshwright.run.mirror_exchange import MirrorExchange
from meshwright.run.pieces import frozen_names, saved_pieces, saved_running
from meshwright.run.tensors import agree_on_states, checkpoint_metadata
from meshwright.terminal.output import print_warning

LEAVE_S = 15.0
"""Longest wait for the thread after an error."""


class Mirror(Observer):
    """Mirror of one rank: after each step it copies what this rank would write to a checkpoint."""

    def __init__(self, parts: Parts, directory: Path, generation: int) -> None:
        """Mirror below ``directory``, memory of this node. Collective over all ranks; blocks.
        ``generation``: number of this launch of the ranks.
        """
        mesh = parts.mesh
        names = shard_names(mesh.grid)
        self._writer = MirrorWriter(
            directory, names[mesh.rank], generation, frozen_names(parts), mesh.grid
        )
        holders = holders_on_next_nodes(mesh.nodes)
        self.exchange = MirrorExchange(mesh.host, directory, holders, names) if holders else None
        self._parts = parts
        self._directory = directory
        self._base = fingerprint(parts)  # of frozen weights: no step changes it
        self._saves_frozen = saves_frozen(parts)
        own_ranks = ranks_of_nodes(mesh.nodes)[mesh.nodes[mesh.rank]]
        held = [rank for rank, holder in holders.items() if holder in own_ranks]
        self._shard_names = [names[rank] for rank in (*own_ranks, *held)]
        """Shards that belong in this node's memory."""
        self._num_steps = 0
        self._is_off = False
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._error: BaseException | None = None
        parts.flags[NOT_MIRRORED] = self.join

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Begin to mirror the step. Collective with ``optimizer.builder``."""
        if NOT_MIRRORED in event.stats.flags and not self._is_off:
            self._switch_off(parts)
        if event.is_last or self._is_off:
            return
        states = agree_on_states(parts, checks=False)
        head = checkpoint_metadata(
            parts.config,
            parts.state,
            parts.data_fingerprint,
            self._base,
            parts.stop_reason,
            states,
        )
        running = saved_running(parts)
        pieces = [
            piece._replace(tensor=piece.tensor.clone()) if piece.info.name in running else piece
            for piece in saved_pieces(parts, self._saves_frozen)
        ]
        computed = None
        if parts.mesh.device.type == "cuda":
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()
        self._thread = threading.Thread(
            target=self._run, args=(head, pieces, computed), name="mirror", daemon=True
        )
        self._thread.start()

    def join(self) -> bool:
        """Wait until the mirror of the step before is complete, here and with its holder. Return True
        if it could not be written; a flag of the step (NOTE [one step on all ranks]).

        Raises:
            CommunicationError: a rank is lost.
        """
        if self._thread is not None:
            self._parts.mesh.activity.begin("waiting for the mirror of the step before")
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return bool(self._problem)

    def after_training(self, parts: Parts) -> None:
        """Wait for the last mirror."""
        self.join()

    def on_error(self, parts: Parts, error: Exception) -> None:
        """Wait for the thread, which holds the parts. What it waits for is on its way, or is lost with
        a rank that has died or left, whose connections then end. (gloo cannot abort a receive.)
        """
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _run(
        self,
        head: CheckpointMetadata,
        pieces: list[TensorPiece],
        computed: torch.cuda.Event | None,
    ) -> None:
        """Mirror a step, on the thread. ``computed``: event after what the pieces hold; None: on CPU."""
        try:
            self._num_steps += 1
            if self._num_steps <= len(SLOTS):
                # no rank resumes from this slot any more; another layout has left larger shards in it. By
                # each rank: the first to write needs the space
                remove_others(self._directory, SLOTS[head.step % 2], self._shard_names)
            own = None
            try:
                with _beside(computed, self._parts.mesh.device):
                    own = self._writer.write(head, pieces)
            except OSError as error:
                self._problem = str(error.strerror)
            if self.exchange is not None:
                self.exchange.run(own)
        except OSError as error:
            self._problem = str(error.strerror)
        except BaseException as error:
            self._error = error

    def _switch_off(self, parts: Parts) -> None:
        """Switch the mirror off on all ranks, as one cannot write. Collective; blocks."""
        self._is_off = True
        self._writer.clear()
        if self.exchange is not None:
            self.exchange.clear()
        problems = parts.mesh.world.gather_objects(self._problem)
        if parts.mesh.rank == 0:
            rank = next(rank for rank, each in enumerate(problems) if each)
            print_warning(
                f"steps are not mirrored in memory any more: {problems[rank]} on rank {rank}. The run"
                " continues; a rank that dies costs the steps since the last checkpoint"
            )


@contextlib.contextmanager
def _beside(computed: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Run the block's copies from a GPU on a stream of their own, beside the next step."""
    if computed is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        computed.wait()
        yield
