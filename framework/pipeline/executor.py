"""Executor of one rank's row of a schedule: a function for each Kind, and a loop. It makes no decisions.

    item of the row                     roughly
    F stage m                           values[F, stage, m]      = stage.forward(values[F, stage-1, m])
    B stage m                           values[B, stage, m]      = stage.backward(values[B, stage+1, m])
    I stage m                           values[B, stage, m]      = stage.backward_input(values[B, stage+1, m])
    W stage m                           stage.backward_weight(m)
    SEND_F / RECV_F                     values[F, stage, m] / values[F, stage-1, m]   to / from the neighbour
    SEND_B / RECV_B                     values[B, stage, m] / values[B, stage+1, m]   to / from the neighbour
    REDUCE stage                        reduce(stage): the gradients become those of the global batch
    STEP                                step(): norm, optimizer, all-gather of the weights

Communications written as one group are posted together, as point-to-point messages over pp. A RECV only posts; the
action that uses the value blocks until it has arrived. A send is awaited when more than twice as many sends as there
are pipeline ranks are in flight, or at the end of the step. Its tensors stay alive until then. The schedule's check has
shown that the order is free of deadlock even if each communication blocked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.mesh.comm import Group, Handle, Transfer
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.timing import Clock, CudaClock, clock_of
from meshwright.pipeline.values import TensorSpec
from meshwright.schedule.action import COMPUTE, Action, Kind, Schedule, Span, actions_of


class Microbatch(NamedTuple):
    """Samples of one micro-batch; the same on every rank of a replica."""

    inputs: Any  # a tensor, or a tree of tensors, each (B, ...)
    labels: Tensor  # (B, ...), IGNORED_LABEL where it does not count
    sample_indices: Tensor  # (B,) int64, global


class Feed(Protocol):
    """Source of the micro-batches of one step of this replica."""

    def microbatch(self, m: int) -> Microbatch:
        """Read micro-batch ``m``. The first stage uses its inputs, and the last stage its labels."""

    def sample_indices(self, m: int) -> Tensor:
        """Return the (B,) int64 global sample indices of micro-batch ``m``, without reading it."""


@dataclass
class RowResult:
    """Losses and timings of one run of a row.

    Times are readings of the clock. Properties and methods convert them to seconds, which blocks until the device has
    reached the readings.
    """

    rank: int
    """Pipeline rank that ran the row."""
    clock: Clock
    readings: list[tuple[Action, Any, Any]] = field(default_factory=list)
    """Start and end of each action; for a RECV, of the wait for its value."""
    readings_of_data: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of each read of samples."""
    loss_parts: list[LossPart] = field(default_factory=list)
    """Loss of each micro-batch on the last stage; empty on other stages."""
    waited_s: float = 0.0
    """Seconds that the host program waited for other ranks, from the start of the row to its STEP."""
    waited_in_reduce_s: float = 0.0
    """Part of ``waited_s`` in REDUCE."""
    waited_in_step_s: float = 0.0
    """Seconds that the host program waited in STEP, where no other work is left."""
    peak_in_flight: int = 0
    """Most micro-batches in flight on this rank at once, each counted once per stage."""

    @property
    def start_s(self) -> float:
        """Start of the row on this machine's monotonic clock, in seconds."""
        return self.clock.start_s

    @property
    def spans(self) -> tuple[Span, ...]:
        """Actions so far, with start and end in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple(Span(self.rank, action, at(start), at(end)) for action, start, end in self.readings)

    @property
    def data(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each read of samples, in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple((at(start), at(end)) for start, end in self.readings_of_data)

    def computing(self) -> tuple[float, float]:
        """Return (seconds of computation on all stages, end of the last computation in seconds from the start of the
        row).
        """
        at = self.clock.resolve
        times = [(at(start), at(end)) for action, start, end in self.readings if action.kind in COMPUTE]
        return sum(end - start for start, end in times), max(end for _, end in times)

    def own_s(self) -> float:
        """Return the seconds before STEP in which this rank did not wait for other ranks: its own work.

        On CUDA the host program rarely waits. There it is the time in which the device computed and samples were read,
        and it includes waits of kernels for others of their tensor-parallel group.
        """
        at = self.clock.resolve
        if isinstance(self.clock, CudaClock):
            return self.computing()[0] + sum(end - start for start, end in self.data)
        return at(next(start for action, start, _ in self.readings if action.kind is Kind.STEP)) - self.waited_s

    def reducing_s(self) -> float:
        """Return the seconds by which exposed gradient reductions delayed this rank and its STEP.

        Waits in STEP are subtracted, because they would have hidden as much. On CUDA that share cannot be measured, and
        all of REDUCE counts.
        """
        if isinstance(self.clock, CudaClock):
            at = self.clock.resolve
            return sum(at(end) - at(start) for action, start, end in self.readings if action.kind is Kind.REDUCE)
        return max(self.waited_in_reduce_s - self.waited_in_step_s, 0.0)


class _Message(NamedTuple):
    """One point-to-point message of this rank's row."""

    action: Action
    key: tuple[Kind, int, int]
    """Key in ``Executor._values`` of the value that is sent or received."""
    peer: int
    """Pipeline rank of the other side."""
    comes_as: tuple[TensorSpec, ...] | None
    """Specs of the received tensors; None for a send."""


