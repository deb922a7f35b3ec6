"""Executor of one rank's row of a schedule: a method for each Kind, and a loop. It makes no decisions.

    item of the row                     effect
    F stage m                           values[F, stage, m]      = stage.forward(values[F, stage-1, m])
    B stage m                           values[B, stage, m]      = stage.backward(values[B, stage+1, m])
    I stage m                           values[B, stage, m]      = stage.backward_input(values[B, stage+1, m])
    W stage m                           stage.backward_weight(m)
    SEND_F / RECV_F                     values[F, stage, m] / values[F, stage-1, m]   to / from the neighbour
    SEND_B / RECV_B                     values[B, stage, m] / values[B, stage+1, m]   to / from the neighbour
    REDUCE stage                        replicas[stage].finish_reduce(): the gradients of the global batch
    STEP                                step(): norm, optimizer, all-gather of the weights

A :class:`ValueStore` holds the values. Communications of one group are posted together. A RECV only posts; the action
that uses the value waits for it. A SEND waits only for older sends, when too many are in flight. On CUDA waiting stalls
the stream, not the host. ``check`` has shown that the order cannot deadlock, even if every send blocks (rendezvous).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.mesh.comm import Group
from meshwright.model.metrics import Recorder, Recording
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.timing import RowTimes, clock_of
from meshwright.pipeline.value_store import MessageGroup, ValueStore, message_group
from meshwright.pipeline.values import Feed
from meshwright.schedule.action import Action, Kind, Schedule, actions_of
from meshwright.seeding import Draw


class GradientReducer(Protocol):
    """Reduction of one stage's gradients over its replicas, implemented by :mod:`meshwright.data_parallel`."""

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Reduce during the next backward. ``awaited``: parameters that get gradients in it; None: all."""

    def end_reducing(self) -> None:
        """Post the remaining reductions of a backward that is not the last of the step."""

    def finish_reduce(self) -> None:
        """Block until every shard holds the gradient of the global batch."""


class RowResult(NamedTuple):
    """Result of one run of a row. It fills while the row runs."""

    times: RowTimes
    loss_parts: list[LossPart]
    """Loss of each micro-batch on the last stage; empty on other stages."""
    recorder: Recorder
    """Metrics that layers and the loss recorded."""


class _Run(NamedTuple):
    """One run of the row."""

    feed: Feed
    step: Callable[[RowResult], object]
    times: RowTimes
    result: RowResult


@dataclass
class Executor:
    """Executor of one pipeline rank."""

    schedule: Schedule
    pp: Group
    stages: dict[int, Stage]
    device: torch.device
    draw: Draw = field(default_factory=Draw)
    """Sample indices that the dropouts read, and a rank's tokens; set before each forward."""
    replicas: Mapping[int, GradientReducer] = field(default_factory=dict)
    """Reducer of each stage's gradients; REDUCE does nothing for a stage without one."""
    reduces_each_microbatch: bool = False
    """Reduce after every backward of a stage, not only after the last one of the step."""
    metrics: tuple[str, ...] = ()
    """Names that layers and the loss may record."""
    offload: ActivationOffload | None = None
    """Offload of the stages' saved tensors to the host."""
    reads_samples: bool = False
    """Read the samples on every stage, not only on the first and the last: a rank's tokens follow from them."""

    def __post_init__(self) -> None:
        """Prepare to run the schedule."""
        self._activity = self.pp.activity
        self._values = ValueStore(self.pp, self.device)
        self.follow(self.schedule)

    def follow(self, schedule: Schedule) -> None:
        """Run this schedule from now on. Resolves each item of the row to its method and argument."""
        self.schedule = schedule
        self._last_backwards = self.schedule.last_backwards(self.pp.rank)
        if self.offload is not None:
            self.offload.follow(schedule, self.pp.rank)
        methods: dict[Kind, Callable[[Action, _Run], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._step,
        }
        self._row: list[tuple[Callable[[Any, _Run], None], Any]] = []
        for item in self.schedule.rows[self.pp.rank]:
            if isinstance(item, Action) and item.kind in methods:
                self._row.append((methods[item.kind], item))
            else:
                self._row.append((self._communicate, message_group(actions_of(item), self.schedule, self.stages)))

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
        for item in self.schedule.rows[self.pp.rank]:
            kept = [action for action in actions_of(item) if action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)]
            if kept and kept[0].kind is Kind.F:
                self._forward(kept[0], run, train=False)
            elif kept:
                self._values.exchange(message_group(kept, self.schedule, self.stages), run.times)
        self._values.wait_for_sends(0)
        return run.result

    def _begin(self, feed: Feed, step: Callable[[RowResult], object]) -> _Run:
        times = RowTimes(self.pp.rank, clock_of(self.device), waited_s=-self._activity.waited_s)
        return _Run(feed, step, times, RowResult(times, [], Recorder(self.metrics)))

    def _forward(self, action: Action, run: _Run, *, train: bool = True) -> None:
        index, microbatch = _position(action)
        stage, times = self.stages[index], run.times
        samples = None
        if stage.is_first or stage.is_last or self.reads_samples:
            start = times.clock.read()
            self._activity.begin(self._activity.READING_SAMPLES)
            samples = run.feed.microbatch(microbatch)
            times.readings_of_data.append((start, times.clock.read()))
        inputs = (
            samples.inputs if stage.is_first and samples else self._values.take((Kind.F, index - 1, microbatch), times)
        )
        self._activity.begin(action)
        start = times.clock.read()
        self.draw.sample_indices = run.feed.sample_indices(microbatch) if samples is None else samples.sample_indices
        self.draw.tokens = None if samples is None else samples.tokens
        labels = samples.labels if stage.is_last and samples else None
        with Recording(run.result.recorder):
            found = stage.forward(microbatch, inputs, labels, train=train)
        if isinstance(found, LossPart):
            run.result.loss_parts.append(found)
        else:
            self._values.put((Kind.F, index, microbatch), found)
        times.end(action, start)

    def _backward(self, action: Action, run: _Run) -> None:
        """Run B, or I, which defers weight gradients and therefore reduces none."""
        index, microbatch = _position(action)
        stage, times, is_whole = self.stages[index], run.times, action.kind is Kind.B
        gradients = None if stage.is_last else self._values.take((Kind.B, index + 1, microbatch), times)
        self._activity.begin(action)
        start = times.clock.read()
        if is_whole:
            self._begin_reducing(action, None)
            found = stage.backward(microbatch, gradients)
            self._end_reducing(action)
        else:
            found = stage.backward_input(microbatch, gradients)
        if not stage.is_first:
            self._values.put((Kind.B, index, microbatch), found)
        times.end(action, start)

    def _backward_weight(self, action: Action, run: _Run) -> None:
        index, microbatch = _position(action)
        stage, times = self.stages[index], run.times
        self._activity.begin(action)
        start = times.clock.read()
        self._begin_reducing(action, stage.awaited(microbatch))
        stage.backward_weight(microbatch)
        self._end_reducing(action)
        times.end(action, start)

    def _begin_reducing(self, action: Action, awaited: set[Tensor] | None) -> None:
        replica, last = self.replicas.get(_position(action)[0]), action in self._last_backwards
        if replica is not None and (last or self.reduces_each_microbatch):
            replica.begin_reducing(awaited, last=last)

    def _end_reducing(self, action: Action) -> None:
        replica, last = self.replicas.get(_position(action)[0]), action in self._last_backwards
        if replica is not None and self.reduces_each_microbatch and not last:  # after the last one comes REDUCE
            replica.end_reducing()

    def _communicate(self, messages: MessageGroup, run: _Run) -> None:
        self._values.exchange(messages, run.times)

    def _reduce(self, action: Action, run: _Run) -> None:
        self._activity.begin(action)
        times = run.times
        start, before_s = times.clock.read(), self._activity.waited_s
        replica = self.replicas.get(_position(action)[0])
        if replica is not None:
            replica.finish_reduce()
        times.waited_in_reduce_s += self._activity.waited_s - before_s
        times.end(action, start)

    def _step(self, action: Action, run: _Run) -> None:
        self._activity.begin(action)
        times = run.times
        start, before_s = times.clock.read(), self._activity.waited_s
        times.waited_s += before_s
        run.step(run.result)
        times.waited_in_step_s = self._activity.waited_s - before_s
        times.end(action, start)


def _position(action: Action) -> tuple[int, int]:
    """Return (stage, micro-batch) of an action other than STEP; micro-batch 0 for REDUCE."""
    assert action.stage is not None, action
    return action.stage, action.microbatch or 0
