"""Launcher of the ranks of one machine: starts them, watches them and ends them.

    meshwright train ---- store at 127.0.0.1      process group rendezvous; nothing in it is unpickled
          |   | sentinels
          |   +---- rank 0   console
          |   +---- rank 1   runs/NAME/logs/rank-1.log
          | pipe     ...
    fork server ---- forks them: 0.1 s each instead of an import of torch each

Every socket of a local run listens on the loopback interface (docs/security.md). torch's elastic
agent is not used: its store listens on all interfaces, and the agent unpickles what any client
writes there.

No rank outlives the launcher: each watches a pipe of the launcher, and dies with the fork server.
rank.py is the side of the rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import Launch, RunConfig
from meshwright.errors import ConfigError, DriftError, MeshError
from meshwright.run.directory import run_directory
from meshwright.system.process import SIGNALS, end_process, ignored_signals
from meshwright_launch.environment import check_port
from meshwright_launch.failure import RankFailed, build_error, describe, read_failures
from meshwright_launch.forking import warm_up
from meshwright_launch.leftovers import own_directory
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.rank import LocalRank, Work, run_rank, set_threads

if TYPE_CHECKING:  # it imports torch, and the launcher starts the fork server first
    from meshwright_launch.recovery import RankReplacer

LOOPBACK = "127.0.0.1"
MAX_RANKS = 1024
UNKNOWN_EXIT = 255
"""Exit code that multiprocessing reports for a child whose fork server is gone:
the true one is lost.
"""
POLL_S = 1.0
"""Interval in seconds in which the launcher looks for signal handlers of ranks,
until all have one.
"""
TOGETHER_S = 0.05
"""Seconds in which ranks that die are taken to die together: one recovery replaces all of them."""
RECOVERY_POLL_S = 0.1
"""Interval in seconds in which the launcher looks at a recovery."""
SHUTDOWN_S = 3
"""Time for the remaining ranks to end by themselves after a failure."""


class ForkServerError(MeshError):
    """End of the process that forks the ranks. A restart may succeed."""

    exit_code = 1


class Interrupted(BaseException):
    """Exit by a signal that arrived before the ranks could save; the launcher has killed them."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"ended by {signal.Signals(signum).name}")


def has_children(launch: Launch) -> bool:
    """Return True if ranks run in child processes;
    a single rank does only if it may have to be restarted.
    """
    return launch.processes != 1 or launch.max_restarts > 0


def launch(work: Work, config: RunConfig, mirror: MirrorPlace | None = None) -> None:
    """Run ``work(config, give_up)`` in ``config.launch.processes`` ranks of this machine;
    block until all have ended.

    ``config`` is resolved. ``work`` is pickled by name. A single rank runs in this process, unless
    it may have to be restarted. ``mirror``: where the ranks mirror their steps; ``work`` takes part in
    recoveries in place. None: it does not.

    Raises:
        MeshError: the port in MASTER_PORT is taken, or the launcher cannot listen on loopback.
        ConfigError: too many ranks, or the log directory cannot be written.
        RankFailed: a rank raised or died; has its message and those of later failures. Also if the
            fork server ended. With exit code 85: all ranks have saved and exited after a signal.
        Interrupted: a signal arrived before all ranks could save.
    """
    num_ranks = config.launch.processes
    assert isinstance(num_ranks, int), "resolve the configuration first"
    if num_ranks > MAX_RANKS:
        raise ConfigError(
            "MW-LAUNCH-033",
            f"{num_ranks:,} ranks on this machine: at most {MAX_RANKS:,} are started here. Lower a"
            " degree, or use several nodes (`meshwright slurm`)",
        )
    if not has_children(config.launch):
        set_threads(config.launch.threads)
        try:
            work(config, end_process)
        except (SystemExit, BrokenPipeError) as error:
            # from user code: treated as from a rank in its own process
            failure = describe(error, 0)
            raise RankFailed(f"rank 0: {failure.message}\n{failure.trace}", 0) from None
        return
    logs = run_directory(config.run) / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "MW-LAUNCH-034",
            f"the logs of this run cannot be written to {logs}: {error.strerror}; choose another"
            " run.directory or run.name",
        ) from None
    port = _rendezvous_port()
    with contextlib.ExitStack() as stack:
        records = own_directory() / f"records-{time.monotonic_ns()}"
        (records / "listening").mkdir(parents=True)
        stack.callback(shutil.rmtree, records, ignore_errors=True)
        others = multiprocessing.active_children()
        stack.callback(_kill_children, but=others)
        forwarder = _SignalForwarder(records / "listening", num_ranks, others)
        ignored = ignored_signals()
        stack.enter_context(forwarder.installed({*SIGNALS, signal.SIGQUIT}.difference(ignored)))
        warm_up(config, work.__module__)
        store, bound = stack.enter_context(_open_store(port, num_ranks))
        mirror_path = None if mirror is None else str(mirror.open())

        def start(rank: int, generation: int) -> Any:
            place = LocalRank(rank, num_ranks, LOOPBACK, bound, generation, mirror_path)
            return _start(work, config, place, logs, records, ignored)

        first = 0 if mirror is None else mirror.generation
        recovery = None if mirror is None else _open_recovery(store, start, config, mirror)
        try:
            ranks = [start(rank, first) for rank in range(num_ranks)]
            _watch(ranks, records, logs, forwarder, recovery)
        except RankFailed as failed:
            failed.is_requested = forwarder.has_forwarded
            if mirror is not None:
                mirror.generation += 1
                if failed.exit_code == DriftError.exit_code:  # steps before may have drifted too
                    mirror.clear()
            raise


