"""Observers and hooks that watch a run; see :class:`meshwright.parts.Observer`.

    Timing             one traced step per start, for `meshwright draw`        watch/trace.py
                       stragglers: a slow rank, link or gradient sum           watch/stragglers.py
    DriftCheck         replicas are bitwise equal                              watch/drift.py
    CorpusCheck        no file of the corpus was overwritten                   data/live_files.py
    handle_nonfinite   NaN or Inf in loss or gradient: no rank takes the step  watch/nonfinite/

Hangs are watched by threads, not by an observer: watch/hang/watchdog.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from meshwright.errors import NonFiniteError
from meshwright.mesh.mesh import Mesh
from meshwright.optimizer import can_fall
from meshwright.parts import Observer, Parts, StepEvent, StepStats, StragglerShare
from meshwright.pipeline.values import Feed
from meshwright.schedule.action import Action, Kind
from meshwright.schedule.analysis import Span
from meshwright.schedule.load import format_schedule
from meshwright.terminal.output import print_warning, tell
from meshwright.watch.drift import check_drift
from meshwright.watch.nonfinite.search import find_cause
from meshwright.watch.stragglers import Stragglers
from meshwright.watch.trace import RankSpans, Trace, on_one_clock, traced_step, write

BARRIERS = 9
"""Barriers that align the clocks of several nodes;
on one node a single barrier lets all ranks start together.
"""


class Timing(Observer):
    """Observer that traces one step per start and searches for stragglers.
    Both align all ranks before the step.
    """

    def __init__(self, parts: Parts, directory: Path, log: Callable[[str], None]) -> None:
        config = parts.config
        self._directory, self._log = directory, log
        self._traced = traced_step(config.tracking.trace_step, parts.state.step, config.train.steps)
        self._stragglers = Stragglers(parts.mesh, config.tracking.stragglers_every)
        self._ticks: tuple[float, ...] = ()

    def before_step(self, parts: Parts) -> None:
        """Align the ranks if this step is traced or searched for stragglers.
        Collective over all ranks; blocks.
        """
        step = parts.state.step + 1
        self._ticks = (
            align(parts.mesh) if step == self._traced or self._stragglers.is_due(step) else ()
        )

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Record this rank's times; in an aligned step also write the trace and look
        for a straggler.

        An aligned step is collective: over pp for the spans, over all ranks for the search; blocks.
        """
        self._stragglers.record(parts.last, event.step_s)
        if not self._ticks:
            return
        spans = gather_spans(parts, self._ticks)
        if parts.state.step == self._traced:
            write_trace(spans, parts, self._directory)
        if self._stragglers.is_due(parts.state.step):
            straggler = self._stragglers.search(spans)
            if straggler is not None:
                event.straggler = StragglerShare(straggler.name, straggler.rank, straggler.share)
                if self._stragglers.should_report(straggler):
                    self._log(str(straggler))


class DriftCheck(Observer):
    """Observer that compares replicas every ``watch.drift_every`` steps
    and before each checkpoint.
    """

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Compare the copies that must be equal. Collective over all ranks; blocks.

        Raises:
            DriftError: on every rank, when some copies differ.
        """
        every = parts.config.watch.drift_every
        if every and (event.is_saving or parts.state.step % every == 0):
            check_drift(parts)


class CorpusCheck(Observer):
    """Observer that names the files of the corpus that were changed under the run,
    in each step that saves.
    """

    def __init__(self, changes: Callable[[], list[str]]) -> None:
        """Take descriptions from ``changes``:
        of the watched files that changed since its last call.
        """
        self._changes = changes

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Warn of changed files, if the step saves. Collective over all ranks; blocks."""
        if not event.is_saving:
            return
        found: list[list[str]] = parts.mesh.world.gather_objects(self._changes())
        if parts.mesh.rank != 0:
            return
        for change in dict.fromkeys(change for changes in found for change in changes):
            print_warning(
                f"the corpus changed under this run, up to step {parts.state.step}: {change}."
                " `meshwright data verify DIR` reads every byte; after a restore, go on from a"
                " checkpoint before the change"
            )


