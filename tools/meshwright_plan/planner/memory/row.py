"""Peak memory along a pipeline rank's row of actions, in addition to the bytes at rest.

activations    of every micro-batch from its F to its B (or, split, to W)
messages       received for a later action, or still being sent
temporaries    peak of the running action, and reductions over replicas in progress
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from meshwright.config import reduces_each_microbatch
from meshwright.schedule.action import COMPUTE, SENDS, Action, Item, Kind, Schedule, actions_of
from meshwright_plan.planner.memory.footprint import Footprint
from meshwright_plan.planner.memory.reduction import ReductionBuffers


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


def row_peak(
    schedule: Schedule,
    pp_rank: int,
    footprints: Sequence[Footprint],
    buffers: ReductionBuffers,
    frees_sent: bool = False,
) -> ActionMemory:
    """Return the peak along a pipeline rank's row of actions;
    approximate for a schedule that is not lowered.

    ``frees_sent``: a forward's output is freed as it is sent, before the next computation.
    """
    if frees_sent:
        footprints = [of._replace(kept=of.kept - of.sent_only) for of in footprints]

    @cache
    def action_peak(
        stage: int, kind: Kind, reduces: bool, in_flight: int, was_gathered: bool
    ) -> int:
        return buffers.peak(
            footprints[stage],
            Action(kind, stage),
            reduces=reduces,
            held=in_flight,
            was_gathered=was_gathered,
        )

    last = schedule.last_backwards(pp_rank)
    walk = _Walk(schedule, footprints, buffers, action_peak, last, frees_sent)
    for item in _row(schedule, pp_rank, last):
        actions = actions_of(item)
        if actions[0].kind in COMPUTE:
            walk.compute(actions[0])
        else:
            walk.communicate(actions)
    return walk.highest


def _row(schedule: Schedule, pp_rank: int, last: frozenset[Action]) -> Sequence[Item]:
    """Return a row's actions; if not lowered, each receive one computation before its use,
    each send at once.
    """
    computations = [action for _, action in schedule.actions(pp_rank)]
    if computations and computations[-1] == Action(Kind.STEP):
        return computations
    first, *receives = (schedule.receive_for(action) for action in computations)
    items: list[Item | None] = [first]
    for action, receive in zip(computations, [*receives, None], strict=True):
        reduce = Action(Kind.REDUCE, action.stage) if action in last else None
        items += [receive, action, schedule.send_after(action), reduce]
    return [item for item in items if item is not None]


@dataclass
class _Sends:
    """Sends of a rank in flight, in the order in which they were posted."""

    limit: int
    """Most sends that the executor keeps in flight. On CUDA the host runs far ahead,
    and frees none earlier.
    """
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


class _Walk:
    """Walk along a row: the bytes held after each action, and the highest moment so far."""

    def __init__(
        self,
        schedule: Schedule,
        footprints: Sequence[Footprint],
        buffers: ReductionBuffers,
        action_peak: Callable[[int, Kind, bool, int, bool], int],
        last_backwards: frozenset[Action],
        frees_sent: bool,
    ) -> None:
        self.schedule, self.footprints, self.buffers = schedule, footprints, buffers
        self.action_peak, self.last_backwards = action_peak, last_backwards
        self.frees_sent = frees_sent
        self.reduces_each = reduces_each_microbatch(buffers.config.parallel)
        self.highest = ActionMemory(0, 0, 0, "rest")
        self.activations = self.messages = 0
        self.reductions = 0
        """Copies of gradients in reduction, from a stage's last backward to its REDUCE."""
        self.in_flight: dict[int, int] = {}
        """Stage -> bytes of reductions that its previous backward has left in flight."""
        self.gathered: set[int] = set()
        """Stages whose forward has gathered weights that stay until a backward."""
        self.sends = _Sends(2 * schedule.pp)
        self.leaving = 0
        """Saved tensors of the previous forward that are still on their way to the host."""
        self.previous: Action | None = None

    def communicate(self, actions: Sequence[Action]) -> None:
        """Post messages, or wait for a stage's reductions."""
        for action in actions:
            if action.stage is None:
                continue  # STEP works in place
            of = self.footprints[action.stage]
            if action.kind in SENDS:
                is_gradient = action.kind is Kind.SEND_B
                self.sends.post(of.input_gradients if is_gradient else of.outputs, action)
            elif action.kind is Kind.RECV_F:
                self.messages += of.inputs
            elif action.kind is Kind.RECV_B:
                self.messages += of.output_gradients
            elif action.kind is Kind.REDUCE:
                self.reductions -= self.buffers.after(of.backward[-1])
        self.messages -= self.sends.complete()

    def compute(self, action: Action) -> None:
        """Run a computation."""
        stage, kind = action.stage or 0, action.kind
        of, is_last = self.footprints[stage], action in self.last_backwards
        reduces = is_last or (self.reduces_each and kind is not Kind.I)
        if kind is Kind.F and self.buffers.config.parallel.zero == 2:
            self.in_flight[stage] = 0  # a forward waits for the collective of each layer's bucket

        in_flight = self.in_flight.get(stage, 0)
        temporaries = self.reductions + sum(self.in_flight.values())
        temporaries += self.action_peak(stage, kind, reduces, in_flight, stage in self.gathered)
        temporaries += sum(
            self.buffers.kept(self.footprints[other])
            for other in self.gathered
            if other != stage or kind is Kind.W
        )
        on_their_way = self._leaving_during(action, of)
        moment = ActionMemory(
            self.activations + on_their_way, self.messages, temporaries, str(action)
        )
        if moment.total > self.highest.total:
            self.highest = moment

        if kind is Kind.F:
            self.gathered.add(stage)
        elif kind is not Kind.W:
            self.gathered.discard(stage)
        if reduces and kind is not Kind.F:
            self.in_flight[stage] = 0 if is_last else self.buffers.held(of, action)
        if is_last:
            self.reductions += self.buffers.after(of.backward[-1])
        self._hold_and_release(action, of)
        if not self.frees_sent and self.sends.outlives(action):
            self.messages += of.outputs

    def _leaving_during(self, action: Action, of: Footprint) -> int:
        """Return the bytes on their way to the host while ``action`` runs.

        The last group of a forward leaves during the computation that follows, unless that is the
        backward of the same micro-batch, which needs it.
        """
        during = self.leaving
        if action.kind is Kind.F:
            self.leaving = of.last_group
        else:
            follows_its_forward = self.previous == (Kind.F, *action[1:])
            during, self.leaving = (0 if follows_its_forward else during), 0
        self.previous = action
        return during

    def _hold_and_release(self, action: Action, of: Footprint) -> None:
        """Update the bytes held after an action. A received input is held until its backward."""
        if action.kind is Kind.W:
            self.activations -= of.deferred
            return
        forward = action._replace(kind=Kind.F)
        received = of.inputs if self.schedule.receive_for(forward) is not None else 0
        if action.kind is Kind.F:
            self.messages -= received
            self.activations += received + of.kept
            return
        self.activations -= received + of.kept
        if action.kind is Kind.I:
            self.activations += of.deferred
        self.messages += of.input_gradients - of.output_gradients


def offloaded_bytes(schedule: Schedule, pp_rank: int, footprints: Sequence[Footprint]) -> int:
    """Return the largest number of bytes of saved tensors in host memory along a row.

    On CUDA a layer's block of pinned memory is rounded up to a power of two, which is not counted.
    """
    most = live = 0
    for _, action in schedule.actions(pp_rank):
        if action.kind in (Kind.F, Kind.B, Kind.I):
            assert action.stage is not None
            live += footprints[action.stage].offloaded * (1 if action.kind is Kind.F else -1)
            most = max(most, live)
    return most
