"""Peak memory of a rank, by category: stage footprints added up along its row of the schedule.

at rest       weights, gradients, optimizer        by the ZeRO stage (meshwright.optimizer.at_rest)
along the row activations    of every micro-batch from its F to its B (or, split, to W)
              messages       received for a later action, or still being sent
              temporaries    peak of the running action, and reductions over replicas in progress
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from meshwright.config import reduces_each_microbatch
from meshwright.schedule.action import COMPUTE, SENDS, Action, Item, Kind, Schedule, actions_of
from meshwright_plan.planner.footprint import Footprint
from meshwright_plan.planner.reduction_buffers import ReductionBuffers


class RankMemory(NamedTuple):
    """Peak memory of one rank on its device, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    messages: int
    temporaries: int
    host: int
    """Bytes at rest in host memory instead."""
    at: str
    """Action of the row at the peak."""

    @property
    def at_rest(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes of all categories on the device."""
        return self.at_rest + self.activations + self.messages + self.temporaries


CATEGORIES = ("weights", "gradients", "optimizer", "activations", "messages", "temporaries")
"""Fields of :class:`RankMemory` that add up to its total."""


class ActionMemory(NamedTuple):
    """Bytes held in addition to those at rest while one action runs."""

    activations: int
    messages: int
    temporaries: int
    at: str

    @property
    def total(self) -> int:
        """Bytes of all three categories."""
        return self.activations + self.messages + self.temporaries


@dataclass
class _Sends:
    """Sends of a rank in flight, in the order in which they were posted."""

    limit: int
    """Most sends that the executor keeps in flight. On CUDA the host runs far ahead, and frees none earlier."""
    queue: deque[tuple[int, Action]] = field(default_factory=deque)
    forwards: set[Action] = field(default_factory=set)
    released: set[Action] = field(default_factory=set)
    """Sends of forwards whose backward is done while their output is still being sent."""

    def post(self, num_bytes: int, action: Action) -> None:
        """Post a send of ``num_bytes``."""
        self.queue.append((num_bytes, action))
        if action.kind is Kind.SEND_F:
            self.forwards.add(action)

    def outlives(self, backward: Action) -> bool:
        """Release the output that belongs to a backward; return True if it is still being sent."""
        sent = Action(Kind.SEND_F, backward.stage, backward.microbatch)
        is_pending = backward.kind in (Kind.B, Kind.I) and sent in self.forwards
        if is_pending:
            self.released.add(sent)
        return is_pending

    def complete(self) -> int:
        """Complete the sends beyond the limit; return the bytes that nothing else holds."""
        freed = 0
        while len(self.queue) > self.limit:
            num_bytes, action = self.queue.popleft()
            if action.kind is Kind.SEND_B or action in self.released:
                freed += num_bytes
            self.released.discard(action)
            self.forwards.discard(action)
        return freed


def row_peak(
    schedule: Schedule,
    pp_rank: int,
    footprints: Sequence[Footprint],
    buffers: ReductionBuffers,
    frees_sent: bool = False,
) -> ActionMemory:
    """Return the peak along a pipeline rank's row of actions; approximate for a schedule that is not lowered.

    ``frees_sent``: a forward's output is freed as it is sent, before the next computation.
    """
    if frees_sent:
        footprints = [of._replace(kept=of.kept - of.sent_only) for of in footprints]
    last, reduces_each = schedule.last_backwards(pp_rank), reduces_each_microbatch(buffers.config)
    sends, held = _Sends(2 * schedule.pp), dict[int, int]()
    """``held``: stage -> bytes of reductions that its last backward has left in flight."""
    activations = messages = reductions = leaving = 0
    previous: Action | None = None
    highest = ActionMemory(0, 0, 0, "rest")

    @cache
    def peak(stage: int, kind: Kind, reduces: bool, held: int) -> int:
        return buffers.peak(footprints[stage], Action(kind, stage), reduces=reduces, held=held)

    for item in _row(schedule, pp_rank, last):
        group = actions_of(item)
        if group[0].kind not in COMPUTE:
            for action in group:
                if action.stage is not None:  # STEP works in place
                    messages += _post(footprints[action.stage], action, sends)
                if action.kind is Kind.REDUCE:
                    reductions -= buffers.after(footprints[action.stage or 0].backward[-1])
            messages -= sends.complete()
            continue
        (action,) = group
        stage = action.stage or 0
        of = footprints[stage]
        reduces = action in last or (reduces_each and action.kind is not Kind.I)
        if action.kind is Kind.F and buffers.config.parallel.zero == 2:
            held[stage] = 0  # a forward waits for the collective of each layer's bucket
        if action.kind is Kind.F or previous == (Kind.F, *action[1:]):
            waits, leaving = (leaving, of.last_group) if action.kind is Kind.F else (0, 0)
        else:
            waits, leaving = leaving, 0
        previous = action
        temporaries = reductions + sum(held.values()) + peak(stage, action.kind, reduces, held.get(stage, 0))
        moment = ActionMemory(activations + waits, messages, temporaries, str(action))
        if moment.total > highest.total:
            highest = moment
        if action.kind is not Kind.F and reduces:
            held[stage] = 0 if action in last else buffers.held(of, action)
        if action in last:
            reductions += buffers.after(of.backward[-1])
        activations, messages = _after(schedule, action, of, activations, messages)
        if not frees_sent and sends.outlives(action):
            messages += of.outputs
    return highest


def _post(of: Footprint, action: Action, sends: _Sends) -> int:
    """Post a communication; return the bytes that it receives."""
    if action.kind in SENDS:
        sends.post(of.input_gradients if action.kind is Kind.SEND_B else of.outputs, action)
    return {Kind.RECV_F: of.inputs, Kind.RECV_B: of.output_gradients}.get(action.kind, 0)


def _row(schedule: Schedule, pp_rank: int, last: frozenset[Action]) -> Sequence[Item]:
    """Return a row's actions; if not lowered, each receive one computation before its use, each send at once."""
    computations = [action for _, action in schedule.actions(pp_rank)]
    if computations and computations[-1] == Action(Kind.STEP):
        return computations
    first, *receives = (schedule.receive_for(action) for action in computations)
    items: list[Item | None] = [first]
    for action, receive in zip(computations, [*receives, None], strict=True):
        reduce = Action(Kind.REDUCE, action.stage) if action in last else None
        items += [receive, action, schedule.send_after(action), reduce]
    return [each for each in items if each is not None]


def _after(schedule: Schedule, action: Action, of: Footprint, activations: int, messages: int) -> tuple[int, int]:
    """Return (activations, messages) in bytes after an action. A received input is held until its backward is done."""
    if action.kind is Kind.F:
        if schedule.receive_for(action) is not None:
            messages -= of.inputs
            activations += of.inputs
        return activations + of.kept, messages
    if action.kind is Kind.W:
        return activations - of.deferred, messages
    activations -= of.kept
    if schedule.receive_for(action._replace(kind=Kind.F)) is not None:
        activations -= of.inputs
    if action.kind is Kind.I:
        activations += of.deferred
    return activations, messages - of.output_gradients + of.input_gradients
