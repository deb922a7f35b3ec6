"""One rank's share of a save, written on a thread behind the training that goes on.

    main thread      copy to host | step | step | step | step ...        looks at `failed` in every step
    behind           .............| write_shard, report |
    behind, rank 0   .............| write_shard, report | all reports are there | publish | prune

The ranks' threads meet in the temporary directory: a shard's report appears by one rename when its files are on the
disk, and rank 0 publishes when it sees the reports of all. No thread talks to another rank. One that fails only notes
it; the training loop tells all ranks, and then calls `abandon` on each: nothing of that attempt will be published.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from meshwright.checkpoint.manifest import Head, Kind
from meshwright.checkpoint.save import final_directory, publish, temporary_directory
from meshwright.checkpoint.shard import MAX_FILE_BYTES, REPORT_SUFFIX, Piece, write_shard
from meshwright.errors import CheckpointError

POLL_S = 0.02, 0.5
"""How often rank 0 looks for reports: at first, and at most."""


@dataclass(frozen=True)
class Attempt:
    """One save, as all ranks know it."""

    run_directory: Path
    head: Head
    name: str
    """Tells this attempt from dead ones; agreed between the ranks."""
    shard_names: frozenset[str]
    """Of all ranks that write."""
    max_file_bytes: int = MAX_FILE_BYTES

    @property
    def temporary(self) -> Path:
        """Where its files are written."""
        return temporary_directory(self.run_directory, self.head.step, self.name)

    @property
    def final(self) -> Path:
        """Where they will be."""
        return final_directory(self.run_directory, self.head.step)


def to_host(pieces: Iterable[Piece]) -> list[Piece]:
    """Copies that nobody else writes into. From a GPU by way of pinned memory, waited for once."""
    copies, seen_gpu = [], False
    for piece in pieces:
        from_gpu = piece.tensor.is_cuda
        copy = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=from_gpu)
        copies.append(piece._replace(tensor=copy.copy_(piece.tensor.detach(), non_blocking=from_gpu)))
        seen_gpu = seen_gpu or from_gpu
    if seen_gpu:
        torch.cuda.synchronize()
    return copies


class Behind:
    """What one rank has under way: nothing, or its share of one save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()
        self._abandoned = threading.Event()
        self.problem: str | None = None
        """Why my share could not be written, or on the first rank not be published."""
        self._published: SimpleQueue[tuple[Path, float]] = SimpleQueue()
        self._begun_s = 0.0
        self.written_bytes = 0
        """Of my share, on the disk so far: whether a slow disk moves at all."""

    def start(
        self,
        attempt: Attempt,
        shard_name: str | None,
        pieces: list[Piece],
        *,
        is_first: bool,
        beforehand: Callable[[], object] = lambda: None,
        afterwards: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to write. ``shard_name``: None for a rank that writes nothing. ``beforehand``, ``afterwards``: called
        on the first rank's thread before the checkpoint appears, and after. An earlier save must have been ended."""
        assert self._thread is None, "one save at a time"
        for event in (self._settled, self._abandoned):
            event.clear()
        self.problem = None
        self.written_bytes = 0
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._work,
            args=(attempt, shard_name, pieces, is_first, beforehand, afterwards),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def failed(self) -> bool:
        """Looked at in each step: there is a problem."""
        return self.problem is not None

    def settled(self) -> bool:
        """My share is on the disk, on the first rank the checkpoint has appeared; or it has failed."""
        return self._thread is None or self._settled.is_set()

    def idle(self) -> bool:
        """Nothing is being done any more, `afterwards` included."""
        return self._thread is None or not self._thread.is_alive()

    def end(self) -> None:
        """Block until the thread has ended. On the first rank after a failure: call `abandon` before."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.problem = None

    def abandon(self) -> None:
        """Nothing of what is under way shall be published. Does not block for what is being written right now."""
        self._abandoned.set()

    def take_published(self) -> tuple[Path, float] | None:
        """On the first rank: the checkpoint that has appeared since the last call, if one has; how long it took."""
        try:
            return self._published.get_nowait()
        except Empty:
            return None

    # ------------------------------------------------------------------------------------------------- on the thread

    def _work(
        self,
        attempt: Attempt,
        shard_name: str | None,
        pieces: list[Piece],
        is_first: bool,
        beforehand: Callable[[], object],
        afterwards: Callable[[], object],
    ) -> None:
        done = not is_first
        try:
            if shard_name is not None:
                check_finite(pieces)
                write_shard(
                    attempt.temporary,
                    shard_name,
                    pieces,
                    max_file_bytes=attempt.max_file_bytes,
                    copied=True,
                    on_bytes=self._count,
                )
            pieces.clear()
            if is_first and self._all_written(attempt):
                beforehand()
                publish(attempt.temporary, attempt.final, attempt.head)
                done = True
                self._published.put((attempt.final, time.monotonic() - self._begun_s))
        except (CheckpointError, OSError) as error:
            self._fails(str(error))
        except BaseException as error:
            self._fails(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._settled.set()
            if not done:
                self._abandoned.wait()  # the others are told before what they write into goes
                remove_attempt(attempt)
        if is_first and done:
            afterwards()

    def _count(self, num_bytes: int) -> None:
        self.written_bytes += num_bytes

    def _fails(self, problem: str) -> None:
        if not self._abandoned.is_set():  # otherwise an echo
            self.problem = problem

    def _all_written(self, attempt: Attempt) -> bool:
        """Wait for the reports of all; False when the attempt was abandoned."""
        wanted = {f"{name}{REPORT_SUFFIX}" for name in attempt.shard_names}
        pause_s, longest_s = POLL_S
        while not wanted <= {path.name for path in attempt.temporary.glob(f"*{REPORT_SUFFIX}")}:
            if self._abandoned.wait(pause_s):
                return False
            pause_s = min(2 * pause_s, longest_s)
        return not self._abandoned.is_set()


def check_finite(pieces: Iterable[Piece]) -> None:
    """Raise CheckpointError where a parameter that is trained, or its state, holds what is no number.

    A step that makes such numbers is not taken; what a fault of memory made afterwards must not be all there is to go
    on from.
    """
    held = list(pieces)
    trained = {piece.info.name for piece in held if piece.kind is not Kind.WEIGHTS}
    for piece in held:
        if piece.info.name in trained and not torch.isfinite(piece.tensor).all():
            raise CheckpointError(f"{piece.kind.of(piece.info.name)} holds numbers that are not finite: not saved")


def remove_attempt(attempt: Attempt) -> None:
    """Take away what was written. First by a rename: who still writes there can open no further file."""
    aside = attempt.temporary.with_name(f"{attempt.temporary.name}-given-up")
    try:
        attempt.temporary.rename(aside)
    except OSError:
        aside = attempt.temporary
    for _ in range(3):  # a file may appear while its directory is emptied
        shutil.rmtree(aside, ignore_errors=True)
        if not aside.exists():
            return
        time.sleep(POLL_S[1])
