"""The ranks of one machine, started by torch's elastic launcher from a server that has torch imported.

    meshwright train --- elastic agent ---- rank 0   console
          |                  |        +---- rank 1   runs/NAME/logs/rank-1.log
          | pipe             | watches      ...
    fork server  ------------+-- forks them: 0.1 s each instead of an import of torch each

No rank outlives the launcher: each watches a pipe that the launcher holds, and dies with the fork server. What a rank
does with its life, and how it ends, is in rank.py.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from framework.config import RunConfig
from framework.errors import ConfigError, MeshError
from framework.process import end_process
from framework.signals import SIGNALS, ignored
from launch.devices import check_devices
from launch.environment import check_port
from launch.failure import RankFailed, describe, read_notes, told
from launch.forking import PRELOADED
from launch.rank import Work, run_rank, set_threads

SHUTDOWN_S = 3
"""How long the ranks that are left after a failure have to end by themselves."""


class Interrupted(BaseException):
    """The launcher was told to end by a signal before its ranks could save anything, and has ended them."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"ended by {signal.Signals(signum).name}")


def num_devices(config: RunConfig) -> int:
    """The accelerators of this machine that the run may use; 0 on CPU.

    Raises:
        ConfigError: the run wants one, and there is none.
    """
    if config.train.device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count()
    check_devices(config, count)
    if count == 0 and config.train.device == "cuda":
        raise ConfigError(
            "train.device = 'cuda', but torch sees no GPU here: use 'auto' or 'cpu', or a CUDA build of torch"
        )
    return count


def warm_up(config: RunConfig, module: str) -> None:
    """Start the server from which the ranks will be forked; returns at once, while it imports torch and ``module``.

    Call it before this process imports them, so that both import at the same time. On a machine with a GPU the server
    imports torch alone: a library that asks for devices while it is imported would make CUDA useless in the ranks.
    """
    os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)
    if config.train.device != "cpu" and Path("/dev/nvidiactl").exists():
        modules = ["torch", "torch.distributed.device_mesh"]
    else:
        uses_megatron = config.parallel.tp > 1 or config.data.builder is None  # its regions, or its datasets
        modules = [*(["launch.preload"] if uses_megatron else PRELOADED), module]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    # The server looks for modules where this process does, not in a folder `models` that happens to lie in the current
    # directory; and a signal that goes to all (Ctrl-C, scancel) is for this process and the ranks to handle: the server
    # and Python's tracker are born with them blocked, and what comes meanwhile is not lost here.
    path = os.pathsep.join(filter(None, sys.path))
    with _variables(PYTHONPATH=path, PYTHONSAFEPATH="1"):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            multiprocessing.resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # it has unblocked some of them
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_children(config: RunConfig) -> bool:
    """Whether ranks are processes of their own: a lone one is, where it may have to be started again."""
    return config.launch.processes != 1 or config.launch.max_restarts > 0


def launch(work: Work, config: RunConfig) -> None:
    """Run ``work(config, give_up)`` in ``config.launch.processes`` ranks of this machine; blocks until all have ended.

    ``config`` is resolved. ``work`` is sent by its name. One rank needs no launcher and runs in this process, unless it
    may have to be started again.

    Raises:
        MeshError: the port in MASTER_PORT is taken, or the launcher cannot reach its own machine.
        ConfigError: the log directory cannot be written.
        RankFailed: a rank raised or died: its message, and those of the others after it. Asked to end by a signal,
            all ranks save and leave: exit code 85.
        Interrupted: by a signal, before all ranks took part in that.
    """
    num_ranks = config.launch.processes
    assert isinstance(num_ranks, int), "resolve the configuration first"
    if not has_children(config):
        set_threads(config.launch.threads)
        try:
            work(config, end_process)
        except (SystemExit, BrokenPipeError) as error:  # of a user's code: as from a rank that is a process of its own
            failure = describe(error, 0)
            raise RankFailed(f"rank 0: {failure.message}\n{failure.trace}", 0) from None
        return
    logs = Path(config.run.directory) / config.run.name / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the logs of this run cannot be written to {logs}: {error.strerror}; choose another run.directory or "
            f"run.name"
        ) from None
    port = _meeting_port()
    with contextlib.ExitStack() as stack:
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-")))
        (notes / "listening").mkdir()
        others = multiprocessing.active_children()
        stack.callback(_kill_children, but=others)
        end = _End(notes / "listening", num_ranks, others)
        unwanted = ignored()
        stack.enter_context(end.listening(set(SIGNALS).difference(unwanted)))
        stack.enter_context(_quiet_torch())
        warm_up(config, work.__module__)
        try:
            _elastic(work, config, num_ranks, port, logs, notes, unwanted)
        except RankFailed as failed:
            failed.asked = end.told
            raise


def _elastic(
    work: Work,
    config: RunConfig,
    num_ranks: int,
    port: int,
    logs: Path,
    notes: Path,
    unwanted: list[signal.Signals],
) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"{config.run.name}-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        local_addr="127.0.0.1",  # otherwise the launcher asks what its host name resolves to
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        signals_to_handle="SIGQUIT",  # the others are handled here
        shutdown_timeout=SHUTDOWN_S,
    )
    try:
        elastic_launch(settings, run_rank)(work, config, str(logs), str(notes), unwanted)
    except ChildFailedError as error:
        noticed, found = error.get_first_failure()
        raise told(noticed, found.exitcode, read_notes(notes), logs) from None
    except SignalException as error:
        raise Interrupted(error.sigval) from None
    except RendezvousError as error:
        raise MeshError(
            f"the launcher cannot listen at localhost, port {port or 'any'}: {error.__cause__ or error}. Set "
            f"MASTER_PORT to a free port"
        ) from None
    for left in read_notes(notes):  # nobody failed: they have saved, and all left as they were asked to
        raise RankFailed(left.message, left.rank, left.exit_code)


class _End:
    """What the launcher does when it is asked to end: the ranks are told, once, and save and leave.

    As long as some rank does not listen yet, there is nothing to save: all are ended.
    """

    def __init__(self, listening: Path, num_ranks: int, others: list[multiprocessing.process.BaseProcess]) -> None:
        self._listening = listening
        self._num_ranks = num_ranks
        self._others = others
        self.told = False

    @contextlib.contextmanager
    def listening(self, signals: set[signal.Signals]) -> Iterator[None]:
        """Within: the handler of these. Afterwards as before; but once the ranks have been told, another signal changes
        nothing any more: this process is leaving too."""
        before = {each: signal.signal(each, self.asked) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, signal.SIG_IGN if self.told else handler)

    def asked(self, signum: int, frame: object) -> None:
        """The launcher's handler of SIGNALS."""
        if self.told:
            return
        ranks = [int(place.name) for place in self._listening.iterdir()]
        if len(ranks) < self._num_ranks:
            _kill_children(self._others)
            raise Interrupted(signum)
        self.told = True
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has left already: its last step is done
                os.kill(rank, signum)


def _meeting_port() -> int:
    """The port in MASTER_PORT if the user has set one, else 0: any free one."""
    text = os.environ.get("MASTER_PORT", "")
    return check_port(text) if text else 0


def _kill_children(but: list[multiprocessing.process.BaseProcess]) -> None:
    """The agent forgets those that it was just starting when a signal came; the interpreter would wait for them."""
    for child in multiprocessing.active_children():
        if child not in but:
            child.kill()
            child.join()


@contextlib.contextmanager
def _variables(**variables: str) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """The agent logs each failure with its own traceback; the one message for people is made here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
