"""Values between stages on one rank, present or in flight,
and the computations and messages that use them.

A value is the list of its tensors: the output of a stage for one micro-batch, or the gradient of a
stage's input. Messages of one group are posted together, each on the link of its two ranks. A
receive only posts; taking the value blocks until it has arrived. A send blocks only when too many
are in flight: see NOTE [sends in flight].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwright.mesh.comm import Group, TransferHandle
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.timing import RowTimes, TimedAction
from meshwright.pipeline.values import TensorSpec
from meshwright.schedule.action import SENDS, Action, Kind, Schedule

ValueKey: TypeAlias = tuple[Kind, int, int]
"""(F, stage, micro-batch) for the output of a stage; (B, stage, micro-batch)
for the gradient of its input.
"""


class Computation(NamedTuple):
    """F, B, I or W of this rank's row, with the keys of its values."""

    action: Action
    stage: int
    microbatch: int
    input_key: ValueKey | None
    """Key of its input value; None if it starts from the samples or the loss, and for W."""
    output_key: ValueKey | None
    """Key of its output value; None if that is the loss or the samples' gradient, and for W."""
    is_last: bool
    """True for the stage's last B or W of the step."""


class Message(NamedTuple):
    """One point-to-point message of this rank's row."""

    action: Action
    key: ValueKey
    """Key of the value that is sent or received."""
    peer: int
    """Pipeline rank of the other end."""
    received: tuple[TensorSpec, ...] | None
    """Specs of the received tensors; None for a send."""


class MessageGroup(tuple[Message, ...]):
    """Messages that are posted together; as a string, the activity of the rank in hang reports."""

    def __str__(self) -> str:
        return "+".join(str(message.action) for message in self)


def message_group(
    actions: Iterable[Action], schedule: Schedule, stages: Mapping[int, Stage]
) -> MessageGroup:
    """Return the messages of communications that are posted together."""
    return MessageGroup(_message(action, schedule, stages) for action in actions)


def _message(action: Action, schedule: Schedule, stages: Mapping[int, Stage]) -> Message:
    peer, partner = schedule.peer(action), action.partner()
    assert (
        action.stage is not None and action.microbatch is not None and partner.stage is not None
    ), action
    kind = Kind.F if action.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B
    if action.kind in SENDS:
        return Message(action, (kind, action.stage, action.microbatch), peer, None)
    stage = stages[action.stage]
    spec = stage.input_spec if kind is Kind.F else stage.output_spec
    assert spec is not None, action
    received = spec.leaves if kind is Kind.F else spec.with_gradient
    return Message(action, (kind, partner.stage, action.microbatch), peer, received)


def computation_of(action: Action, last_stage: int, *, is_last: bool) -> Computation:
    """Return a computation with the keys of its values.

    ``is_last``: the stage's last B or W of the step.
    """
    stage, microbatch = action.stage, action.microbatch
    assert stage is not None and microbatch is not None, action
    input_key: ValueKey | None = None
    output_key: ValueKey | None = None
    if action.kind is Kind.F:
        input_key = (Kind.F, stage - 1, microbatch) if stage > 0 else None
        output_key = (Kind.F, stage, microbatch) if stage < last_stage else None
    elif action.kind is not Kind.W:
        input_key = (Kind.B, stage + 1, microbatch) if stage < last_stage else None
        output_key = (Kind.B, stage, microbatch) if stage > 0 else None
    return Computation(action, stage, microbatch, input_key, output_key, is_last)


class ValueStore:
    """Values of the micro-batches in flight on this rank, by key.

    NOTE [sends in flight]: a send is done when its receiver has the tensors. To wait for that at
    once would tie this rank to its neighbour's pace. So sends are kept, with their tensors, which
    the transport still reads, and released as they finish. 2 x pp of them bound that memory: a rank
    that is further ahead of its neighbour waits for its oldest send.
    """

    def __init__(self, pp: Group, device: torch.device) -> None:
        self._pp, self._device = pp, device
        self._can_poll = device.type == "cuda"  # a gloo send is done only once it has been awaited
        self._most_sends = 2 * pp.size
        self._values: dict[ValueKey, list[Tensor]] = {}
        self._arriving: dict[ValueKey, tuple[Action, TransferHandle | None]] = {}
        self._sends: deque[TransferHandle] = deque()

    def put(self, key: ValueKey, tensors: list[Tensor]) -> None:
        """Store the tensors of a value."""
        self._values[key] = tensors

    def take(self, key: ValueKey, times: RowTimes) -> list[Tensor]:
        """Return the tensors of a value, and remove it; block until it has arrived."""
        if key in self._arriving:
            receive, handle = self._arriving.pop(key)
            with TimedAction(times, receive):
                if handle is not None:  # None: the message holds no tensor
                    handle.wait()
        return self._values.pop(key)

    def exchange(
        self, messages: MessageGroup, times: RowTimes, length_of: Callable[[int], int | None]
    ) -> None:
        """Post messages over pp, each on its link. Blocks only for the oldest sends,
        once many are in flight.

        ``length_of``: tokens of the samples of a micro-batch, see :meth:`Feed.length`.
        Bytes on the wire: those of the tensors of each value, in their own dtype.
        """
        self._pp.activity.begin(messages)
        start = times.clock.read()
        sends: list[Action] = []
        for action, key, peer, received in messages:
            if received is None:
                sends.append(action)
                handle = self._pp.transfer(self._values.pop(key), peer, True, action.__str__)
                if handle is not None:
                    self._sends.append(handle)
            else:
                length = length_of(key[2])
                tensors = [leaf.at(length).empty(self._device) for leaf in received]
                self._values[key] = tensors
                handle = self._pp.transfer(tensors, peer, False, action.__str__)
                self._arriving[key] = (action, handle)
        if self._can_poll or len(self._sends) > self._most_sends:
            self.wait_for_sends(self._most_sends)
        end = times.clock.read()
        # the time of a receive is that of the wait for it, in take()
        for send in sends:
            times.readings.append((send, start, end))

    def wait_for_sends(self, at_most: int) -> None:
        """Release the sends that are done, oldest first,
        then block until at most ``at_most`` are left.
        """
        sends = self._sends
        while sends and (len(sends) > at_most or (self._can_poll and sends[0].done())):
            sends.popleft().wait()

    def check_empty(self) -> None:
        """Assert that every value was taken."""
        assert not self._values and not self._arriving, (
            f"left over: {sorted(self._values)} {sorted(self._arriving)}"
        )
