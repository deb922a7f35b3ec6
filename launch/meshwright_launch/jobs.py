"""Commands that start ranks, or run as one of them under torchrun, srun or mpirun: train, doctor,
eval, sample.

Heavy imports happen inside each command, after the checks that need none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import HangError, Preempted, UserError
from meshwright.system.bounded import abridge_words, real_path
from meshwright.system.packages import own_folder
from meshwright.system.store import Place
from meshwright.terminal.output import put, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from meshwright.config import RunConfig
    from meshwright_launch.environment import Launcher, RankPlace
    from meshwright_launch.rank import Work

    Prepare = Callable[[RunConfig, int], tuple[Work, RunConfig]]
    """Function that checks (configuration, world size)
    and returns the rank function with its configuration.
    """


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """Train, or resume the run of the same configuration."""
    from meshwright.run import RunLock
    from meshwright.run.directory import check_not_moved, run_directory
    from meshwright_launch import devices, forking, local, nodes, restarts
    from meshwright_launch.environment import Launcher
    from meshwright_launch.node_place import check_agent, find_place

    routing = [] if options.routing is None else [f"--train.routing={options.routing}"]
    config, launcher = _load_config(options, [*overrides, *routing])
    check_not_moved(config.run, options.config, overrides)
    place = find_place(launcher)
    check_agent(config, place)
    if place is None and launcher is not Launcher.NONE:
        return _run_as_rank(config, launcher, _prepare_training)
    if config.watch.mirror:
        return _exit_code_of(lambda: nodes.train(config, place))
    directory = run_directory(config.run)
    RunLock(directory).check_free()  # before seconds of imports; rank 0 takes it
    if local.has_children(config.launch):
        forking.warm_up(config, "meshwright_launch.work")
    from meshwright_launch.work import check, work

    checked, _ = check(config, devices.num_local_ranks(config))
    num_ranks = checked.launch.processes
    with contextlib.suppress(OSError):  # a closed stdout does not stop the training
        put(f"starting {num_ranks} rank{'s' * (num_ranks != 1)} on this machine", flush=True)
    return _exit_code_of(
        lambda: restarts.run_with_restarts(
            lambda: local.launch(work, checked),
            checked.launch.max_restarts,
            directory,
            lambda text: tell(f"meshwright: {text}"),
        )
    )


def _load_config(options: argparse.Namespace, overrides: list[str]) -> tuple[RunConfig, Launcher]:
    """Return the configuration and the launcher of this process;
    restrict it and its children to ``launch.devices``.
    """
    from meshwright.config import load
    from meshwright_launch.devices import choose_devices
    from meshwright_launch.environment import launch_environment

    config = load(options.config, overrides)
    choose_devices(config.launch)
    return config, launch_environment()


def _prepare_training(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """Check the configuration; return the rank function that trains,
    and the configuration for ``world_size``.
    """
    from meshwright_launch.work import check, work

    checked, _ = check(config, world_size)
    if checked.launch.max_restarts and os.environ["RANK"] == "0":
        keys = "launch.max_restarts has"
        if checked.watch.mirror:
            keys = "launch.max_restarts and watch.mirror have"
        tell(
            f"{keys} no effect here: the launcher restarts the ranks (torchrun --max-restarts, sbatch"
            " --requeue). watch.mirror needs one agent on each node: `meshwright slurm` starts them,"
            " and docs/reliability.md has the variables for other schedulers"
        )
    return work, checked


def _prepare_doctor(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """Return the doctor's rank function and the configuration resolved for ``world_size``."""
    from meshwright.config import resolve
    from meshwright.doctor.rank import run_rank

    return run_rank, resolve(config, world_size)


def _run_as_rank(config: RunConfig, launcher: Launcher, prepare: Prepare) -> int:
    """Run this process as one rank of its launcher; a failure ends the process,
    with its rank in the message.
    """
    from meshwright.system.process import ignore_signals, leave
    from meshwright_launch import rank
    from meshwright_launch.environment import Launcher, check_rendezvous
    from meshwright_launch.failure import leave_exit_code

    place = _find_place(launcher)
    rank.set_threads(config.launch.threads)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # now, not in a failure: an import may fail then
    end = partial(_end_rank, place, get_error_handler())
    # An error before training is the same on all ranks: one of each node prints it, the others are
    # ended meanwhile.
    try:
        check_rendezvous()
        work, checked = prepare(config, place.world_size)
    except UserError as error:
        _keep_exit_code(error.exit_code)
        if place.local_rank != 0:
            time.sleep(rank.DUPLICATE_ERROR_DELAY_S)
        return print_error(error, error.exit_code)
    try:
        work(checked, end)
        # a time limit's signal during the interpreter's shutdown: the run is complete
        ignore_signals()
    except KeyboardInterrupt:
        leave(130)
    except Preempted as error:
        if place.rank == 0:
            print_error(error, error.exit_code)
        leave_exit_code(error.exit_code)
        # srun --kill-on-bad-exit and mpirun end all others when the first exits with 85, and return
        # the highest code
        leave(0 if launcher is not Launcher.TORCHRUN and place.rank != 0 else error.exit_code)
    except BaseException as error:
        end(error)
    return 0


def _find_place(launcher: Launcher) -> RankPlace:
    """Return the place of this process among the ranks of its launcher,
    and set torch's variables for it.
    """
    from meshwright_launch.environment import Launcher, check_port, rank_variables, read_place
    from meshwright_launch.mpi import mpi_place

    os.environ.update(rank_variables(launcher))
    place = read_place()
    if launcher is Launcher.TORCHRUN or place.rank != 0:
        return place
    # no agent has taken the port: this rank will
    check_port(os.environ["MASTER_PORT"])
    mpi = mpi_place(os.environ) if launcher is Launcher.MPI else None
    if mpi is not None:
        address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        tell(f"{mpi.description} started the ranks; rendezvous at {address}")
    return place


