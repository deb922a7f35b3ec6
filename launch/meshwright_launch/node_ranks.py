"""Ranks of one node: processes forked from a warm server, their exits, and the signals for them.

    launcher or agent ---- fork server ---- rank 0   console
          |  sentinels          |
          |                     +---------- rank 1   runs/NAME/logs/rank-1.log
          pipe                  ...

No rank outlives this process: each watches a pipe of it, and dies with the fork server. rank.py is
the side of the rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, MeshError
from meshwright.run.directory import run_directory
from meshwright.system.process import SIGNALS, ignored_signals
from meshwright_launch.failure import FailureRecord, RankFailed, read_failure, read_failures
from meshwright_launch.forking import warm_up
from meshwright_launch.leftovers import own_directory
from meshwright_launch.rank import LocalRank, Work, run_rank

UNKNOWN_EXIT = 255
"""Exit code that multiprocessing reports for a child whose fork server is gone:
the true one is lost.
"""
SHUTDOWN_S = 3
"""Time for the remaining ranks to end by themselves after a failure."""


class ForkServerError(MeshError):
    """End of the process that forks the ranks. A restart may succeed."""

    exit_code = 1


class Interrupted(BaseException):
    """Exit by a signal that arrived before the ranks could save; the launcher has killed them."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"ended by {signal.Signals(signum).name}")


class RankExit(NamedTuple):
    """End of a rank's process."""

    rank: int
    generation: int
    """Launch of ranks that it was started in."""
    code: int
    """Exit code; negative: the signal that has ended it."""
    failure: FailureRecord | None
    """Record that it has left."""


class NodeRanks:
    """Processes of the ranks of this node."""

    def __init__(
        self,
        work: Work,
        config: RunConfig,
        records: Path,
        signals: SignalForwarder,
        ignored: list[signal.Signals],
    ) -> None:
        """Begin without a rank; :func:`open_ranks` prepares the arguments."""
        self.signals = signals
        self.logs = run_directory(config.run) / "logs"
        self._work, self._config = work, config
        self.module = work.__module__
        """Module that the fork server imports."""
        self._records = records
        self._ignored = ignored
        self._processes: dict[int, Any] = {}
        self._generations: dict[int, int] = {}
        self._taken: set[int] = set()
        """Ranks whose exit was returned."""

    def warm_up(self) -> None:
        """Start the fork server; no effect while it runs."""
        warm_up(self._config, self.module)

    def start(self, place: LocalRank) -> None:
        """Fork the process of a rank, in place of one that has ended.

        Raises:
            RankFailed: the fork server has died meanwhile.
        """
        process = multiprocessing.get_context("forkserver").Process(
            target=run_rank,
            args=(
                self._work,
                self._config,
                str(self.logs),
                str(self._records),
                self._ignored,
                place,
            ),
            name=f"rank-{place.rank}",
        )
        (self._records / f"{place.rank}.json").unlink(missing_ok=True)  # of the process before it
        try:
            process.start()
        except (OSError, EOFError) as error:
            when = f"while it started rank {place.rank} ({error or type(error).__name__})"
            raise server_gone(when, place.rank) from None
        self._processes[place.rank] = process
        self._generations[place.rank] = place.generation
        self._taken.discard(place.rank)
        self.signals.expect(len(self._processes), self._pids())

    def kill(self, ranks: Collection[int]) -> None:
        """Kill these ranks and forget them."""
        found = [self._processes.pop(rank) for rank in ranks if rank in self._processes]
        for process in found:
            process.kill()
        for process in found:
            process.join()
        self.signals.expect(len(self._processes), self._pids())

    def end(self) -> None:
        """Terminate the remaining ranks, wait up to SHUTDOWN_S, then kill them."""
        processes = list(self._processes.values())
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline_s = time.monotonic() + SHUTDOWN_S
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()

    def sentinels(self) -> list[int]:
        """Return what :func:`multiprocessing.connection.wait` returns when a rank ends: those whose
        exit was not taken yet.
        """
        return [
            process.sentinel for rank, process in self._processes.items() if rank not in self._taken
        ]

    def take_exits(self) -> list[RankExit]:
        """Return the ranks that have ended since the last call, in order."""
        exits = []
        for rank in sorted(self._processes.keys() - self._taken):
            code = self._processes[rank].exitcode
            if code is not None:
                self._taken.add(rank)
                failure = read_failure(self._records, rank)
                exits.append(RankExit(rank, self._generations[rank], code, failure))
        return exits

    def failures(self) -> list[FailureRecord]:
        """Return the records of all ranks: causes before echoes, then the earliest first."""
        return read_failures(self._records)

    def held(self) -> list[int]:
        """Return the ranks that have a process here, or had one."""
        return sorted(self._processes)

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]


def make_logs(config: RunConfig) -> None:
    """Make the directory of the ranks' logs.

    Raises:
        ConfigError: it cannot be written.
    """
    logs = run_directory(config.run) / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "MW-LAUNCH-034",
            f"the logs of this run cannot be written to {logs}: {error.strerror}; choose another"
            " run.directory or run.name",
        ) from None


