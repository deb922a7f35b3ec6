"""The training loop.

Observers see a run between its steps. Their order is fixed, since most of them communicate, and each may use what those
before it have found:

    RunFilesCheck    the run's directory is still there                      run/observers.py
    Timing           the traced step, stragglers                             watch/observers.py
    Validation       the validation loss, when it is due                     run/observers.py
    Records          the step's record: metrics.jsonl, console, wandb        tracking/observer.py
    DriftCheck       replicas are equal, before they are saved               watch/observers.py
    PeakMemory       memory.json                                             run/observers.py
    Checkpoints      saves, and the end after a signal                       run/observers.py
    own ones         what a caller adds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshwright.data.sources import unigram_nats
from meshwright.parts import FILES_LOST, STOP, Observer, Parts, StepEvent, StepStats
from meshwright.run import RunFiles
from meshwright.run.observers import Checkpoints, PeakMemory, RunFilesCheck, Validation
from meshwright.step import take_step, validate
from meshwright.system.process import StopRequest
from meshwright.tracking.observer import Records
from meshwright.tracking.tracker import Tracker
from meshwright.watch.observers import DriftCheck, Timing


def train(parts: Parts, observers: Sequence[Observer]) -> None:
    """Step until ``train.steps``, with the observers in their order after each step. Every rank calls it.

    Raises:
        Preempted: on every rank, after the step in which one was asked to stop, and when its checkpoint is saved.
        NonFiniteError: on every rank, from a step that was not taken.
        DriftError: on every rank, before a checkpoint of copies that differ is written.
        RunFilesError: on every rank, when the run's directory is another's now, or cannot be made again.
    """
    first_step = parts.state.step + 1
    try:
        while parts.state.step < parts.config.train.steps:
            for observer in observers:
                observer.before_step(parts)
            start_s = time.perf_counter()
            stats = take_step(parts)
            event = _event(parts, stats, time.perf_counter() - start_s, first_step)
            for observer in observers:
                observer.after_step(parts, event)
        for observer in observers:
            observer.after_training(parts)
    except Exception as error:
        for observer in observers:
            observer.on_error(parts, error)
        raise


def _event(parts: Parts, stats: StepStats, step_s: float, first_step: int) -> StepEvent:
    step, every = parts.state.step, parts.config.checkpoint.every
    is_last = step == parts.config.train.steps
    is_stopping = STOP in stats.flags and not is_last
    return StepEvent(
        stats,
        step_s,
        is_first=step == first_step,
        is_last=is_last,
        is_stopping=is_stopping,
        is_saving=is_last or is_stopping or FILES_LOST in stats.flags or (every > 0 and step % every == 0),
    )


def observe(
    parts: Parts, files: RunFiles, tracker: Tracker, request: StopRequest, say: Callable[[str], None]
) -> list[Observer]:
    """Return the observers of a run, in their order; ``request`` raises the step's flag STOP from now on."""
    checkpoints = Checkpoints(parts, files, request, say)
    return [
        RunFilesCheck(checkpoints.saver),
        Timing(parts, files.directory, say),
        Validation(validate, lambda loss: say(describe_validation(parts, loss))),
        Records(tracker),
        DriftCheck(),
        PeakMemory(files.directory),
        checkpoints,
    ]


def describe_validation(parts: Parts, validation_loss: float) -> str:
    """Return the validation loss and, where the corpus has token counts, the unigram baseline beside it."""
    unit = parts.blueprint.example.unit[:-1]
    lines = f"validation loss  {validation_loss:.4f} nats per {unit}"
    nats = unigram_nats(parts.validation)
    if nats is not None:
        lines += f"\nunigram entropy  {nats:.4f}, of the same text: the loss of who knows token frequencies alone"
    return lines
