"""Runs one row of a schedule on the stages of this rank: Kind -> function, and a loop. It decides nothing.

    item of the row                     roughly
    F stage m                           values[F, stage, m]      = stage.forward(values[F, stage-1, m])
    B stage m                           values[B, stage, m]      = stage.backward(values[B, stage+1, m])
    SEND_F / RECV_F                     values[F, stage, m] / values[F, stage-1, m]   to / from the neighbour
    SEND_B / RECV_B                     values[B, stage, m] / values[B, stage+1, m]   to / from the neighbour
    REDUCE stage                        reduce(stage): the gradients become those of the global batch
    STEP                                step(): norm, optimizer, weights on their way back

Communications written as one group are posted together. Receives are waited for, since the next action needs them. A
send is waited for when as many later ones as there are pipeline ranks are out, or at the end of the step: what it
reads stays alive until then. The checker has seen that the order is free of deadlock even if each send waited at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.mesh.comm import Group, Handle, Transfer
from framework.pipeline.stage import LossPart, Stage
from framework.schedule.action import SENDS, Action, Item, Kind, Schedule, actions_of
from framework.schedule.simulate import Span


class Microbatch(NamedTuple):
    """What feeds one micro-batch; the same on every rank of a replica."""

    tokens: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64, IGNORED_LABEL where it does not count
    sample_indices: Tensor  # (B,) int64, global


class Result(NamedTuple):
    """What a row's run has brought."""

    loss_parts: list[LossPart]
    """Of each micro-batch, on the last stage; empty elsewhere."""
    spans: list[Span]
    """When each item ran, in seconds from the start of the row."""


class CpuClock:
    """Reads the time at which the program is."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def read(self) -> float:
        """Seconds since the row began."""
        return time.perf_counter() - self._start_s

    def resolve(self, reading: float) -> float:
        """A reading, as seconds."""
        return reading


class CudaClock:
    """Records events on the current stream, read after the row has run: the program is far ahead of the GPU."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def read(self) -> torch.cuda.Event:
        """An event at this point of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def resolve(self, reading: torch.cuda.Event) -> float:
        """Seconds from the start of the row to the event; blocks until it has happened."""
        reading.synchronize()
        return float(self._start.elapsed_time(reading)) / 1e3


@dataclass
class Executor:
    """One rank's executor. ``feed(microbatch)`` gives the inputs; the callbacks are what other axes do."""

    schedule: Schedule
    pp: Group
    stages: dict[int, Stage]
    device: torch.device
    on_microbatch: Callable[[Tensor], None] = lambda sample_indices: None
    """Called before each forward with the global indices of its samples (the dropouts' draw)."""
    begin_last_backward: Callable[[int], None] = lambda stage: None
    """Called before the last backward of a stage in the step."""
    reduce: Callable[[int], None] = lambda stage: None
    step: Callable[[Result], None] = lambda result: None
    _values: dict[tuple[Kind, int, int], list[Tensor]] = field(default_factory=dict)
    _sends: list[Handle] = field(default_factory=list)

    def run(self, feed: Callable[[int], Microbatch]) -> Result:
        """One step: every item of my row, in order."""
        row = self.schedule.rows[self.pp.rank]
        last_backwards = self.schedule.last_backwards(self.pp.rank)
        clock = CudaClock() if self.device.type == "cuda" else CpuClock()
        readings: list[tuple[Item, Any, Any]] = []
        result = Result([], [])
        for item in row:
            start = clock.read()
            if not isinstance(item, Action):
                self._communicate(item)
            elif item.kind is Kind.F:
                self._forward(item, feed, result, train=True)
            elif item.kind is Kind.B:
                if item in last_backwards:
                    self.begin_last_backward(_stage(item))
                self._backward(item)
            elif item.kind is Kind.REDUCE:
                self.reduce(_stage(item))
            elif item.kind is Kind.STEP:
                self._finish(clock, readings, result)
                self.step(result)
            else:
                self._communicate((item,))
            readings.append((item, start, clock.read()))
        self._finish(clock, readings, result)
        for send in self._sends:
            send.wait()
        self._sends.clear()
        assert not self._values, f"left over: {sorted(self._values)}"
        return result

    def validate(self, feed: Callable[[int], Microbatch]) -> list[LossPart]:
        """Forward only: the same row without what belongs to backward and step."""
        result = Result([], [])
        for item in self.schedule.rows[self.pp.rank]:
            kept = tuple(action for action in actions_of(item) if action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F))
            if kept and kept[0].kind is Kind.F:
                self._forward(kept[0], feed, result, train=False)
            elif kept:
                self._communicate(kept)
        for send in self._sends:
            send.wait()
        self._sends.clear()
        return result.loss_parts

    def _finish(self, clock: CpuClock | CudaClock, readings: list[tuple[Item, Any, Any]], result: Result) -> None:
        for item, start, stop in readings:
            for action in actions_of(item):
                result.spans.append(Span(self.pp.rank, action, clock.resolve(start), clock.resolve(stop)))
        readings.clear()

    def _forward(self, action: Action, feed: Callable[[int], Microbatch], result: Result, *, train: bool) -> None:
        index, microbatch = _stage(action), _microbatch(action)
        stage = self.stages[index]
        batch = feed(microbatch)
        self.on_microbatch(batch.sample_indices)
        inputs = [batch.tokens] if stage.is_first else self._values.pop((Kind.F, index - 1, microbatch))
        found = stage.forward(microbatch, inputs, batch.labels if stage.is_last else None, train=train)
        if isinstance(found, LossPart):
            result.loss_parts.append(found)
        else:
            self._values[Kind.F, index, microbatch] = found

    def _backward(self, action: Action) -> None:
        index, microbatch = _stage(action), _microbatch(action)
        stage = self.stages[index]
        gradients = None if stage.is_last else self._values.pop((Kind.B, index + 1, microbatch))
        found = stage.backward(microbatch, gradients)
        if not stage.is_first:
            self._values[Kind.B, index, microbatch] = found

    def _communicate(self, actions: Sequence[Action]) -> None:
        """Post these together; block until the received ones are here."""
        transfers: list[Transfer] = []
        for action in actions:
            index, microbatch = _stage(action), _microbatch(action)
            stage = self.stages[index]
            if action.kind is Kind.SEND_F:
                tensors = self._values.pop((Kind.F, index, microbatch))
            elif action.kind is Kind.SEND_B:
                tensors = self._values.pop((Kind.B, index, microbatch))
            elif action.kind is Kind.RECV_F:
                assert stage.input_spec is not None
                tensors = stage.input_spec.empty_leaves(self.device)
                self._values[Kind.F, index - 1, microbatch] = tensors
            else:
                assert stage.output_spec is not None
                tensors = stage.output_spec.empty_gradients(self.device)
                self._values[Kind.B, index + 1, microbatch] = tensors
            peer = self.schedule.peer(action)
            transfers += [Transfer(tensor, peer, action.kind in SENDS) for tensor in tensors]
        posted, received = self.pp.exchange(transfers, " + ".join(map(str, actions)))
        received.wait()
        self._sends = [send for send in self._sends if not send.done()] + [posted]
        while len(self._sends) > self.pp.size:  # gloo calls a send done only when somebody has waited for it
            self._sends.pop(0).wait()


def _stage(action: Action) -> int:
    """The stage of an action that has one: all but STEP."""
    assert action.stage is not None, action
    return action.stage


def _microbatch(action: Action) -> int:
    """The micro-batch of a computation or a communication."""
    assert action.microbatch is not None, action
    return action.microbatch