class _Messages(tuple[_Message, ...]):
    """Messages that are posted together."""

    def __str__(self) -> str:
        return "+".join(str(message.action) for message in self)


@dataclass
class Executor:
    """Executor of one pipeline rank. The callbacks connect it to the other axes."""

    schedule: Schedule
    pp: Group
    stages: dict[int, Stage]
    device: torch.device
    on_microbatch: Callable[[Tensor], None] | None = None
    """Function called before each forward with the samples' global indices (B,), for dropout; None: not needed."""
    begin_reducing: Callable[[int, set[Tensor] | None, bool], None] = lambda stage, awaited, last: None
    """Function called before the last B or W of a stage in the step; with ``end_reducing``, before each of them.

    Its arguments are the stage, the parameters that get gradients in it (None: all), and whether it is the last.
    """
    end_reducing: Callable[[int], None] | None = None
    """Function called after each other B or W, whose gradients are then reduced too; None: only the last is reduced."""
    reduce: Callable[[int], None] = lambda stage: None
    _values: dict[tuple[Kind, int, int], list[Tensor]] = field(default_factory=dict)
    _arriving: dict[tuple[Kind, int, int], tuple[Action, Handle | None]] = field(default_factory=dict)
    _sends: deque[Handle] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Resolve each item of the row to the method that runs it and its argument."""
        self._activity = self.pp.activity
        self._last_backwards = self.schedule.last_backwards(self.pp.rank)
        self._sends_tell = self.device.type == "cuda"  # gloo calls a send done only when somebody has waited for it
        does: dict[Kind, Callable[[Action, Feed, RowResult], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._step,
        }
        self._row: list[tuple[Callable[[Any, Feed, RowResult], None], Any]] = []
        for item in self.schedule.rows[self.pp.rank]:
            if isinstance(item, Action) and item.kind in does:
                self._row.append((does[item.kind], item))
            else:
                self._row.append((self._communicate, _Messages(self._message(action) for action in actions_of(item))))

    def _message(self, action: Action) -> _Message:
        index, microbatch = _stage(action), _microbatch(action)
        stage, peer = self.stages[index], self.schedule.peer(action)
        if action.kind is Kind.SEND_F:
            return _Message(action, (Kind.F, index, microbatch), peer, None)
        if action.kind is Kind.SEND_B:
            return _Message(action, (Kind.B, index, microbatch), peer, None)
        if action.kind is Kind.RECV_F:
            assert stage.input_spec is not None
            return _Message(action, (Kind.F, index - 1, microbatch), peer, stage.input_spec.leaves)
        assert stage.output_spec is not None
        return _Message(action, (Kind.B, index + 1, microbatch), peer, stage.output_spec.with_gradient)

    def run(self, feed: Feed, step: Callable[[RowResult], None] = lambda result: None) -> RowResult:
        """Run every item of this rank's row, in order; ``step`` is what STEP does."""
        self._on_step = step
        run = RowResult(self.pp.rank, clock_of(self.device), waited_s=-self._activity.waited_s)
        for do, what in self._row:
            do(what, feed, run)
        self._wait_for_sends(0)
        self._activity.begin(self._activity.BETWEEN_STEPS)
        assert not self._values and not self._arriving, f"left over: {sorted(self._values)} {sorted(self._arriving)}"
        return run

    def validate(self, feed: Feed) -> list[LossPart]:
        """Run forward only: the same row without its backward and step items."""
        run = RowResult(self.pp.rank, clock_of(self.device))
        for item in self.schedule.rows[self.pp.rank]:
            kept = [action for action in actions_of(item) if action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)]
            if kept and kept[0].kind is Kind.F:
                self._forward(kept[0], feed, run, train=False)
            elif kept:
                self._communicate(_Messages(self._message(action) for action in kept), feed, run)
        self._wait_for_sends(0)
        return run.loss_parts

    # ------------------------------------------------------------------------------------------------- computations

    def _forward(self, action: Action, feed: Feed, run: RowResult, *, train: bool = True) -> None:
        index, microbatch = _stage(action), _microbatch(action)
        stage = self.stages[index]
        samples = None
        if stage.is_first or stage.is_last:
            start = run.clock.read()
            self._activity.begin(self._activity.READING_SAMPLES)
            samples = feed.microbatch(microbatch)
            run.readings_of_data.append((start, run.clock.read()))
        inputs = samples.inputs if stage.is_first and samples else self._take(Kind.F, index - 1, microbatch, run)
        self._activity.begin(action)
        start = run.clock.read()
        if self.on_microbatch is not None:
            self.on_microbatch(feed.sample_indices(microbatch) if samples is None else samples.sample_indices)
        found = stage.forward(microbatch, inputs, samples.labels if stage.is_last and samples else None, train=train)
        if isinstance(found, LossPart):
            run.loss_parts.append(found)
        else:
            self._values[Kind.F, index, microbatch] = found
        run.readings.append((action, start, run.clock.read()))
        run.peak_in_flight = max(run.peak_in_flight, sum(stage.num_in_flight for stage in self.stages.values()))

    def _backward(self, action: Action, feed: Feed, run: RowResult) -> None:
        self._back(action, run, self.stages[_stage(action)].backward)

    def _backward_input(self, action: Action, feed: Feed, run: RowResult) -> None:
        self._back(action, run, self.stages[_stage(action)].backward_input)

    def _back(self, action: Action, run: RowResult, backward: Callable[..., list[Tensor]]) -> None:
        index, microbatch = _stage(action), _microbatch(action)
        stage = self.stages[index]
        gradients = None if stage.is_last else self._take(Kind.B, index + 1, microbatch, run)
        self._activity.begin(action)
        start = run.clock.read()
        if action.kind is Kind.B:
            self._begin_reducing(action, None)
        found = backward(microbatch, gradients)
        if action.kind is Kind.B:
            self._end_reducing(action)
        if not stage.is_first:
            self._values[Kind.B, index, microbatch] = found
        run.readings.append((action, start, run.clock.read()))

    def _backward_weight(self, action: Action, feed: Feed, run: RowResult) -> None:
        index, microbatch = _stage(action), _microbatch(action)
        stage = self.stages[index]
        self._activity.begin(action)
        start = run.clock.read()
        self._begin_reducing(action, stage.awaited(microbatch))
        stage.backward_weight(microbatch)
        self._end_reducing(action)
        run.readings.append((action, start, run.clock.read()))

    def _begin_reducing(self, action: Action, awaited: set[Tensor] | None) -> None:
        last = action in self._last_backwards
        if self.end_reducing is not None or last:
            self.begin_reducing(_stage(action), awaited, last)

    def _end_reducing(self, action: Action) -> None:
        if self.end_reducing is not None and action not in self._last_backwards:  # after that comes REDUCE
            self.end_reducing(_stage(action))

    # ------------------------------------------------------------------------------------------------ communication

    def _take(self, kind: Kind, index: int, microbatch: int, run: RowResult) -> list[Tensor]:
        """Return the tensors of a value, and remove it; block until it has arrived."""
        key = (kind, index, microbatch)
        if key in self._arriving:
            receive, handle = self._arriving.pop(key)
            start = run.clock.read()
            self._activity.begin(receive)
            if handle is not None:  # None: the message holds no tensor
                handle.wait()
            run.readings.append((receive, start, run.clock.read()))
        return self._values.pop(key)

    def _communicate(self, messages: _Messages, feed: Feed, run: RowResult) -> None:
        """Post point-to-point messages over pp together. Blocks only for the oldest sends, once many are in flight.

        Bytes on the wire: those of the tensors of each value, in their own dtype.
        """
        self._activity.begin(messages)
        start = run.clock.read()
        transfers: list[Transfer] = []
        for _, key, peer, comes_as in messages:
            if comes_as is None:
                transfers += [Transfer(tensor, peer, True) for tensor in self._values.pop(key)]
            else:
                tensors = self._values[key] = [leaf.empty(self.device) for leaf in comes_as]
                transfers += [Transfer(tensor, peer, False) for tensor in tensors]
        posted, arriving = self.pp.exchange(transfers, messages.__str__)
        if posted is not None:
            self._sends.append(posted)
            self._wait_for_sends(2 * self.pp.size)
        end = run.clock.read()
        for message in messages:
            if message.comes_as is None:
                run.readings.append((message.action, start, end))
            else:  # its span comes when somebody waits for it
                self._arriving[message.key] = (message.action, arriving)

    def _wait_for_sends(self, at_most: int) -> None:
        """Release sends, oldest first: those that are done, and then by waiting until ``at_most`` are left."""
        sends = self._sends
        while sends and (len(sends) > at_most or (self._sends_tell and sends[0].done())):
            sends.popleft().wait()

    # ------------------------------------------------------------------------------------------------ the other axes

    def _reduce(self, action: Action, feed: Feed, run: RowResult) -> None:
        self._activity.begin(action)
        start, before_s = run.clock.read(), self._activity.waited_s
        self.reduce(_stage(action))
        run.waited_in_reduce_s += self._activity.waited_s - before_s
        run.readings.append((action, start, run.clock.read()))

    def _step(self, action: Action, feed: Feed, run: RowResult) -> None:
        self._activity.begin(action)
        start = run.clock.read()
        before_s = self._activity.waited_s
        run.waited_s += before_s
        self._on_step(run)
        run.waited_in_step_s = self._activity.waited_s - before_s
        run.readings.append((action, start, run.clock.read()))


def _stage(action: Action) -> int:
    """Return the stage of an action; all but STEP have one."""
    assert action.stage is not None, action
    return action.stage


def _microbatch(action: Action) -> int:
    """Return the micro-batch of a computation or a communication."""
    assert action.microbatch is not None, action
    return action.microbatch
