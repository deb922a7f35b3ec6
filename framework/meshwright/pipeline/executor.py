"""Executor of one rank's row of a schedule: a loop, and a method for each sort of item.
It decides nothing but when gradients are reduced: in a stage's last backward, or in each.

    item of the row                     effect
    F stage m                           values[F, stage, m]      = stage.forward(values[F, stage-1, m])
    B stage m                           values[B, stage, m]      = stage.backward(values[B, stage+1, m])
    I stage m                           values[B, stage, m]      = stage.backward_input(values[B, stage+1, m])
    W stage m                           stage.backward_weight(m)
    {F stage m + B stage' m'}           in turns: each runs while the other's expert all-to-all is in flight
    SEND_F / RECV_F                     values[F, stage, m] / values[F, stage-1, m]   to / from the neighbour
    SEND_B / RECV_B                     values[B, stage, m] / values[B, stage+1, m]   to / from the neighbour
    REDUCE stage                        replicas[stage].finish_reduction(): what is left; sums over replicas and tp
    STEP                                left to the caller: the body of ``with executor.until_step(feed)``

A :class:`ValueStore` holds the values. Communications of one group are posted together. A RECV only
posts; the action that uses the value waits for it. On CUDA waiting stalls the stream, not the host.
The order cannot deadlock, even if every send blocks: ``schedule.analysis.check`` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshwright.current import CurrentMicrobatch
from meshwright.mesh.comm import Group
from meshwright.model.metrics import Recorder, Recording
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.overlap import Pair, RunPair, in_order, in_turns
from meshwright.pipeline.row import resolve_row
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.timing import RowTimes, TimedAction, TimedReading, clock_of
from meshwright.pipeline.value_store import Computation, MessageGroup, ValueStore
from meshwright.pipeline.values import Feed
from meshwright.schedule.action import COMPLETES_BACKWARD, Action, Kind, Schedule

if TYPE_CHECKING:
    from meshwright.data_parallel.replica import Replica


class RowResult(NamedTuple):
    """Result of one run of a row, filled while the row runs."""

    times: RowTimes
    loss_parts: list[LossPart]
    """Loss of each micro-batch; empty on ranks without the last stage."""
    recorder: Recorder
    """Metrics that layers and the loss recorded."""


_STEP = Action(Kind.STEP)


class _Run(NamedTuple):
    """One run of the row."""

    feed: Feed
    result: RowResult
    times: RowTimes  # that of the result
    recording: Recording


@dataclass
class Executor:
    """Executor of one pipeline rank."""

    schedule: Schedule
    pp: Group
    stages: dict[int, Stage]
    device: torch.device
    current: CurrentMicrobatch = field(default_factory=CurrentMicrobatch)
    """Sample indices and tokens of the present micro-batch, which dropouts read;
    set before each forward.
    """
    replicas: Mapping[int, Replica] = field(default_factory=dict)
    """Replica of each stage, which reduces its gradients; REDUCE does nothing for a stage without
    one.
    """
    reduces_each_microbatch: bool = False
    """Reduce after every backward of a stage, not only after the last one of the step."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that layers and the loss may record."""
    offload: ActivationOffload | None = None
    """Offload of the stages' saved tensors to the host."""
    ep: Group | None = None
    """Expert group: the computations of a pair alternate at its all-to-alls. None, or with offload:
    first F, then B.
    """
    reads_samples: bool = False
    """Read the samples on every stage, not only first and last:
    document starts decide this cp rank's tokens.
    """

    def __post_init__(self) -> None:
        """Prepare to run the schedule."""
        self._activity = self.pp.activity
        self._values = ValueStore(self.pp, self.device)
        self._run_pair: RunPair = in_order
        if self.ep is not None and self.offload is None:
            self._run_pair = in_turns(self.ep, self.current)
        self.set_schedule(self.schedule)

    def set_schedule(self, schedule: Schedule) -> None:
        """Run this schedule from now on: resolve each item of the row to a method
        and its argument.
        """
        self.schedule = schedule
        if self.offload is not None:
            self.offload.set_schedule(schedule, self.pp.rank)
        methods: dict[Kind | type, Callable[[Any, _Run], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward,
            Kind.REDUCE: self._reduce,
            Pair: self._pair,
            MessageGroup: self._communicate,
        }
        self._row = [
            (methods[kind], argument)
            for kind, argument in resolve_row(schedule, self.pp.rank, self.stages)
        ]

    @contextmanager
    def until_step(self, feed: Feed) -> Iterator[RowResult]:
        """Run this rank's row up to STEP, its last item, whose work is the body of the ``with``::

        with executor.until_step(feed) as row:
            ...  # gradients are complete: sums over all ranks, optimizer
        """
        activity = self._activity
        waited_before_s = activity.waited_s
        run = self._begin(feed)
        for method, argument in self._row:
            method(argument, run)
        with TimedAction(run.times, _STEP):
            waited_until_step_s = activity.waited_s
            run.times.waited_s = waited_until_step_s - waited_before_s
            yield run.result
            run.times.waited_in_step_s = activity.waited_s - waited_until_step_s
        # after STEP, because STEP need not wait for the neighbours
        self._values.wait_for_sends(0)
        activity.begin(activity.BETWEEN_STEPS)
        self._values.check_empty()

    def run(self, feed: Feed) -> RowResult:
        """Run every item of this rank's row, with a STEP that does nothing."""
        with self.until_step(feed) as row:
            return row

    def validate(self, feed: Feed) -> RowResult:
        """Run forward only: the same row without its backward and step items."""
        run = self._begin(feed)
        for _, argument in self._row:
            if isinstance(argument, MessageGroup):
                activations = MessageGroup(
                    message for message in argument if message.key[0] is Kind.F
                )
                if activations:
                    self._values.exchange(activations, run.times, feed.length)
            elif isinstance(argument, Pair):
                self._forward(argument.forward, run, train=False)
            elif isinstance(argument, Computation) and argument.action.kind is Kind.F:
                self._forward(argument, run, train=False)
        self._values.wait_for_sends(0)
        return run.result

    def _begin(self, feed: Feed) -> _Run:
        times = RowTimes(self.pp.rank, clock_of(self.device), self._activity)
        recorder = Recorder(self.metrics)
        return _Run(feed, RowResult(times, [], recorder), times, Recording(recorder))

    def _forward(self, item: Computation, run: _Run, *, train: bool = True) -> None:
        action, index, microbatch, input_key, output_key, _ = item
        is_first_stage, is_last_stage = input_key is None, output_key is None
        samples = None
        if is_first_stage or is_last_stage or self.reads_samples:
            with TimedReading(run.times):
                samples = run.feed.microbatch(microbatch)
        if input_key is not None:
            inputs: Any = self._values.take(input_key, run.times)
        else:
            inputs = samples and samples.inputs
        with TimedAction(run.times, action):
            # Dropout masks follow from the samples' indices in the run. The recompute of this
            # micro-batch, in backward, restores the same ones, and so draws the same masks.
            if samples is not None:
                self.current.sample_indices = samples.sample_indices
            else:
                self.current.sample_indices = run.feed.sample_indices(microbatch)
            self.current.tokens = samples and samples.tokens
            self.current.corpora = samples and samples.corpora
            labels = samples.labels if samples is not None and is_last_stage else None
            with run.recording:
                length = run.feed.length(microbatch)
                output = self.stages[index].forward(
                    microbatch, inputs, labels, train=train, length=length
                )
            if isinstance(output, LossPart):
                run.result.loss_parts.append(output)
            elif output_key is not None:
                self._values.put(output_key, output)

    def _backward(self, item: Computation, run: _Run) -> None:
        """Run B, I or W.

        I defers the weight gradients of linears and embeddings, and reduces none: those that it
        does compute (norms) are reduced with W, which counts them as complete.
        """
        action, index, microbatch, input_key, output_key, is_last = item
        stage = self.stages[index]
        output_gradients = None if input_key is None else self._values.take(input_key, run.times)
        input_gradients: list[Tensor] = []
        with TimedAction(run.times, action):
            replica = None
            if is_last or (self.reduces_each_microbatch and action.kind in COMPLETES_BACKWARD):
                replica = self.replicas.get(index)
            if replica is not None:
                # before the backward: its hooks post each bucket as soon as that is complete
                deferred = stage.deferred_parameters(microbatch) if action.kind is Kind.W else None
                replica.reduce_during_backward(deferred, last=is_last)
            if action.kind is Kind.B:
                input_gradients = stage.backward(microbatch, output_gradients)
            elif action.kind is Kind.I:
                input_gradients = stage.backward_input(microbatch, output_gradients)
            else:
                stage.backward_weight(microbatch)
            if replica is not None and not is_last:  # after the last one comes REDUCE
                replica.reduce_remaining()
            if output_key is not None:
                self._values.put(output_key, input_gradients)

    def _pair(self, pair: Pair, run: _Run) -> None:
        forward = partial(self._forward, pair.forward, run)
        backward = partial(self._backward, pair.backward, run)
        self._run_pair(forward, backward, run.times)

    def _communicate(self, messages: MessageGroup, run: _Run) -> None:
        self._values.exchange(messages, run.times, run.feed.length)

    def _reduce(self, action: Action, run: _Run) -> None:
        with TimedAction(run.times, action):
            waited_before_s = self._activity.waited_s
            assert action.stage is not None
            if action.stage in self.replicas:
                self.replicas[action.stage].finish_reduction()
            run.times.waited_in_reduce_s += self._activity.waited_s - waited_before_s