@contextlib.contextmanager
def _open_store(port: int, num_ranks: int) -> Iterator[tuple[Any, int]]:
    """Serve the ranks' rendezvous store from this process, on 127.0.0.1 only;
    yield the store and its port.

    torch's own TCPStore would listen on all interfaces, so it is given a socket that is already
    bound.
    """
    import torch.distributed as dist

    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise MeshError(
            "MW-LAUNCH-035",
            f"the launcher cannot listen at {LOOPBACK}, port {port or 'any'}: {error.strerror}. Set"
            " MASTER_PORT to a free port",
        ) from None
    bound = listener.getsockname()[1]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, bound, num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    yield store, bound


def _open_recovery(
    store: Any, start: Callable[[int, int], Any], config: RunConfig, place: MirrorPlace
) -> RankReplacer:
    """Return the launcher's side of recoveries in place."""
    from meshwright_launch.recovery import RankReplacer

    num_ranks = config.launch.processes
    assert isinstance(num_ranks, int)
    limit, directory = config.launch.max_restarts, run_directory(config.run)
    return RankReplacer(store, start, num_ranks, limit, directory, place)


def _start(
    work: Work,
    config: RunConfig,
    place: LocalRank,
    logs: Path,
    records: Path,
    ignored: list[signal.Signals],
) -> Any:
    """Fork one rank; return its process.

    Raises:
        RankFailed: the fork server has died meanwhile.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=run_rank,
        args=(work, config, str(logs), str(records), ignored, place),
        name=f"rank-{place.rank}",
    )
    try:
        process.start()
    except (OSError, EOFError) as error:
        raise _server_gone(
            f"while it started rank {place.rank} ({error or type(error).__name__})", place.rank
        ) from None
    return process


def _watch(
    ranks: list[Any],
    records: Path,
    logs: Path,
    forwarder: _SignalForwarder,
    recovery: RankReplacer | None,
) -> None:
    """Block until all ranks have exited,
    or until one has failed and the others were ended after it.

    With ``recovery`` failed ranks are replaced, in ``ranks`` too, as long as that is possible.

    Raises:
        RankFailed: a rank failed, all have saved and exited on request, or the fork server was
            killed, and the ranks with it.
    """
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        is_pending = recovery is not None and recovery.is_pending
        limit_s = RECOVERY_POLL_S if is_pending else None if forwarder.all_listen() else POLL_S
        changed = wait(list(running), limit_s)
        if changed and recovery is not None:
            time.sleep(TOGETHER_S)
            changed = wait(list(running), 0)
        ended = sorted(running.pop(sentinel) for sentinel in changed if sentinel in running)
        failed = [rank for rank in ended if ranks[rank].exitcode]
        codes = {rank: ranks[rank].exitcode for rank in failed}
        has_finished = any(process.exitcode == 0 for process in ranks)
        is_possible = not (has_finished or forwarder.has_forwarded)
        if failed and recovery is not None and is_possible and recovery.is_possible(codes.values()):
            failures = [each for each in read_failures(records) if each.rank in failed]
            failure = build_error(failed[0], codes[failed[0]], failures, logs)
            for rank in recovery.replace(ranks, failed, failure):
                (records / f"{rank}.json").unlink(missing_ok=True)  # the failure that was repaired
            forwarder.forget(process.pid for process in ranks)
            running = {process.sentinel: rank for rank, process in enumerate(ranks)}
        elif failed:
            _end_all(ranks)
            failures = read_failures(records)
            if not failures and codes[failed[0]] == UNKNOWN_EXIT:
                raise _server_gone("and all ranks with it", failed[0])
            raise build_error(failed[0], codes[failed[0]], failures, logs)
        elif recovery is not None and recovery.is_pending and has_finished:
            _end_all(ranks)  # those that wait for a rank that has ended the run
            raise RankFailed(
                "a rank died while the others ended the run; the next start finds it complete", 0
            )
        elif recovery is not None and recovery.is_pending:
            recovery.check(ranks)
    for record in read_failures(records):  # no rank failed: all have saved and exited on request
        raise RankFailed(record.message, record.rank, record.exit_code)


def _end_all(ranks: Sequence[Any]) -> None:
    """Terminate the remaining ranks, wait up to SHUTDOWN_S, then kill them."""
    for process in ranks:
        if process.is_alive():
            process.terminate()
    deadline_s = time.monotonic() + SHUTDOWN_S
    for process in ranks:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()


def _server_gone(when: str, rank: int) -> RankFailed:
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


class _SignalForwarder:
    """Signal handler of the launcher: forwards the first signal to the ranks,
    which then save and exit.

    While some rank has no handler yet, there is nothing to save, and all are killed. ``listening``:
    directory with a file for each rank that has a handler, named by its process id. A file is
    needed only once: a program that cleans the temporary directory may delete it while the run goes
    on.
    """

    def __init__(
        self, listening: Path, num_ranks: int, others: list[multiprocessing.process.BaseProcess]
    ) -> None:
        self._listening = listening
        self._num_ranks = num_ranks
        self._others = others
        self._pids: set[int] = set()
        """Process ids of the ranks that have a handler."""
        self.has_forwarded = False

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

    def all_listen(self) -> bool:
        """Return True if all ranks have a handler, from the first time on."""
        if len(self._pids) < self._num_ranks:
            with contextlib.suppress(FileNotFoundError):
                self._pids |= {int(place.name) for place in self._listening.iterdir()}
        return len(self._pids) >= self._num_ranks

    def forget(self, alive: Iterable[int]) -> None:
        """Keep the ranks among these process ids: a process that replaces another has no handler
        yet.
        """
        known = set(alive)
        self._pids &= known
        for place in self._listening.iterdir():
            if int(place.name) not in known:
                place.unlink(missing_ok=True)

    def _handle(self, signum: int, frame: object) -> None:
        """Forward the first signal to all ranks; raise Interrupted on SIGQUIT,
        or if some rank has no handler yet.
        """
        if signum == signal.SIGQUIT:
            raise Interrupted(signum)
        if self.has_forwarded:
            return
        if not self.all_listen():
            _kill_children(self._others)
            raise Interrupted(signum)
        self.has_forwarded = True
        for pid in self._pids:
            # the rank has finished its last step and exited
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def _rendezvous_port() -> int:
    """Return the port in MASTER_PORT if the user has set one, else 0 for any free port."""
    text = os.environ.get("MASTER_PORT", "")
    return check_port(text) if text else 0


def _kill_children(but: list[multiprocessing.process.BaseProcess]) -> None:
    """Kill all child processes except ``but``;
    otherwise the interpreter would wait for them at exit.
    """
    for child in multiprocessing.active_children():
        if child not in but:
            child.kill()
            child.join()