def _end_rank(place: RankPlace, torchrun: ErrorHandler, error: BaseException) -> None:
    """Report the error of a rank, and end its process."""
    from meshwright.system.process import leave
    from meshwright_launch import rank
    from meshwright_launch.failure import describe, leave_record, text_of

    failure = describe(error, place.rank)
    leave_record(failure)
    _keep_exit_code(failure.exit_code)
    if failure.trace and not failure.lost_peer:
        torchrun.record_exception(error)  # for its own summary
    elif failure.exit_code == UserError.exit_code and place.local_rank != 0:
        time.sleep(rank.LINGER_S)
    print_error(f"rank {place.rank}: {text_of(failure)}", failure.exit_code)
    if isinstance(error, HangError):
        error.linger()
    leave(failure.exit_code, rank.LINGER_S if failure.lost_peer else 0.0)


def _keep_exit_code(exit_code: int) -> None:
    """Exit with this code on SIGTERM: the first rank to exit ends the others;
    srun reports the highest code.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code))


def doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure the nodes and links of a run."""
    from meshwright_launch import devices, forking, local
    from meshwright_launch.environment import Launcher

    config, launcher = _load_config(options, overrides)
    if launcher is not Launcher.NONE:
        return _run_as_rank(config, launcher, _prepare_doctor)
    forking.warm_up(config, "meshwright.doctor.rank")
    work, resolved = _prepare_doctor(config, devices.num_local_ranks(config))
    return _exit_code_of(lambda: local.launch(work, resolved))


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure the loss of a trained model."""
    is_launched = check_inference(options)
    from meshwright.inference.corpora import with_corpus
    from meshwright.inference.evaluate import EvaluationJob, check
    from meshwright.inference.load import config_for, locate

    place = locate(options.place, options.step)._replace(weights=options.weights)
    defaults = ["--parallel.dp=auto"] if is_launched else []
    config = config_for(place, overrides, "eval", defaults=defaults, trust_code=options.trust_code)
    if options.data is not None:
        data = with_corpus(config.data, options.data)
        config = config.model_copy(update={"data": data})
    work = EvaluationJob(
        place, options.data is None and options.weights == "weights", options.out, options.batches
    )
    return run_inference(config, place.run, lambda config, size: (work, check(config, size)))


def sample(options: argparse.Namespace, overrides: list[str]) -> int:
    """Generate text with a trained model."""
    is_launched = check_inference(options)
    from meshwright.inference.choice import SamplingRequest
    from meshwright.inference.load import config_for, locate
    from meshwright.inference.sample import SAME_TEXT, Sampling, check

    place = locate(options.place, options.step)._replace(weights=options.weights)
    defaults = list(SAME_TEXT)
    if not is_launched and not any(word.startswith("--parallel.") for word in overrides):
        defaults += ["--parallel.pp=1", "--parallel.tp=1"]
    config = config_for(
        place, overrides, "sample", defaults=defaults, trust_code=options.trust_code
    )
    request = SamplingRequest(
        tuple(options.prompt),
        options.tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
    )
    work = Sampling(place, request, options.out)
    return run_inference(
        config, place.run, lambda config, size: (work, check(config, size, len(request.prompts)))
    )


def check_inference(options: argparse.Namespace) -> bool:
    """Check the run before seconds of imports; return True if torchrun,
    srun or mpirun has started this process.
    """
    from meshwright.run.directory import find_run, is_checkpoint
    from meshwright_launch.environment import Launcher, launch_environment

    if isinstance(options.place, Path) and not is_checkpoint(options.place):
        find_run(options.place)
    return launch_environment() is not Launcher.NONE


def run_inference(config: RunConfig, run: Place, prepare: Prepare) -> int:
    """Start ranks that use a trained model, or run as one of them.
    Ranks started here log to a temporary directory.
    """
    import tempfile

    from meshwright_launch import devices, local
    from meshwright_launch.environment import Launcher, launch_environment
    from meshwright_launch.leftovers import own_directory

    devices.choose_devices(config.launch)
    launcher = launch_environment()
    if launcher is not Launcher.NONE:
        return _run_as_rank(config, launcher, prepare)
    work, checked = prepare(config, devices.num_local_ranks(config))
    with tempfile.TemporaryDirectory(prefix="logs-", dir=own_directory()) as logs:
        name = real_path(run).name if isinstance(run, Path) else run.name
        checked = checked.replace(run={"directory": logs, "name": name})
        return _exit_code_of(lambda: local.launch(work, checked))


def _exit_code_of(start: Callable[[], int | None]) -> int:
    """Start ranks on this machine, print the error that ended them, if any,
    and return the exit code.
    """
    from meshwright_launch.failure import RankFailed
    from meshwright_launch.node_ranks import Interrupted

    try:
        return start() or 0
    except (RankFailed, Interrupted) as error:
        return print_error(error, error.exit_code)


def places_of_pages(message: str) -> str:
    """Return a line with the place of each page of docs/ that a message names;
    empty where the name leads there.
    """
    home = own_folder("docs").parent
    pages = dict.fromkeys(re.findall(r"\bdocs/[\w/-]+\.md\b", message))
    found = [page for page in pages if (home / page).is_file() and not Path(page).is_file()]
    return "".join(f"\n  {page} is {home / page}" for page in found)


def print_error(error: object, exit_code: int) -> int:
    """Print an error to stderr and return its exit code.
    A :class:`Preempted` has no prefix "error:".
    """
    prefix = "" if exit_code == Preempted.exit_code else "error: "
    tell(f"meshwright: {prefix}{abridge_words(str(error))}{places_of_pages(str(error))}")
    return exit_code