def align(mesh: Mesh) -> tuple[float, ...]:
    """Synchronise all ranks with barriers. Collective over all ranks; blocks.

    Returns:
        ``time.perf_counter()`` of this rank after each barrier.
    """
    if mesh.device.type == "cuda":
        # otherwise the row's first event would wait for the previous step
        torch.cuda.synchronize(mesh.device)
    ticks = []
    for _ in range(BARRIERS if len(set(mesh.nodes)) > 1 else 1):
        mesh.world.barrier()
        ticks.append(time.perf_counter())
    return tuple(ticks)


def gather_spans(parts: Parts, ticks: tuple[float, ...]) -> list[RankSpans]:
    """Gather the spans of the last step within each pipeline, by pp rank. Collective over pp;
    blocks.
    """
    mesh, result = parts.mesh, parts.last
    assert result is not None, "no step was taken"
    times = result.times
    own = RankSpans(mesh.nodes[mesh.rank], ticks, times.start_s, times.spans, times.data)
    pipeline: list[RankSpans] = mesh.pp.gather_objects(own, RankSpans, Span, Action, Kind)
    return pipeline


def write_trace(pipeline: Sequence[RankSpans], parts: Parts, directory: Path) -> None:
    """Write the trace of the last step, on rank 0.
    A trace that cannot be written does not stop the run.
    """
    if parts.mesh.rank != 0:
        return
    path = directory / "traces" / f"step-{parts.state.step:08d}.json"
    try:
        write(build_trace(pipeline, parts), path)
        parts.written_files.append(path)
    except Exception as error:
        tell(
            f"watch: the trace of step {parts.state.step} is not written, the run continues:"
            f" {error}"
        )


def build_trace(pipeline: Sequence[RankSpans], parts: Parts) -> Trace:
    """Build a trace with the spans of all pipeline ranks on one clock. ``pipeline``: by pp rank."""
    spans, readings, error_s = on_one_clock(pipeline)
    return Trace(
        run=parts.config.run.name,
        step=parts.state.step,
        torch=torch.__version__,
        device=parts.mesh.device.type,
        hosts=tuple(each.host for each in pipeline),
        clock_error_s=error_s,
        schedule=format_schedule(parts.executor.schedule),
        spans=tuple((span.rank, str(span.action), span.start, span.end) for span in spans),
        data=tuple((each.rank, each.start, each.end) for each in readings),
    )


def handle_nonfinite(parts: Parts, feed: Feed, stats: StepStats) -> None:
    """Reject a step whose reduced scalars are not finite: skip it, or end the run.
    Collective over all ranks; blocks.

    No rank has taken the step. A float16 overflow that a smaller loss scale may avoid is no fault:
    nothing is done.

    Raises:
        NonFiniteError: on every rank, if ``watch.on_nonfinite`` is not "skip", or
            ``watch.most_skipped`` steps in a row were skipped before this one.
    """
    watch, state = parts.config.watch, parts.state
    if math.isfinite(stats.loss) and can_fall(
        parts.config.loss_scale, parts.config.train.dtype, state.loss_scale
    ):
        return
    at = ""
    if parts.config.train.dtype == "float16":
        at = f" with the loss scale {stats.loss_scale:g}"
    step = (
        f"step {state.step + 1}: the loss is {stats.loss}, the gradient norm {stats.grad_norm}{at}"
    )
    if watch.on_nonfinite == "skip" and state.skipped_in_a_row < watch.most_skipped:
        why = find_cause(parts, feed, replay=False)
        state.skipped_in_a_row += 1
        if parts.mesh.rank == 0:
            row = f"{state.skipped_in_a_row} in a row, at most {watch.most_skipped}"
            tell(f"watch: {step}: the step is skipped ({row}). {why}")
        return
    skipped = ""
    if state.skipped_in_a_row:
        skipped = (
            f" {state.skipped_in_a_row} in a row were skipped before it, as watch.most_skipped"
            " allows."
        )
    raise NonFiniteError(
        "MW-WATCH-008",
        f"{step}: the step is not taken on any"
        f" rank.{skipped}\n{find_cause(parts, feed, replay=True)}\nThis step is not saved: the same"
        " command resumes from the last checkpoint. Lower optimizer.learning_rate, set"
        " optimizer.clip_norm, or look at these samples"
        + (
            ""
            if watch.on_nonfinite == "skip"
            else '; watch.on_nonfinite = "skip" leaves out single steps'
        ),
    )
