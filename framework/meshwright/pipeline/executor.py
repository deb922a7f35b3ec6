"""Executor of one rank's row of a schedule: a loop, and a method for each sort of item. It makes no decisions.

    item of the row                     effect
    F stage m                           values[F, stage, m]      = stage.forward(values[F, stage-1, m])
    B stage m                           values[B, stage, m]      = stage.backward(values[B, stage+1, m])
    I stage m                           values[B, stage, m]      = stage.backward_input(values[B, stage+1, m])
    W stage m                           stage.backward_weight(m)
    {F stage m + B stage' m'}           in turns: each runs while the other's expert all-to-all is in flight
    SEND_F / RECV_F                     values[F, stage, m] / values[F, stage-1, m]   to / from the neighbour
    SEND_B / RECV_B                     values[B, stage, m] / values[B, stage+1, m]   to / from the neighbour
    REDUCE stage                        replicas[stage].finish_reduce(): the gradients of the global batch
    STEP                                step(): norm, optimizer, all-gather of the weights

A :class:`ValueStore` holds the values. Communications of one group are posted together. A RECV only posts; the action
that uses the value waits for it. A SEND waits only for older sends, when too many are in flight. On CUDA waiting stalls
the stream, not the host. The order cannot deadlock, even if every send blocks: ``schedule.analysis.check`` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.comm import Group
from meshwright.model.metrics import Recorder, Recording
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.overlap import Pair, in_order, in_turns
from meshwright.pipeline.reducer import GradientReducer
from meshwright.pipeline.row import resolve_row
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.timing import RowTimes, clock_of
from meshwright.pipeline.value_store import Computation, MessageGroup, ValueStore
from meshwright.pipeline.values import Feed
from meshwright.schedule.action import COMPLETES_BACKWARD, Action, Kind, Schedule
from meshwright.seeding import Draw


class RowResult(NamedTuple):
    """Result of one run of a row, filled while the row runs."""

    times: RowTimes
    loss_parts: list[LossPart]
    """Loss of each micro-batch; empty on ranks without the last stage."""
    recorder: Recorder
    """Metrics that layers and the loss recorded."""


class _Run(NamedTuple):
    """One run of the row."""

    feed: Feed
    step: Callable[[RowResult], object]
    times: RowTimes
    result: RowResult
    recording: Recording
    waited_before_s: float  # seconds of waits for other ranks before the row


@dataclass
class Executor:
    """Executor of one pipeline rank."""

    schedule: Schedule
    pp: Group
    stages: dict[int, Stage]
    device: torch.device
    draw: Draw = field(default_factory=Draw)
    """Sample indices and tokens of the present micro-batch, which dropouts read; set before each forward."""
    replicas: Mapping[int, GradientReducer] = field(default_factory=dict)
    """Reducer of each stage's gradients; REDUCE does nothing for a stage without one."""
    reduces_each_microbatch: bool = False
    """Reduce after every backward of a stage, not only after the last one of the step."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that layers and the loss may record."""
    offload: ActivationOffload | None = None
    """Offload of the stages' saved tensors to the host."""
    ep: Group | None = None
    """Expert group: the computations of a pair alternate at its all-to-alls. None, or with offload: first F, then B."""
    reads_samples: bool = False
    """Read the samples on every stage, not only first and last: document starts decide this cp rank's tokens."""

    def __post_init__(self) -> None:
        """Prepare to run the schedule."""
        self._activity = self.pp.activity
        self._values = ValueStore(self.pp, self.device)
        self._run_pair = in_order if self.ep is None or self.offload is not None else in_turns(self.ep, self.draw)
        self.set_schedule(self.schedule)

    def set_schedule(self, schedule: Schedule) -> None:
        """Run this schedule from now on: resolve each item of the row to a method and its argument."""
        self.schedule = schedule
        if self.offload is not None:
            self.offload.set_schedule(schedule, self.pp.rank)
        methods: dict[Kind | type, Callable[[Any, _Run], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward,
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._step,
            Pair: self._pair,
            MessageGroup: self._communicate,
        }
        self._row = [(methods[kind], argument) for kind, argument in resolve_row(schedule, self.pp.rank, self.stages)]

    def run(self, feed: Feed, step: Callable[[RowResult], object] = lambda result: None) -> RowResult:
        """Run every item of this rank's row, in order. ``step``: function that STEP calls."""
        run = self._begin(feed, step)
        for method, argument in self._row:
            method(argument, run)
        self._values.wait_for_sends(0)
        self._activity.begin(self._activity.BETWEEN_STEPS)
        self._values.check_empty()
        return run.result

    def validate(self, feed: Feed) -> RowResult:
        """Run forward only: the same row without its backward and step items."""
        run = self._begin(feed, lambda result: None)
        for _, argument in self._row:
            if isinstance(argument, MessageGroup):
                kept = MessageGroup(message for message in argument if message.key[0] is Kind.F)
                if kept:
                    self._values.exchange(kept, run.times)
            elif isinstance(argument, Pair):
                self._forward(argument.forward, run, train=False)
            elif isinstance(argument, Computation) and argument.action.kind is Kind.F:
                self._forward(argument, run, train=False)
        self._values.wait_for_sends(0)
        return run.result

    def _begin(self, feed: Feed, step: Callable[[RowResult], object]) -> _Run:
        times = RowTimes(self.pp.rank, clock_of(self.device))
        recorder = Recorder(self.metrics)
        return _Run(feed, step, times, RowResult(times, [], recorder), Recording(recorder), self._activity.waited_s)

    def _forward(self, item: Computation, run: _Run, *, train: bool = True) -> None:
        action, index, microbatch, taken, result, _ = item
        times, samples, draw = run.times, None, self.draw
        if taken is None or result is None or self.reads_samples:
            start = times.clock.read()
            self._activity.begin(self._activity.READING_SAMPLES)
            samples = run.feed.microbatch(microbatch)
            times.readings_of_data.append((start, times.clock.read()))
        inputs = self._values.take(taken, times) if taken is not None else samples and samples.inputs
        self._activity.begin(action)
        start = times.clock.read()
        draw.sample_indices = run.feed.sample_indices(microbatch) if samples is None else samples.sample_indices
        draw.tokens = samples and samples.tokens
        labels = samples.labels if samples is not None and result is None else None
        with run.recording:
            found = self.stages[index].forward(microbatch, inputs, labels, train=train)
        if isinstance(found, LossPart):
            run.result.loss_parts.append(found)
        elif result is not None:
            self._values.put(result, found)
        times.end(action, start)

    def _backward(self, item: Computation, run: _Run) -> None:
        """Run B, I or W.

        I defers the weight gradients of linears and embeddings, and reduces none: those that it does compute (norms)
        are reduced with W, where ``begin_reducing`` counts them as complete.
        """
        action, index, microbatch, taken, result, is_last = item
        stage, times = self.stages[index], run.times
        found: list[Tensor] = []
        gradients = None if taken is None else self._values.take(taken, times)
        self._activity.begin(action)
        start = times.clock.read()
        reducer = None
        if is_last or (self.reduces_each_microbatch and action.kind in COMPLETES_BACKWARD):
            reducer = self.replicas.get(index)
        if reducer is not None:
            deferred = stage.deferred_parameters(microbatch) if action.kind is Kind.W else None
            reducer.begin_reducing(deferred, last=is_last)
        if action.kind is Kind.B:
            found = stage.backward(microbatch, gradients)
        elif action.kind is Kind.I:
            found = stage.backward_input(microbatch, gradients)
        else:
            stage.backward_weight(microbatch)
        if reducer is not None and not is_last:  # after the last one comes REDUCE
            reducer.end_reducing()
        if result is not None:
            self._values.put(result, found)
        times.end(action, start)

    def _pair(self, pair: Pair, run: _Run) -> None:
        forward, backward = partial(self._forward, pair.forward, run), partial(self._backward, pair.backward, run)
        self._run_pair(forward, backward, run.times)

    def _communicate(self, messages: MessageGroup, run: _Run) -> None:
        self._values.exchange(messages, run.times)

    def _reduce(self, action: Action, run: _Run) -> None:
        self._activity.begin(action)
        times = run.times
        start, before_s = times.clock.read(), self._activity.waited_s
        assert action.stage is not None
        if action.stage in self.replicas:
            self.replicas[action.stage].finish_reduce()
        times.waited_in_reduce_s += self._activity.waited_s - before_s
        times.end(action, start)

    def _step(self, action: Action, run: _Run) -> None:
        self._activity.begin(action)
        times = run.times
        start, before_s = times.clock.read(), self._activity.waited_s
        times.waited_s = before_s - run.waited_before_s
        run.step(run.result)
        times.waited_in_step_s = self._activity.waited_s - before_s
        times.end(action, start)