@contextlib.contextmanager
def open_ranks(work: Work, config: RunConfig, module: str | None = None) -> Iterator[NodeRanks]:
    """Prepare this node for its ranks: records, handlers of signals, fork server. Those that are left
    at the end of the block are killed. ``module``: to be imported by the server; None: that of ``work``.
    """
    with contextlib.ExitStack() as stack:
        records = own_directory() / f"records-{time.monotonic_ns()}"
        (records / "listening").mkdir(parents=True)
        stack.callback(shutil.rmtree, records, ignore_errors=True)
        others = multiprocessing.active_children()
        stack.callback(kill_children, but=others)
        signals = SignalForwarder(records / "listening", others)
        ignored = ignored_signals()
        stack.enter_context(signals.installed({*SIGNALS, signal.SIGQUIT}.difference(ignored)))
        ranks = NodeRanks(work, config, records, signals, ignored)
        ranks.module = module or work.__module__
        ranks.warm_up()
        yield ranks


class SignalForwarder:
    """Signal handler of a launcher: forwards the first signal to the ranks,
    which then save and exit.

    While some rank has no handler yet, there is nothing to save, and all are killed; in a recovery
    the signal is kept until all have one. ``listening``: directory with a file for each rank that
    has a handler, named by its process id. A file is needed only once: a program that cleans the
    temporary directory may delete it while the run goes on.
    """

    def __init__(self, listening: Path, others: list[multiprocessing.process.BaseProcess]) -> None:
        self._listening = listening
        self._others = others
        self._num_ranks = 0
        self._pids: set[int] = set()
        """Process ids of the ranks that have a handler."""
        self._signalled: set[int] = set()
        """Those that have got the signal."""
        self._kept: int | None = None
        """Signal that is forwarded once all ranks have a handler."""
        self.is_recovering = False
        """Flag: the memory has steps that a kill of all ranks would lose."""
        self._forwarded: int | None = None
        self._is_changing = False
        """Flag: processes are killed and started."""

    @property
    def has_forwarded(self) -> bool:
        """Flag: the ranks have got a signal."""
        return self._forwarded is not None

    @contextlib.contextmanager
    def changing(self, is_recovering: bool) -> Iterator[None]:
        """Kill and start processes inside the block: a signal that arrives in a recovery waits until
        all of them have a handler. One that was forwarded before is for those that are new, too.
        """
        self.is_recovering, self._is_changing = is_recovering, True
        try:
            yield
        finally:
            if is_recovering and self._forwarded is not None:
                self._kept = self._forwarded
            self._is_changing = False

    @contextlib.contextmanager
    def installed(self, signals: set[signal.Signals]) -> Iterator[None]:
        """Handle ``signals`` inside the block; restore the previous handlers after it.

        Once the ranks have been signalled, further signals are ignored instead, because this
        process is exiting too.
        """
        before = {each: signal.signal(each, self._handle) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, signal.SIG_IGN if self.has_forwarded else handler)

    def expect(self, num_ranks: int, alive: Iterable[int]) -> None:
        """Set the number of ranks, and keep those among these process ids: a process that replaces
        another has no handler yet.
        """
        self._num_ranks = num_ranks
        known = set(alive)
        self._pids &= known
        self._signalled &= known
        # a program that cleans the temporary directory may have removed it
        self._listening.mkdir(parents=True, exist_ok=True)
        for place in self._listening.iterdir():
            if int(place.name) not in known:
                place.unlink(missing_ok=True)

    def all_listen(self) -> bool:
        """Return True if all ranks have a handler, from the first time on."""
        if len(self._pids) < self._num_ranks:
            with contextlib.suppress(FileNotFoundError):
                self._pids |= {int(place.name) for place in self._listening.iterdir()}
        return len(self._pids) >= self._num_ranks

    def forward_kept(self) -> None:
        """Forward a signal that arrived in a recovery, once all ranks have a handler again."""
        if self._kept is not None and self._can_forward():
            signum, self._kept = self._kept, None
            self._forward(signum)

    def _can_forward(self) -> bool:
        return self._num_ranks > 0 and not self._is_changing and self.all_listen()

    def _handle(self, signum: int, frame: object) -> None:
        """Forward the first signal to all ranks; raise Interrupted on SIGQUIT,
        or if some rank has no handler yet.
        """
        if signum == signal.SIGQUIT:
            raise Interrupted(signum)
        if self.has_forwarded or self._kept is not None:
            return
        if self._can_forward():
            self._forward(signum)
        elif self.is_recovering:
            self._kept = signum
        else:
            kill_children(self._others)
            raise Interrupted(signum)

    def _forward(self, signum: int) -> None:
        self._forwarded = signum
        for pid in self._pids - self._signalled:
            self._signalled.add(pid)
            # the rank has finished its last step and exited
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def server_gone(when: str, rank: int) -> RankFailed:
    """Return the failure of a run whose fork server has ended: the kernel may have killed it,
    as it may kill a rank.
    """
    error = ForkServerError(
        "MW-LAUNCH-036",
        f"the process that forks the ranks has ended {when}: if nobody killed it, the kernel was"
        " out of memory (see `dmesg`). Start again, with fewer ranks or a smaller model if memory"
        " is short",
    )
    return RankFailed(str(error), rank, error.exit_code)


def kill_children(but: list[multiprocessing.process.BaseProcess]) -> None:
    """Kill all child processes except ``but``;
    otherwise the interpreter would wait for them at exit.
    """
    for child in multiprocessing.active_children():
        if child not in but:
            child.kill()
            child.join()
