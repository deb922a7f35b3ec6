"""The training loop.

    for each step     before_step of every observer, take_step, after_step of every observer
    at the end        after_training of every observer, or on_error

Observers run between steps: validation, records, checks, checkpoints.
:func:`meshwright_launch.work.observe` lists those of a run in their order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from meshwright.model.metrics import model_metrics
from meshwright.parts import ENOUGH, STOP, Observer, Parts, StepEvent, StepStats, is_saved
from meshwright.step import take_step


def train(parts: Parts, observers: Sequence[Observer]) -> None:
    """Step until ``train.steps``; call the observers in order, before and after each step.
    Every rank calls it.

    Raises:
        Preempted: on every rank, after the step in which a signal was seen, once its checkpoint is
            saved.
        NonFiniteError: on every rank, from a step that was not taken.
        DriftError: on every rank, when copies that must be equal differ; no checkpoint of them is
            written.
        RunFilesError: on every rank, when the run's directory belongs to another run, or cannot be
            made again.
    """
    first_step = parts.state.step + 1
    try:
        while parts.state.step < parts.config.train.steps and not parts.is_stopped:
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
    step, last = parts.state.step, parts.config.train.steps
    is_last = step == last
    is_stopping = bool({STOP, ENOUGH} & stats.flags) and not is_last
    return StepEvent(
        stats,
        step_s,
        is_first=step == first_step,
        is_last=is_last,
        is_stopping=is_stopping,
        is_saving=is_saved(step, stats.flags, every=parts.config.checkpoint.every, last=last),
        metrics=model_metrics(stats.metrics),
    )
