"""Peak memory of a rank, by category: layer profiles combined along its row of the schedule.

at rest       weights, gradients, optimizer        by the ZeRO stage (meshwright.tools.summary)
along the row activations    of every micro-batch from its F to its B (or, split, to W)
              messages       received for a later action, or still being sent
              temporaries    peak of the running action, and reductions over replicas in progress
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.blueprint import DTYPES
from meshwright.config import RunConfig, bucket_bytes, reduces_each_microbatch, shard_factor
from meshwright.schedule.action import COMPUTE, Action, Item, Kind, Schedule, actions_of
from meshwright.tools.planner.footprint import BackwardPoint, Footprint


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


class Backend(NamedTuple):
    """Extra memory that a communication backend needs besides the tensors themselves."""

    holds_sends: bool
    """True if a sent tensor is freed only after 2 x pp others have been sent (gloo reports completion late)."""
    copies_reduce_scatter: bool
    """True if a reduce-scatter needs a copy of its whole input (gloo has no buffers of its own)."""


GLOO, NCCL = Backend(True, True), Backend(False, False)


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


class ReductionBuffers(NamedTuple):
    """Temporary memory of gradient reduction over replicas and of weight all-gathers."""

    config: RunConfig
    backend: Backend

    @property
    def narrow(self) -> int:
        """Bytes per element of the compute dtype."""
        return DTYPES[self.config.train.dtype].itemsize

    @property
    def wide(self) -> int:
        """Bytes per element of a gradient that is reduced."""
        return max(4, self.narrow)

    def at(self, point: BackwardPoint, whole: int, *, reduces: bool, at_once: bool = False) -> int:
        """Return the temporary bytes while one layer's backward runs.

        ``whole``: elements of the stage. ``at_once``: the first gradient exists before the first layer's peak.
        """
        parallel = self.config.parallel
        if shard_factor(self.config) == 1:
            return 0
        if parallel.zero == 3:  # received shards and gathered weights; then the gradient and its reduce-scatter input
            return 2 * self.narrow * point.elements
        if not reduces:
            return 0
        gradient_bytes, bucket = point.elements_before * self.wide, bucket_bytes(self.config)
        copies = 1 if self.backend.copies_reduce_scatter else 0
        if parallel.zero == 2 and reduces_each_microbatch(self.config):
            # a whole bucket is allocated at its first gradient
            allocated = min(whole * self.wide, 2 * bucket) if gradient_bytes or at_once else 0
            is_complete = gradient_bytes >= bucket or point.elements == 0
            return allocated + (min(whole * self.wide, bucket) * copies if is_complete else 0)
        return (gradient_bytes if point.elements == 0 else gradient_bytes // bucket * bucket) * copies

    def after(self, elements: int) -> int:
        """Return the temporary bytes between the last backward and REDUCE, for ``elements`` gradients."""
        if shard_factor(self.config) == 1 or self.config.parallel.zero == 3:
            return 0
        if self.config.parallel.zero == 2 and reduces_each_microbatch(self.config):
            return 0
        return elements * self.wide if self.backend.copies_reduce_scatter else 0


def walk(schedule: Schedule, pp_rank: int, footprints: Sequence[Footprint], buffers: ReductionBuffers) -> ActionMemory:
    """Walk along a row and return its moment of peak memory; approximate for a schedule that is not lowered."""
    last = schedule.last_backwards(pp_rank)
    reduces_each = reduces_each_microbatch(buffers.config)
    sends: deque[tuple[int, Action]] = deque()
    released: set[Action] = set()
    """Sends of forwards whose backward is done while their output is still being sent."""
    activations = messages = reductions = 0
    highest = ActionMemory(0, 0, 0, "rest")
    for item in _row(schedule, pp_rank, last):
        group = actions_of(item)
        if group[0].kind in COMPUTE:
            (action,) = group
            stage = action.stage or 0
            of = footprints[stage]
            if action.kind is Kind.F:
                largest = BackwardPoint(0, max(point.elements for point in of.backward), 0)
                peak = of.forward_peak + buffers.at(largest, 0, reduces=False)
            else:
                reduces = action in last or (reduces_each and action.kind is not Kind.I)
                second, whole = action.kind is Kind.W, of.backward[-1].elements_before
                points = of.weight_half if second else of.backward
                peak = max(p.bytes + buffers.at(p, whole, reduces=reduces, at_once=second) for p in points)
            moment = ActionMemory(activations, messages, reductions + peak, str(action))
            if moment.total > highest.total:
                highest = moment
            if action in last:
                reductions += buffers.after(of.backward[-1].elements_before)
            activations, messages = _after(schedule, action, of, activations, messages)
            if action.kind in (Kind.B, Kind.I) and any(send == _sent(action) for _, send in sends):
                released.add(_sent(action))
                messages += of.outputs
            continue
        for action in group:
            if action.stage is None:  # STEP works in place
                continue
            of = footprints[action.stage]
            if action.kind is Kind.RECV_F:
                messages += of.inputs
            elif action.kind is Kind.RECV_B:
                messages += of.output_gradients
            elif action.kind is Kind.SEND_B:
                sends.append((of.input_gradients, action))
            elif action.kind is Kind.SEND_F:
                sends.append((of.outputs, action))
            elif action.kind is Kind.REDUCE:
                reductions -= buffers.after(of.backward[-1].elements_before)
        while sends and (not buffers.backend.holds_sends or len(sends) > 2 * schedule.pp):
            size, action = sends.popleft()
            if action.kind is Kind.SEND_B or action in released:
                messages -= size
            released.discard(action)
    return highest


def _row(schedule: Schedule, pp_rank: int, last: frozenset[Action]) -> Sequence[Item]:
    """Return a row; if the schedule is not lowered, with each receive as late and each send as early as possible."""
    row = schedule.rows[pp_rank]
    if row and row[-1] == Action(Kind.STEP):
        return row
    items: list[Item] = []
    for _, action in schedule.actions(pp_rank):
        receive, send = schedule.receive_for(action), schedule.send_after(action)
        reduce = Action(Kind.REDUCE, action.stage) if action in last else None
        items += [each for each in (receive, action, send, reduce) if each is not None]
    return items


def _sent(backward: Action) -> Action:
    """Return the send of the forward that belongs to this backward."""
    return backward._replace(kind=Kind.SEND_F)


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
