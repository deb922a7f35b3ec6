"""Asynchronous checkpoints during training: the collectives around the writer thread of each rank.

    every rank   start    finish the save before, agree on the attempt, copy to host memory; only this blocks the step
    every rank   check    after each step: react to a failed share, reported by the all-reduce of the step
    every rank   finish   block until the checkpoint is published or failed: before the next one, and at the end

When a share fails, nothing of that attempt is published, and its files are removed. Earlier
checkpoints remain.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.checkpoint import (
    AsyncWriter,
    HostSlab,
    SaveAttempt,
    TensorPiece,
    begin,
    has_checkpoint,
    prune,
    shard_name,
)
from meshwright.checkpoint.async_writer import next_pause_s
from meshwright.checkpoint.files import checkpoints_directory
from meshwright.errors import CheckpointError, RunFilesError
from meshwright.parts import FILES_LOST, NOT_WRITTEN, SAVE_DUE, Parts
from meshwright.run.base import fingerprint, saves_frozen
from meshwright.run.files import Recovery, RunFiles, reopen_outputs, sync_run_files
from meshwright.run.pieces import saved_pieces
from meshwright.run.places import store_of
from meshwright.run.tensors import agree_on_states, checkpoint_metadata
from meshwright.system.store import Place
from meshwright.terminal.output import Warn, print_warning

LAST_TRIES = 3
"""Attempts to recreate a directory that is lost at the end of a run."""


class _BeginResult(NamedTuple):
    """Result of :meth:`Saver._begin` on rank 0, sent to all ranks."""

    attempt: str
    problem: str | None = None
    is_transient: bool = False
    """True if the problem is one of the disk, not of the run."""


class Saver:
    """Checkpoint saver of one rank. All ranks call the same methods after the same steps."""

    def __init__(
        self,
        parts: Parts,
        directory: Path,
        log: Callable[[str], None],
        warn: Warn = print_warning,
        files: RunFiles | None = None,
    ) -> None:
        """Save ``parts`` below ``directory``. ``files``: the run's files, watched for loss; None:
        not watched.
        """
        self.parts = parts
        self.directory = directory
        self._store = store_of(parts.config)
        self._num_failed = 0
        """Saves to the store that have failed since one succeeded; the same on all ranks."""
        self._files = files
        self._log = log
        self._warn = warn if parts.mesh.rank == 0 else lambda message: None
        self.writer = AsyncWriter()
        """Writer thread of this rank's share; a failure on one rank reaches all ranks as a flag
        of the next step.
        """
        self._slab = HostSlab()
        self._attempt: SaveAttempt | None = None
        """Save in progress; the same on all ranks."""
        self._given_up: set[str] = set()
        """Names of the attempts that were given up; the same on all ranks."""
        self._unsynced: list[Path] = []
        """Files of observers that no published checkpoint has synced yet;
        empty on ranks other than 0.
        """
        parts.flags[NOT_WRITTEN] = self.writer.failed
        if files is not None:
            parts.flags[FILES_LOST] = files.are_lost
        self.saved_step: int | None = None
        """Last step whose checkpoint is known to be published; the same on all ranks."""
        self._save_s: float | None = None
        self._first_step = parts.state.step
        self._begun_s = time.monotonic()
        """Time of the last save's beginning; at first that of this start."""
        self._is_overdue = parts.is_from_memory
        if parts.mesh.rank == 0:
            parts.flags[SAVE_DUE] = self.is_due

    def start(self, *, is_urgent: bool = False) -> None:
        """Start to save this step. Collective over all ranks.

        Blocks until the save before is finished and the tensors are copied to host memory; with
        ``checkpoint.asynchronous = false`` until it is published. ``is_urgent``: do not wait for
        deletions of others.

        Raises:
            CheckpointError: on every rank; the step is saved already, or this checkpoint or the one
                before cannot be written and ``checkpoint.on_failure`` is "fail" or the run has no
                checkpoint yet.
        """
        parts, mesh = self.parts, self.parts.mesh
        # a store deletes meanwhile: this save waits for no request of the one before
        self.finish(retention=not is_urgent and self._store is None)
        self.writer.leave()
        self._begun_s, self._is_overdue = time.monotonic(), False
        base, states, step = fingerprint(parts), agree_on_states(parts), parts.state.step
        own = self._begin(step) if mesh.rank == 0 else None
        found: list[tuple[_BeginResult, str | None]] = mesh.world.gather_objects(
            (own, parts.stop_reason), _BeginResult
        )
        result = found[0][0]
        if result.problem is not None:
            if not result.is_transient:
                raise CheckpointError("MW-RUN-020", result.problem)
            self._report_failure(step, [result.problem])
            return
        reason = next((each for _, each in found if each is not None), None)
        head = checkpoint_metadata(
            parts.config, parts.state, parts.data_fingerprint, base, reason, states
        )
        names = [shard_name(mesh.grid, rank) for rank in range(mesh.grid.size)]
        checkpoint = parts.config.checkpoint
        self._attempt = SaveAttempt(
            self.place,
            head,
            result.attempt,
            frozenset(names),
            upload_timeout_s=checkpoint.upload_timeout_s,
            tried=frozenset(self._given_up),
        )
        if mesh.rank == 0:  # its writer thread alone syncs and publishes
            self._unsynced += parts.written_files
        parts.written_files.clear()
        self.writer.start(
            self._attempt,
            names[mesh.rank],
            self._host_pieces(),
            is_first=mesh.rank == 0,
            before_publishing=self._sync_files,
            after_publishing=lambda: self._prune(step),
        )
        if not checkpoint.asynchronous:
            self.finish()

    @property
    def place(self) -> Place:
        """The run's directory, or the path of its checkpoints in an object store."""
        return self.directory if self._store is None else self._store

    def _host_pieces(self) -> list[TensorPiece]:
        """Return this rank's pieces in host memory, which no step changes until they are written."""
        own = saved_pieces(self.parts, saves_frozen(self.parts))
        is_on_host = self.parts.mesh.device.type == "cpu"
        if is_on_host and not self.parts.config.checkpoint.asynchronous:
            return list(own)  # the next step waits until they are written
        return self._slab.copy(own)

    def check(self, not_written: bool) -> None:
        """React to the flags of a step; ``not_written``: the share of some rank has failed.

        Raises:
            CheckpointError: on every rank, of such a failure with ``checkpoint.on_failure =
                "fail"``.
        """
        if not_written and self._attempt is not None:
            self._give_up(self._attempt, self._problems())
        self._report_published()

    def finish(self, *, retention: bool = True) -> None:
        """Block until the save in progress is published or has failed. Collective over all ranks.

        ``retention``: block also until older checkpoints are deleted, for at most
            ``launch.timeout_s``.

        Raises:
            CheckpointError: on every rank; the save has failed, and ``checkpoint.on_failure`` is
                "fail" or the run has no checkpoint yet.
        """
        attempt, writer = self._attempt, self.writer
        if attempt is not None:
            problems = self._problems() if self._wait(writer.is_share_done) else []
            if problems:
                self._give_up(attempt, problems)
            else:
                self.saved_step, self._num_failed = attempt.head.step, 0
            self._attempt = None
        self._report_published()
        if retention:
            limit_s = self.parts.config.launch.timeout_s
            self._wait(lambda: writer.is_idle(limit_s), to_the_end=True)
            if writer.leave():
                self._warn(
                    f"old files in {checkpoints_directory(self.place)} are still being deleted after"
                    f" {limit_s:g} s (launch.timeout_s): check its file system. The run continues,"
                    " and deletes no others until then"
                )

    def is_due(self) -> bool:
        """Return True if ``checkpoint.every_minutes`` have passed since the last save began,
        and it has ended; also in the first step after a resume from memory: what that has is
        nowhere else, and a save in progress was given up.
        """
        if self._is_overdue:
            return True
        every_s = 60 * self.parts.config.checkpoint.every_minutes
        return (
            every_s > 0
            and time.monotonic() - self._begun_s >= every_s
            and self.writer.is_share_done()
        )

    def take_save_s(self) -> float | None:
        """Return, on rank 0, the duration in seconds of the save published since the last call,
        or None.
        """
        taken, self._save_s = self._save_s, None
        return taken

    def finish_or_fail(self) -> None:
        """Finish the last checkpoint of a run. Its failure is an error,
        whatever ``checkpoint.on_failure`` is.
        """
        self.finish()
        step = self.parts.state.step
        for _ in range(LAST_TRIES):
            if self._are_files_lost():
                self.recover()
            elif self._store is None or self.saved_step == step:
                break
            if self.saved_step != step:
                self.start()
                self.finish()
        if self.saved_step != step:
            raise CheckpointError(
                "MW-RUN-021",
                f"the checkpoint of the last step, {step}, could not be written, see the warning"
                " above; the same command resumes from the one before",
            )

    def recover(self) -> None:
        """Restore the run's lost files. Collective over all ranks; blocks.
        The caller must then save a checkpoint.

        Raises:
            RunFilesError: on every rank; the directory now belongs to another run, or cannot be
                recreated.
        """
        assert self._files is not None
        mesh, writer = self.parts.mesh, self.writer
        writer.abandon()
        writer.end()
        if self._attempt is not None:
            self._given_up.add(self._attempt.name)
        self._attempt = None
        own = self._files.recover() if mesh.rank == 0 else None
        recovery: Recovery = mesh.world.gather_objects(own, Recovery)[0]
        if recovery.must_stop:
            self._stop(recovery)
        self._warn(recovery.message)
        if recovery.is_new:
            if self._store is None:
                self.saved_step = None
            reopen_outputs(self.directory)

    def _stop(self, recovery: Recovery) -> None:
        """Save to the directory's new path, if it was moved, and end the run.
        Collective over all ranks; blocks.

        Raises:
            RunFilesError: always, on every rank.
        """
        step, saved = self.parts.state.step, "the steps since its last checkpoint are lost"
        if self.saved_step == step:
            saved = f"step {step} was saved before"
        elif recovery.moved_to is not None:
            self.directory, self._files = recovery.moved_to, None
            with contextlib.suppress(CheckpointError):  # a warning has been printed
                self.start()
                self.finish()
            if self.saved_step == step:
                saved = (
                    f"step {step} is saved in {recovery.moved_to}, from where the run can be"
                    " resumed"
                )
        raise RunFilesError(
            "MW-RUN-022", f"{recovery.message}. The run stops after step {step}: {saved}"
        )

    def _are_files_lost(self) -> bool:
        """Return True if the run's files are lost. Collective; equal on every rank."""
        return bool(self.parts.mesh.world.gather_objects(self.parts.flags[FILES_LOST]())[0])

    def _begin(self, step: int) -> _BeginResult:
        attempt = secrets.token_hex(4)
        # the path may belong to another run now
        if self.parts.flags[FILES_LOST]() and self._files is not None:
            return _BeginResult(
                attempt, f"{self.directory} is gone, or another run's", is_transient=True
            )
        if self._store is not None:  # the writer's thread begins: no step waits for a store
            return _BeginResult(attempt)
        try:
            begin(self.directory, step, attempt, warn=self._warn)
        except CheckpointError as error:
            return _BeginResult(
                attempt, error.message, is_transient=isinstance(error.__cause__, OSError)
            )
        except OSError as error:
            return _BeginResult(
                attempt,
                f"{error.filename}: {error.strerror} (errno {error.errno})",
                is_transient=True,
            )
        return _BeginResult(attempt)

    def _wait(self, done: Callable[[], bool], *, to_the_end: bool = False) -> bool:
        """Block until ``done`` is true on every rank; return True if a share has failed.
        Collective over all ranks.

        All ranks keep communicating meanwhile, so that a slow disk does not count as a hang. A
        failed share ends the wait, unless ``to_the_end``.

        Raises:
            CheckpointError: on every rank, when no rank has written a byte for
                ``launch.timeout_s``.
        """
        parts, mesh = self.parts, self.parts.mesh
        limit_s = parts.config.launch.timeout_s
        before, start_s = -1.0, time.monotonic()
        since_s = start_s
        while True:
            # uploads have deadlines of their own, and their failure need not end the run
            stuck = (
                self._store is None
                and time.monotonic() - since_s > limit_s
                and not self.writer.is_share_done()
            )
            own = [not done(), self.writer.failed(), stuck, self.writer.written_bytes]
            total = torch.tensor(own, dtype=torch.float64, device=mesh.device)
            mesh.world.all_reduce(total).wait()
            waiting, failed, stuck_ranks, written = total.tolist()
            if not waiting or (failed and not to_the_end):
                return bool(failed)
            if stuck_ranks:
                raise CheckpointError(
                    "MW-RUN-023",
                    f"a checkpoint is being written to {self.place}, and no byte of it has been"
                    f" written for {limit_s:g} s (launch.timeout_s): check its file system. Earlier"
                    " checkpoints are unchanged",
                )
            if written != before:
                before, since_s = written, time.monotonic()
            mesh.activity.begin("writing a checkpoint")
            time.sleep(next_pause_s(start_s))

    def _problems(self) -> list[str]:
        """Return the problems by rank. Collective over all ranks."""
        problems = self.parts.mesh.world.gather_objects(self.writer.problem)
        return [
            f"rank {rank}: {problem}"
            for rank, problem in enumerate(problems)
            if problem is not None
        ]

    def _give_up(self, attempt: SaveAttempt, problems: list[str]) -> None:
        self._attempt = None
        self._given_up.add(attempt.name)
        self.writer.abandon()
        if self._store is not None:
            self._num_failed += 1
        elif self.parts.config.checkpoint.on_failure == "fail" or not self.has_checkpoint():
            self.writer.end()  # removes the written files before this process ends
        self._report_failure(attempt.head.step, problems)

    def _report_failure(self, step: int, problems: list[str]) -> None:
        text = f"the checkpoint of step {step} could not be saved:\n" + "\n".join(
            f"  {each}" for each in problems
        )
        if self._are_files_lost():
            self._warn(
                f"{text}\n  the run's directory is lost: the next step restores it, or ends the run"
            )
            return
        checkpoint = self.parts.config.checkpoint
        if self._store is not None and self._num_failed > checkpoint.most_failed:
            raise CheckpointError(
                "MW-RUN-067",
                f"{text}\nthe run ends: {self._num_failed} saves in a row have failed, and"
                f" checkpoint.most_failed = {checkpoint.most_failed}. The same command resumes from"
                " the last checkpoint",
            )
        if self._store is None and not self.has_checkpoint():
            raise CheckpointError(
                "MW-RUN-024",
                f"{text}\nthe run ends, whatever checkpoint.on_failure is: it has no checkpoint"
                " yet, and all further steps would be lost with it. Fix this, and start it again",
            )
        if checkpoint.on_failure == "fail":
            raise CheckpointError(
                "MW-RUN-025", f'{text}\nthe run ends, as checkpoint.on_failure = "fail"'
            )
        self._warn(f"{text}\n  the run continues; earlier checkpoints are unchanged")

    def has_checkpoint(self, above: int = 0) -> bool:
        """Return True if the run has a checkpoint of a step > ``above`` (0: an imported model).
        Collective over all ranks. Of a store what this start has read and saved counts.
        """
        if self.saved_step is not None or self._store is not None:
            return self.saved_step is not None or self._first_step > max(above, 0)
        own = self.parts.mesh.rank == 0 and has_checkpoint(self.directory, above)
        return bool(self.parts.mesh.world.gather_objects(own)[0])

    def _report_published(self) -> None:
        if (published := self.writer.take_published()) is not None:
            path, self._save_s = published
            self._log(f"saved {path}")

    def _sync_files(self) -> None:
        """Sync what the checkpoint presupposes, on the writer's thread.
        The next save waits for this one.
        """
        sync_run_files(self.directory, self._unsynced, self._warn)
        self._unsynced = []

    def _prune(self, step: int) -> None:
        """Delete older checkpoints, on the writer's thread, after that of ``step`` is published.
        An error is only a warning.
        """
        keys = self.parts.config.checkpoint
        try:
            prune(self.place, keys.keep_last, keys.keep_every, published=step, warn=self._warn)
        except (CheckpointError, OSError) as error:
            self._warn(f"older checkpoints could not be deleted: {error}")
