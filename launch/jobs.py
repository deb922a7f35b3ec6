"""Commands that start ranks, or run as one under torchrun or srun: train, doctor, eval, sample. Also slurm, which
submits jobs. Heavy imports happen inside each command, as in :mod:`meshwright.launch.commands`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import Preempted, UserError
from meshwright.system.bounded import real_path
from meshwright.terminal.output import put, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.config import RunConfig
    from meshwright.launch.environment import Launcher
    from meshwright.launch.rank import Work


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.config import default_world_size
    from meshwright.launch import devices, forking, local, restarts
    from meshwright.launch.environment import Launcher
    from meshwright.run import RunLock

    config, launcher = _load_config(options, overrides)
    if launcher is not Launcher.NONE:
        return _as_rank(config, launcher, _training)
    RunLock(Path(config.run.directory) / config.run.name).check_free()  # before seconds of imports; rank 0 takes it
    if local.has_children(config):
        forking.warm_up(config, "meshwright.launch.work")
    from meshwright.launch.work import check, work
    from meshwright.run.directory import run_directory

    checked, _ = check(config, default_world_size(config, devices.num_devices(config)))
    num_ranks = checked.launch.processes
    with contextlib.suppress(OSError):  # nobody reads it, which is no reason not to train
        put(f"starting {num_ranks} rank{'s' * (num_ranks != 1)} on this machine", flush=True)
    return _ended(
        lambda: restarts.run_with_restarts(
            lambda: local.launch(work, checked),
            checked.launch.max_restarts,
            run_directory(checked),
            lambda text: tell(f"meshwright: {text}"),
        )
    )


def _load_config(options: argparse.Namespace, overrides: list[str]) -> tuple[RunConfig, Launcher]:
    """Return the configuration and the launcher of this process; choose the GPUs of this process and its children."""
    from meshwright.config import load
    from meshwright.launch.devices import choose_devices
    from meshwright.launch.environment import launch_environment

    config = load(options.config, overrides)
    choose_devices(config)
    return config, launch_environment()


def _training(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """Check the configuration; return the rank function that trains, and the configuration for ``world_size``."""
    from meshwright.launch.work import check, work

    checked, _ = check(config, world_size)
    if checked.launch.max_restarts and os.environ["RANK"] == "0":
        tell(
            "launch.max_restarts has no effect here: who starts the ranks starts them again (torchrun --max-restarts, "
            "sbatch --requeue)"
        )
    return work, checked


def _visiting(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """Return the doctor's rank function and the configuration resolved for ``world_size``."""
    from meshwright.config import resolve
    from meshwright.tools.doctor.rank import run_rank

    return run_rank, resolve(config, world_size)


