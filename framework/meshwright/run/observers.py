"""Observers of one run on disk: its files, validation, peak memory,
checkpoints and the end by a signal.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from meshwright.checkpoint import has_checkpoint
from meshwright.config import Data
from meshwright.errors import CallbackError, CheckpointError, DriftError, NonFiniteError, Preempted
from meshwright.model.metrics import means, model_metrics
from meshwright.optimizer import evaluating
from meshwright.parts import (
    ENOUGH,
    FILES_LOST,
    NOT_WRITTEN,
    STOP,
    ForwardParts,
    Observer,
    Parts,
    StepEvent,
)
from meshwright.pipeline.values import Feed
from meshwright.run.collector import StepCollector
from meshwright.run.directory import PEAKS, RECOVERIES, Peaks
from meshwright.run.files import RunFiles
from meshwright.run.recoveries import LoggedRecovery, read_recoveries
from meshwright.run.saving import Saver
from meshwright.system.atomic import write_atomic
from meshwright.system.process import StopRequest

STOP_S = 5.0
"""Seconds for the thread of a save that is given up to end."""


class RunFilesCheck(Observer):
    """Observer that restores the run's files on every rank after the step
    that detects their loss.
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Recover the run's directory.

        Raises:
            RunFilesError: on every rank; the directory now belongs to another run, or cannot be
                recreated.
        """
        if FILES_LOST in event.stats.flags:
            self._saver.recover()
        event.save_s = self._saver.take_save_s()


class GarbageCollection(Observer):
    """Observer that collects Python's garbage every ``train.gc_every`` steps;
    after the others of a step.
    """

    def __init__(self, collector: StepCollector) -> None:
        self._collector = collector

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Collect if due. Local; blocks for milliseconds."""
        self._collector.after_step()


