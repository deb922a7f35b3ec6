"""Asynchronous writer of one rank's share of a checkpoint, on a thread, while training continues.

    main thread      copy to host | step | step | step | step ...        checks `failed` in every step
    writer           .............| write_shard, report |
    writer, rank 0   .............| write_shard, report | poll for all reports | publish | prune

The threads of the ranks communicate through the temporary directory. A shard's report appears by
one rename when its files are on the disk. Rank 0 publishes when all reports exist. No thread runs a
collective. A thread that fails only records the problem. The training loop then shares the failure
with all ranks, and each calls `abandon`: the attempt is never published.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint import save_in_store
from meshwright.checkpoint.files import MAX_FILE_BYTES, final_directory, temporary_directory
from meshwright.checkpoint.manifest import CheckpointMetadata, TensorKind
from meshwright.checkpoint.save import publish
from meshwright.checkpoint.shard import REPORT_SUFFIX, TensorPiece, write_shard
from meshwright.errors import CheckpointError, UserError
from meshwright.system.store import Place, StoreAccess, StorePath

POLL_S = 0.001, 0.5
"""Shortest and longest pause between two polls, in seconds."""
STORE_POLL_S = 0.25
"""Shortest pause between two polls of an object store, where each is a request."""
REMOVAL_PAUSE_S = 0.5
"""Seconds between two attempts to remove files that another rank may still write."""


def next_pause_s(start_s: float) -> float:
    """Return the pause before the next poll of work begun at ``start_s`` (``time.monotonic``):
    a twentieth of the time that it has taken, so that its end is seen at most 5 % late.
    """
    shortest_s, longest_s = POLL_S
    return min(max((time.monotonic() - start_s) / 20, shortest_s), longest_s)


@dataclass(frozen=True)
class SaveAttempt:
    """Parameters of one save attempt, equal on all ranks."""

    run_directory: Place
    """Directory of the run, or the path of its checkpoints in an object store."""
    head: CheckpointMetadata
    name: str
    """Unique name of this attempt, agreed between the ranks;
    distinguishes it from dead attempts.
    """
    shard_names: frozenset[str]
    """Shard names of all ranks that write."""
    max_file_bytes: int = MAX_FILE_BYTES
    upload_timeout_s: float = 300.0
    """Deadline of each object, in an object store."""
    tried: frozenset[str] = frozenset()
    """Names of the attempts before that were given up; one may be published nevertheless."""

    @property
    def temporary(self) -> Path:
        """Directory that the files are written to."""
        assert isinstance(self.run_directory, Path)
        return temporary_directory(self.run_directory, self.head.step, self.name)

    @property
    def final(self) -> Place:
        """Path of the published checkpoint."""
        return final_directory(self.run_directory, self.head.step)


@dataclass
class _Share:
    """State of this rank's share of one save.
    A thread that was left behind keeps the one of its own save.
    """

    done: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None
    done_s: float = 0.0
    written_bytes: int = 0

    def count(self, num_bytes: int) -> None:
        """Add bytes that were written."""
        self.written_bytes += num_bytes

    def record(self, problem: str) -> None:
        """Store the reason of a failure, unless the save was abandoned before."""
        if not self.abandoned.is_set():  # otherwise a consequence of abandoning
            self.problem = problem


class AsyncWriter:
    """Asynchronous writer of one rank: idle, or with one save in progress."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._share = _Share()
        self._published: SimpleQueue[tuple[Place, float]] = SimpleQueue()
        self._left: threading.Thread | None = None
        """Thread of an earlier save that :meth:`leave` has left behind."""

    @property
    def problem(self) -> str | None:
        """Reason why this rank's share could not be written,
        or on the first rank not be published.
        """
        return self._share.problem

    @property
    def written_bytes(self) -> int:
        """Bytes of this rank's share written so far; progress indicator for a slow disk."""
        return self._share.written_bytes

    def start(
        self,
        attempt: SaveAttempt,
        shard_name: str | None,
        pieces: list[TensorPiece],
        *,
        is_first: bool,
        before_publishing: Callable[[], object] = lambda: None,
        after_publishing: Callable[[], object] = lambda: None,
    ) -> None:
        """Start writing on a thread. An earlier save must have been ended.

        Args:
            attempt: The save, equal on all ranks.
            shard_name: Name of this rank's shard; None for a rank that writes nothing.
            pieces: Host copies of this rank's pieces; emptied when written.
            is_first: True on the rank that publishes.
            before_publishing: Called on the first rank's thread before the checkpoint is published.
            after_publishing: Called on the first rank's thread after it, unless the thread left
                behind is still alive.
        """
        assert self._thread is None, "one save at a time"
        self._share = _Share()
        self._thread = threading.Thread(
            target=self._work,
            args=(
                attempt,
                shard_name,
                pieces,
                is_first,
                before_publishing,
                after_publishing,
                self._share,
            ),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def failed(self) -> bool:
        """Return True if the save has failed. Checked in each step."""
        return self.problem is not None

    def is_share_done(self) -> bool:
        """Return True if this rank's share is written (first rank: the checkpoint is published)
        or has failed.
        """
        return self._thread is None or self._share.done.is_set()

    def is_idle(self, limit_s: float) -> bool:
        """Return True if the thread has ended, ``after_publishing`` included,
        or its share is done for ``limit_s``.
        """
        if self._thread is None or not self._thread.is_alive():
            return True
        return self._share.done.is_set() and time.monotonic() - self._share.done_s > limit_s

    def leave(self) -> bool:
        """Detach the thread, whose share is done or abandoned, without blocking.
        Return True if it is still busy.
        """
        thread, self._thread, self._share = self._thread, None, _Share()
        if thread is None or not thread.is_alive():
            return False
        self._left = thread
        return True

    def end(self) -> None:
        """Block until the thread has ended. On the first rank call `abandon` first
        if the save has failed.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, self._share = None, _Share()

    def abandon(self) -> None:
        """Give up the save in progress, so that it is never published.
        Does not block for writes in progress.
        """
        self._share.abandoned.set()

    def stop(self, limit_s: float) -> None:
        """Give up the save in progress, and block until its thread has ended, at most ``limit_s``.

        A save that is being published is then published, and a later look at the directory sees it.
        """
        self.abandon()
        if self._thread is not None:
            self._thread.join(limit_s)

    def take_published(self) -> tuple[Place, float] | None:
        """Return the checkpoint published since the last call and its duration in seconds, or None.
        First rank only.
        """
        try:
            return self._published.get_nowait()
        except Empty:
            return None

    # -------------------------------------------------------------------------------------------------
    # on the thread

    def _work(
        self,
        attempt: SaveAttempt,
        shard_name: str | None,
        pieces: list[TensorPiece],
        is_first: bool,
        before_publishing: Callable[[], object],
        after_publishing: Callable[[], object],
        share: _Share,
    ) -> None:
        done, start_s = not is_first, time.monotonic()
        try:
            saving = _saving_of(attempt, share)
            is_published = is_first and saving.begin()
            if shard_name is not None and not is_published:
                check_finite(pieces)
                saving.write_shard(shard_name, pieces)
            pieces.clear()
            if is_published or (is_first and _all_written(attempt, saving, share.abandoned)):
                before_publishing()
                if not is_published:
                    saving.publish()
                done = True
                self._published.put((attempt.final, time.monotonic() - start_s))
        except (UserError, OSError) as error:
            share.record(str(error))
        except BaseException as error:
            share.record(f"{type(error).__name__}: {error}")
            raise
        finally:
            share.done_s = time.monotonic()
            share.done.set()
            if not done:
                # all ranks must see the failure before their directory is removed
                share.abandoned.wait()
                if isinstance(attempt.run_directory, Path):
                    remove_attempt(attempt)
        if is_first and done and not (self._left is not None and self._left.is_alive()):
            after_publishing()


class _Saving(NamedTuple):
    """The four parts of a save that differ between a file system and an object store."""

    begin: Callable[[], bool]
    """Function that returns True if the step is published already."""
    write_shard: Callable[[str, list[TensorPiece]], object]
    present: Callable[[], set[str]]
    """Function that returns the names of the shards whose reports exist."""
    publish: Callable[[], object]


def _saving_of(attempt: SaveAttempt, share: _Share) -> _Saving:
    """Return the parts of a save by the place that it goes to."""
    options: dict[str, Any] = {
        "max_file_bytes": attempt.max_file_bytes,
        "on_bytes": share.count,
    }
    if isinstance(attempt.run_directory, Path):
        temporary, final = attempt.temporary, attempt.final
        assert isinstance(final, Path)
        return _Saving(
            begin=lambda: False,  # before the writers start: see `save.begin`
            write_shard=lambda name, pieces: write_shard(
                temporary, name, pieces, copied=True, **options
            ),
            present=lambda: {
                path.name.removesuffix(REPORT_SUFFIX)
                for path in temporary.glob(f"*{REPORT_SUFFIX}")
            },
            publish=lambda: publish(temporary, final, attempt.head),
        )
    step, name, head = attempt.final, attempt.name, attempt.head
    assert isinstance(step, StorePath)
    access = StoreAccess(attempt.upload_timeout_s, share.abandoned.is_set)
    return _Saving(
        begin=lambda: save_in_store.begin(step, name, access, tried=attempt.tried),
        write_shard=lambda shard_name, pieces: save_in_store.upload_shard(
            step, name, shard_name, pieces, access, **options
        ),
        present=lambda: save_in_store.reports_present(step, name, access),
        publish=lambda: save_in_store.publish(step, name, attempt.shard_names, head, access),
    )


def _all_written(attempt: SaveAttempt, saving: _Saving, abandoned: threading.Event) -> bool:
    """Block until the reports of all shards exist. Return False if the attempt was abandoned."""
    start_s = time.monotonic()
    shortest_s = 0.0 if isinstance(attempt.run_directory, Path) else STORE_POLL_S
    while not attempt.shard_names <= saving.present():
        if abandoned.wait(max(next_pause_s(start_s), shortest_s)):
            return False
    return not abandoned.is_set()


def check_finite(pieces: Iterable[TensorPiece]) -> None:
    """Raise CheckpointError if a trained parameter or its optimizer state contains NaN/Inf.

    A step with such values is never taken, but a later memory fault may create them. Such a
    checkpoint must not be the only one to resume from.
    """
    pieces = list(pieces)
    trained = {piece.info.name for piece in pieces if piece.kind != TensorKind.WEIGHTS}
    for piece in pieces:
        if piece.info.name in trained and not is_finite(piece.tensor):
            raise CheckpointError(
                "MW-CHECKPOINT-001",
                f"{piece.kind.of(piece.info.name)} contains NaN or Inf: not saved",
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a host tensor has neither NaN nor Inf.

    Both reach the smallest or the largest element. torch.isfinite(tensor).all() takes 25 times as
    long on a CPU, and twice as long as the hashes of a checkpoint.
    """
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def remove_attempt(attempt: SaveAttempt) -> None:
    """Remove the attempt's files. A rename comes first,
    so that a rank still writing can open no further file.
    """
    aside = attempt.temporary.with_name(f"{attempt.temporary.name}-given-up")
    try:
        attempt.temporary.rename(aside)
    except OSError:
        aside = attempt.temporary
    for _ in range(3):  # a file may appear during the removal
        shutil.rmtree(aside, ignore_errors=True)
        if not aside.exists():
            return
        time.sleep(REMOVAL_PAUSE_S)
