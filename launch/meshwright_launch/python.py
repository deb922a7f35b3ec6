"""Python API: a run that a script or a notebook steps by itself.
``import meshwright`` shows these names.

    config = meshwright.load_config("run.toml")          or make_config(model={...}, data={...}, ...)
    with meshwright.open_run(config) as run:             mesh, lock, parts, resume
        run.take_step(), run.validate(), run.save()
    meshwright.run_training(config, [MyObserver()])      the whole loop of `meshwright train`, in this rank
    meshwright.spawn(function, config)                   function(config) on each rank of this machine

A process that torchrun, srun, mpirun or :func:`spawn` has started is one rank of many; any other
process is the only rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.build import build
from meshwright.checkpoint.files import final_directory
from meshwright.config import Launch, RunConfig, load, load_saved, resolve
from meshwright.config.combinations.axes import WHOLE_SAMPLES
from meshwright.data.sources import corpus_times
from meshwright.errors import ConfigError
from meshwright.inference.evaluate import EvaluationJob, EvaluationResult
from meshwright.inference.evaluate import check as check_evaluation
from meshwright.inference.load import config_for, locate
from meshwright.inference.sample import sample as sample_text
from meshwright.mesh.mesh import close_mesh, environment_rank
from meshwright.parts import Observer, Parts, StepStats
from meshwright.run import RunFiles
from meshwright.run.observers import Checkpoints, validate
from meshwright.run.resume import record_start
from meshwright.run.start import resume_or_start
from meshwright.run.trust import check_file
from meshwright.step import take_step
from meshwright.system.process import GiveUp, StopRequest
from meshwright.system.store import Place, parse_place
from meshwright.terminal.output import print_lines, tell
from meshwright_launch import devices, local
from meshwright_launch.callbacks import StreamState
from meshwright_launch.environment import Launcher, launch_environment, rank_variables
from meshwright_launch.work import check, check_data, open_run_files, open_run_mesh, work


def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, trust_code: bool = False
) -> RunConfig:
    """Load a configuration file with overrides such as ``"train.steps=10"``.

    ``trust_code``: accept functions of others that a configuration in a run, checkpoint or export
        names.

    Raises:
        ConfigError: one error with all problems of the file and the overrides.
    """
    options = _as_options(overrides)
    check_file(os.fspath(path), options, trust_code=trust_code)
    return load(path, options)


def make_config(**sections: Mapping[str, Any]) -> RunConfig:
    """Build a configuration from its sections as mappings: ``make_config(model={"builder": ...},
    train={...})``.

    Raises:
        ConfigError: one error with all problems, as for a file.
    """
    return load_saved(sections, (), "make_config")


class OpenRun:
    """One rank of an open run. Every method is collective: each rank must call it,
    in the same order.
    """

    def __init__(self, parts: Parts, files: RunFiles) -> None:
        self.parts = parts
        self._saver = Checkpoints(
            parts, files, StopRequest(), print_lines if parts.mesh.rank == 0 else _print_nothing
        ).saver
        if self.step > 0:  # resumed from the checkpoint of this step
            self._saver.saved_step = self.step

    @property
    def directory(self) -> Path:
        """Directory of the run, ``run.directory``/``run.name``."""
        return self._saver.directory

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, those before a resume included."""
        return self.parts.state.step

    def take_step(self) -> StepStats:
        """Take one optimizer step on the next global batch; return its loss,
        gradient norm and learning rate.

        The learning rate of a step follows from ``train.steps``, also beyond it.
        """
        return take_step(self.parts)

    def validate(self) -> float:
        """Return the mean loss over the validation batches (``train.validate_steps``),
        equal on every rank.

        Raises:
            ConfigError: the run has no validation data.
        """
        if not self.parts.validations:
            raise ConfigError(
                "MW-LAUNCH-059", "the run has no validation data: set data.validation"
            )
        return validate(self.parts)

    def save(self) -> Place:
        """Write a checkpoint of this step and return its path; blocks until it is published.

        Raises:
            CheckpointError: on every rank; it cannot be written.
        """
        if self._saver.saved_step != self.step:
            self._saver.start()
            self._saver.finish_or_fail()
        return final_directory(self._saver.place, self.step)


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[OpenRun]:
    """Open a run in this rank: join the mesh, lock the run's directory, build the parts,
    resume the newest checkpoint.

    Nothing is saved, validated or recorded unless the block calls for it, and neither callbacks nor
    the watchdog run.

    Raises:
        UserError: the configuration cannot work on these ranks, or the run's checkpoints do not fit
            it.
        LockError: another job works in the run's directory.
    """
    rank, world_size = _join(config.launch)
    config, blueprint = check(config, world_size)
    mesh = open_run_mesh(config.parallel, config.launch, config.train.device)
    log = print_lines if rank == 0 else _print_nothing
    with open_run_files(config.run, mesh, config.launch.threads) as files:
        parts = build(config, mesh, blueprint=blueprint if world_size == 1 else None)
        check_data(parts)
        # a stream reads forward from an older position
        resume_or_start(parts, files.directory, log, [StreamState.__name__])
        parts.stop_reason = None  # of a callback, and none runs
        record_start(parts, files, corpus_times(parts.source), log)
        yield OpenRun(parts, files)
    close_mesh(mesh)