class Validation(Observer):
    """Observer that validates every ``train.validate_every`` steps and after the last."""

    def __init__(self, report: Callable[[float], None]) -> None:
        """Call ``report`` with the last validation loss, after the last checkpoint."""
        self._report = report
        self._last: float | None = None

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Validate if due. Collective over all ranks; blocks.

        Also in the step of a stop, and before its save: callbacks see the loss of a step once, and
        the checkpoint holds their states after it. A signal during a validation has to wait for it
        anyway.
        """
        every = parts.config.train.validate_every
        is_due = event.is_last or (every > 0 and parts.state.step % every == 0)
        if is_due and parts.validations:
            start_s = time.perf_counter()
            with parts.mesh.activity.during("validating"):
                event.validation_loss = self._last = validate(parts)
            event.validation_s = time.perf_counter() - start_s
            event.metrics |= parts.validation_metrics

    def after_training(self, parts: Parts) -> None:
        """Report the last validation loss."""
        if self._last is not None:
            self._report(self._last)


class RecoveryRecords(Observer):
    """Observer that puts a recovery into the record of the step after it, on rank 0: the launcher
    logs it when all ranks have taken a step.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size = self._log_size()

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Fill the event if the log has grown. Blocks for a look at a local file."""
        if parts.mesh.rank != 0 or self._log_size() == self._size:
            return
        self._size = self._log_size()
        try:
            found = [
                each
                for each in read_recoveries(self._directory)
                if isinstance(each, LoggedRecovery)
            ]
        except (OSError, ValueError):
            return
        if found:
            event.recoveries = len(found)
            event.recovery_s = found[-1].seconds.get("stepped")

    def _log_size(self) -> int:
        try:
            return (self._directory / RECOVERIES).stat().st_size
        except OSError:
            return 0


class PeakMemory(Observer):
    """Observer that writes ``memory.json``: peak memory of all ranks,
    after the first step and at each checkpoint.

    Peaks differ by stage; metrics.jsonl has the one of rank 0 only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Gather the peaks and write them on rank 0, if due. Collective over all ranks; blocks.

        Errors of writing are ignored, so they never stop the training.
        """
        if not (event.is_saving or event.is_first):
            return
        mesh = parts.mesh
        peaks = tuple(mesh.world.gather_objects(mesh.peak_memory_bytes()))
        if mesh.rank == 0:
            found = Peaks(
                step=parts.state.step, device=mesh.device.type, grid=mesh.grid.degrees, peaks=peaks
            )
            with contextlib.suppress(OSError):
                write_atomic(
                    self._directory / PEAKS, found.model_dump_json() + "\n", is_durable=False
                )


class Checkpoints(Observer):
    """Observer that saves checkpoints when due: also after a request to stop,
    and after the last step.
    """

    def __init__(
        self, parts: Parts, files: RunFiles, request: StopRequest, log: Callable[[str], None]
    ) -> None:
        self.saver, self._request = Saver(parts, files.directory, log, files=files), request
        parts.flags[STOP] = request.is_requested
        parts.flags[ENOUGH] = lambda: parts.stop_reason is not None
        self._log = log
        self._reason: str | None = None
        """Reason for which a callback on this rank ends the run with this step."""

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Start a save that is due. Collective over all ranks; blocks.

        Raises:
            CheckpointError: on every rank, when a checkpoint cannot be written and the run may not
                continue without it.
        """
        saver, flags = self.saver, event.stats.flags
        saver.check(NOT_WRITTEN in flags and FILES_LOST not in flags)
        self._reason = parts.stop_reason if ENOUGH in flags else None
        if event.is_last or ENOUGH in flags:
            # fulfilled by this step: a start that trains on does not end for it
            parts.stop_reason = None
        if event.is_saving:
            with parts.mesh.activity.during("saving a checkpoint"):
                saver.start(is_urgent=event.is_stopping)  # the time until a kill is limited
                if FILES_LOST in flags:
                    saver.finish(retention=False)

    def end(self, parts: Parts, event: StepEvent) -> None:
        """End the run if this is its last step, or it is to stop after this one.
        Collective over all ranks; blocks.

        Raises:
            CheckpointError: on every rank, when the last checkpoint cannot be written.
            Preempted: on every rank, after the step in which one got a signal, when its checkpoint
                is saved.
        """
        if event.is_stopping:
            self._stop(parts)
        if event.is_last or parts.is_stopped:
            with parts.mesh.activity.during("saving a checkpoint"):
                self.saver.finish_or_fail()

    def on_error(self, parts: Parts, error: Exception) -> None:
        """Finish the checkpoint being written after NaN, Inf, drift or an error of a callback:
        its step is sound. Collective over all ranks; blocks.

        After other errors it is given up: this process may go on without the other ranks.
        """
        if isinstance(error, NonFiniteError | DriftError | CallbackError):  # on all ranks alike
            with (
                parts.mesh.activity.during("saving a checkpoint"),
                contextlib.suppress(CheckpointError),
            ):
                self.saver.finish()
        else:
            self.saver.writer.stop(STOP_S)

    def _stop(self, parts: Parts) -> None:
        """End the run: because a callback asked for it before this step, or by a signal.
        Collective; blocks.

        With a callback's reason on any rank the run is complete, and a signal is late.

        Raises:
            Preempted: on every rank, if any of them received a signal.
        """
        mine = self._request.signal.name if self._request.signal is not None else None
        found: list[tuple[str | None, str | None]] = parts.mesh.world.gather_objects(
            (mine, self._reason)
        )
        signals = [name for name, _ in found]
        reasons = [each for _, each in found if each is not None]
        step = f"after step {parts.state.step} of {parts.config.train.steps}"
        for rank, name in enumerate(signals if not reasons else ()):
            if name is not None:
                who = name if None not in signals else f"{name} to rank {rank}"
                raise Preempted(
                    "MW-RUN-014",
                    f"stopped by {who} {step}; {self._finish_save(parts)}, and the same command"
                    " resumes from there",
                )
        parts.is_stopped = True
        self._log(f"stopped {step}: {reasons[0]}")

    def _finish_save(self, parts: Parts) -> str:
        """Finish the save and describe the checkpoint to resume from. Collective over all ranks;
        blocks.
        """
        saver = self.saver
        with parts.mesh.activity.during("saving a checkpoint"):
            saver.finish(retention=False)
        if saver.saved_step == parts.state.step:
            return "it is saved"
        if parts.mesh.world.gather_objects(
            parts.mesh.rank == 0 and has_checkpoint(saver.directory)
        )[0]:
            return "it could not be saved, the last checkpoint remains"
        return "it could not be saved, and there is no other checkpoint"