def _as_rank(config: RunConfig, launcher: Launcher, prepare: Callable[[RunConfig, int], tuple[Work, RunConfig]]) -> int:
    """Run this process as one rank of torchrun or srun; a failure ends it at once, with its rank in the message."""
    from meshwright.launch import rank
    from meshwright.launch.environment import Launcher, check_meeting_place, check_port, read_place, torch_variables
    from meshwright.launch.failure import describe
    from meshwright.system.process import leave

    if launcher is Launcher.SLURM:
        os.environ.update(torch_variables())
    at = read_place()
    if launcher is Launcher.SLURM and at.rank == 0:
        check_port(os.environ["MASTER_PORT"])
    rank.set_threads(config.launch.threads)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    def keep_exit_code(exit_code: int) -> None:
        """Exit with this code on SIGTERM: the first rank to leave ends the others; srun reports the highest code."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code))

    # What one rank finds wrong before it trains all find: one of each node says it, the others are ended meanwhile.
    try:
        check_meeting_place()
        work, checked = prepare(config, at.world_size)
    except UserError as error:
        keep_exit_code(error.exit_code)
        if at.local_rank != 0:
            time.sleep(rank.SILENT_S)
        return print_error(error, error.exit_code)

    def end(error: BaseException) -> None:
        failure = describe(error, at.rank)
        keep_exit_code(failure.exit_code)
        if failure.trace:
            get_error_handler().record_exception(error)  # for torchrun's own summary
        elif failure.exit_code == UserError.exit_code and at.local_rank != 0:
            time.sleep(rank.HOLD_S)
        print_error(f"rank {at.rank}: {failure.trace or failure.message}", failure.exit_code)
        leave(failure.exit_code, rank.HOLD_S if failure.lost_peer else 0.0)

    try:
        work(checked, end)
    except KeyboardInterrupt:
        leave(130)
    except Preempted as error:
        if at.rank == 0:
            print_error(error, error.exit_code)
        # srun --kill-on-bad-exit ends all others when the first says 85, and tells the highest exit code of all
        leave(0 if launcher is Launcher.SLURM and at.rank != 0 else error.exit_code)
    except BaseException as error:
        end(error)
    return 0


def doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.config import default_world_size
    from meshwright.launch import devices, forking, local
    from meshwright.launch.environment import Launcher

    config, launcher = _load_config(options, overrides)
    if launcher is not Launcher.NONE:
        return _as_rank(config, launcher, _visiting)
    forking.warm_up(config, "meshwright.tools.doctor.rank")
    work, resolved = _visiting(config, default_world_size(config, devices.num_devices(config)))
    return _ended(lambda: local.launch(work, resolved))


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.environment import Launcher, launch_environment
    from meshwright.run.directory import find_run, is_checkpoint
    from meshwright.system.atomic import check_place

    if not is_checkpoint(options.place):
        find_run(options.place)  # before seconds of imports
    check_place(options.out, folder=False, example="eval.json")
    launcher = launch_environment()
    from meshwright.tools.inference.corpora import with_corpus
    from meshwright.tools.inference.evaluate import EvaluationJob, check
    from meshwright.tools.inference.load import config_for, locate

    place = locate(options.place, options.step)
    defaults = [] if launcher is Launcher.NONE else ["--parallel.dp=auto"]
    config = config_for(place, overrides, "eval", defaults=defaults, trust_code=options.trust_code)
    if options.data is not None:
        config = with_corpus(config, options.data)
    work = EvaluationJob(place, options.data is None, options.out, options.batches)
    return _used(config, launcher, place.run, lambda config, size: (work, check(config, size)))


def sample(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.environment import Launcher, launch_environment
    from meshwright.run.directory import find_run, is_checkpoint
    from meshwright.system.atomic import check_place

    if not is_checkpoint(options.place):
        find_run(options.place)
    check_place(options.out, folder=False, example="texts.jsonl")
    launcher = launch_environment()
    from meshwright.tools.inference.load import config_for, locate
    from meshwright.tools.inference.sample import SAME_TEXT, Sampling, SamplingRequest, check

    place = locate(options.place, options.step)
    defaults = list(SAME_TEXT)
    if launcher is Launcher.NONE and not any(word.startswith("--parallel.") for word in overrides):
        defaults += ["--parallel.pp=1", "--parallel.tp=1"]
    config = config_for(place, overrides, "sample", defaults=defaults, trust_code=options.trust_code)
    ask = SamplingRequest(
        tuple(options.prompt), options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    work = Sampling(place, ask, options.out)
    return _used(config, launcher, place.run, lambda config, size: (work, check(config, size, len(ask.prompts))))


def _used(
    config: RunConfig, launcher: Launcher, run: Path, prepare: Callable[[RunConfig, int], tuple[Work, RunConfig]]
) -> int:
    """Start ranks that use a trained model, or run as one of them. Ranks started here log to a temporary directory."""
    import tempfile

    from meshwright.config import default_world_size
    from meshwright.launch import devices, local
    from meshwright.launch.environment import Launcher
    from meshwright.launch.leftovers import own_directory

    devices.choose_devices(config)
    if launcher is not Launcher.NONE:
        return _as_rank(config, launcher, prepare)
    work, checked = prepare(config, default_world_size(config, devices.num_devices(config)))
    with tempfile.TemporaryDirectory(prefix="logs-", dir=own_directory()) as logs:
        keeping = checked.run.model_copy(update={"directory": logs, "name": real_path(run).name})
        return _ended(lambda: local.launch(work, checked.model_copy(update={"run": keeping})))


def slurm(options: argparse.Namespace, overrides: list[str]) -> int:
    from dataclasses import fields

    from meshwright.config import load
    from meshwright.launch.slurm import JobOptions, render, resolve_for_nodes, submit, write

    ask = JobOptions(**{field.name: getattr(options, field.name) for field in fields(JobOptions)})
    config, picture = resolve_for_nodes(load(options.config, overrides), ask)
    script = render(config, options.config, overrides, ask, trust_code=options.trust_code)
    place = write(script, config)
    if not options.submit:
        print(script, end="")
        tell(f"written to {place}; `sbatch {place}` submits it, or --submit")
        return 0
    put(picture)
    numbers = submit(place, ask.chain)
    put(f"submitted {place}: job{'s' * (len(numbers) > 1)} {', '.join(numbers)}; logs in {place.parent}")
    return 0


def _ended(start: Callable[[], object]) -> int:
    """Start ranks on this machine, print the error that ended them, if any, and return the exit code."""
    from meshwright.launch.failure import RankFailed
    from meshwright.launch.local import Interrupted

    try:
        start()
    except (RankFailed, Interrupted) as error:
        return print_error(error, error.exit_code)
    return 0


def print_error(error: object, exit_code: int) -> int:
    word = "" if exit_code == Preempted.exit_code else "error: "  # who was asked to end has done well to
    tell(f"meshwright: {word}{error}")
    return exit_code