def run_training(config: RunConfig, observers: Sequence[Observer] = ()) -> None:
    """Train in this rank to ``train.steps``, as ``meshwright train`` does,
    with observers of the caller.

    Saving, resuming, tracking and the watchdog are those of the command. Each rank must bring the
    same observers in the same order; they run before the record of a step, to which they may add,
    and before its checkpoint.

    Raises:
        UserError: the configuration cannot work on these ranks.
        Preempted: a signal asked the run to end, and its checkpoint is saved.
        CallbackError: on every rank; an observer has failed on some rank.
    """
    checked, _ = check(config, _join(config.launch)[1])
    work(checked, observers=observers)


def spawn(function: Callable[[RunConfig], object], config: RunConfig) -> None:
    """Run ``function(config)`` on each rank of this machine, in processes of their own;
    block until all have ended.

    A process that torchrun, srun or mpirun has started is a rank already, and calls the function
    itself.

    ``function`` is a module-level function: it is sent by its name, so a script calls ``spawn``
    below ``if __name__ == "__main__":``. The number of ranks follows from the degrees of
    ``config``.

    Raises:
        UserError: the degrees do not fit this machine; before any process starts.
        RankFailed: a rank has raised or died; the message is that of the rank that failed first.
    """
    if launch_environment() is not Launcher.NONE:
        function(config)
        return
    devices.choose_devices(config.launch)
    resolved = resolve(config, devices.num_local_ranks(config))
    if resolved.watch.mirror:
        tell("watch.mirror has no effect here: `meshwright train` alone replaces ranks")
    local.launch(partial(_call, function), resolved)


def _join(launch: Launch) -> tuple[int, int]:
    """Set torch's variables under srun or mpirun, or the GPUs of a lone process; return (rank,
    world size).
    """
    launcher = launch_environment()
    os.environ.update(rank_variables(launcher))
    if launcher is Launcher.NONE:
        devices.choose_devices(launch)
    rank, world_size, _ = environment_rank()
    return rank, world_size


def _call(function: Callable[[RunConfig], object], config: RunConfig, give_up: GiveUp) -> None:
    """Run the function of :func:`spawn` in one rank."""
    function(config)


def evaluate(
    place: str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    weights: str = "weights",
    trust_code: bool = False,
) -> EvaluationResult:
    """Evaluate the newest model of a run, or the checkpoint at ``place``, on its validation set,
    in this process.

    Args:
        overrides: new values of ``train.device``, ``train.dtype`` or ``batch.micro_batch_size``.
        step: the checkpoint of this step; None: the newest.
        batches: global batches to evaluate; None: the whole validation set.
        weights: tensors to use as the weights: a state that a callback has added, such as "ema".
        trust_code: import whatever builders the run names (docs/security.md).

    Raises:
        UserError: there is no run, no checkpoint, or no validation set.
    """
    where = locate(parse_place(place), step)._replace(weights=weights)
    alone = ("--parallel.dp=1", "--parallel.pp=1", "--parallel.tp=1", *WHOLE_SAMPLES)
    config = check_evaluation(
        config_for(
            where, _as_options(overrides), "evaluate", defaults=alone, trust_code=trust_code
        ),
        1,
    )
    result = EvaluationJob(where, weights == "weights", None, batches).evaluate(config)
    assert result is not None  # this process is rank 0
    return result


def sample(
    place: str | PathLike[str],
    prompt: str,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 40,
    *,
    trust_code: bool = False,
) -> str:
    """Return ``prompt`` and its continuation by the newest model of a run, in this process.

    Args:
        temperature: of the softmax; 0: greedy.
        top_k: number of most probable tokens to draw from; 0: all.
        trust_code: import whatever builders the run names (docs/security.md).

    Raises:
        UserError: there is no run, no checkpoint, or the model cannot generate text.
    """
    return sample_text(Path(place), prompt, tokens, temperature, top_k, trust_code=trust_code)


def _as_options(overrides: Sequence[str]) -> list[str]:
    """Return overrides in the form of the command line:
    ``train.steps=10`` becomes ``--train.steps=10``.
    """
    return [each if each.startswith("--") else f"--{each}" for each in overrides]


def _print_nothing(text: str) -> None:
    """Print nothing: rank 0 prints for all."""