class EndOfRun(Observer):
    """Observer that ends the run after its last step, or after a request to stop;
    after the errors of callbacks.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """End the run if it is due; see :meth:`Checkpoints.end`. Collective over all ranks;
        blocks.
        """
        self._checkpoints.end(parts, event)


def validate(parts: Parts) -> float:
    """Return the mean loss over the validation batches, in eval mode; of several sets the weighted
    mean of their losses. Equal on every rank and in every layout.
    """
    losses: dict[str, float] = {}
    metrics: dict[str, float] = {}
    with evaluating(parts.optimizer):
        for name in parts.validations:
            found = total_loss(parts, parts.validation_feeds(name))
            losses[name] = found.loss_sum / max(found.num_tokens, 1)
            within = f"validation/{name}/" if name else "validation/"
            metrics |= model_metrics(found.metrics, within)
            if name:
                metrics[set_loss_name(name)] = losses[name]
    parts.validation_metrics = metrics
    return mean_of_sets(losses, parts.config.data)


def set_loss_name(name: str) -> str:
    """Return the name of a validation set's loss in a record."""
    return f"validation/{name}/loss"


def mean_of_sets(losses: Mapping[str, float], data: Data) -> float:
    """Return the mean of the losses of validation sets, weighted by ``data.validation``."""
    sets = data.validation_sets
    weights = {name: sets[name].weight if name in sets else 1.0 for name in losses}
    total = math.fsum(weights[name] * loss for name, loss in losses.items())
    return total / math.fsum(weights.values())


class TotalLoss(NamedTuple):
    """Loss over several global batches."""

    loss_sum: float
    """Sum of the labels' losses, accumulated in float64; in nats for a cross-entropy."""
    num_tokens: int
    """Labels that counted."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics that layers and the loss recorded, by name."""


@contextlib.contextmanager
def evaluation_mode(parts: ForwardParts) -> Iterator[None]:
    """Run forwards in eval mode within the block, with the largest schedule of the run;
    afterwards training goes on as before.
    """
    schedule, data_s = parts.executor.schedule, parts.data_s
    parts.executor.set_schedule(parts.blueprint.schedule)
    stages = parts.executor.stages.values()
    modes = {module: module.training for stage in stages for module in stage.layers.modules()}
    for stage in stages:
        stage.layers.eval()
    try:
        yield
    finally:
        for module, training in modes.items():  # those that the builder put into eval mode stay
            module.training = training
        parts.executor.set_schedule(schedule)
        parts.data_s = data_s  # reads of a validation are no part of the step


def total_loss(parts: ForwardParts, feeds: Iterable[Feed]) -> TotalLoss:
    """Run forward in eval mode over these global batches; return the total loss.

    Collective over all ranks. Equal on every rank and in every layout.
    """
    names = parts.executor.metrics
    sums = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=parts.mesh.device)
    with evaluation_mode(parts):
        for feed in feeds:
            row = parts.executor.validate(feed)
            sums[2:] += row.recorder.vector(parts.mesh.device)
            for part in row.loss_parts if parts.mesh.at.tp_rank == 0 else ():
                sums[:2] += torch.stack([part.loss_sum.double(), part.num_tokens.double()])
    parts.mesh.world.all_reduce(sums).wait()
    loss_sum, num_tokens, *recorded = sums.tolist()
    return TotalLoss(float(loss_sum), int(num_tokens), means(names, recorded))
