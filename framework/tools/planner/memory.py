"""Peak memory of a rank, by category: layer profiles combined along its row of the schedule.

at rest       weights, gradients, optimizer        by the ZeRO stage (meshwright.tools.at_rest)
along the row activations    of every micro-batch from its F to its B (or, split, to W)
              messages       received for a later action, or still being sent
              temporaries    peak of the running action, and reductions over replicas in progress
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from meshwright.config import RunConfig, bucket_bytes, expert_shard_factor, reduces_each_microbatch, shard_factor
from meshwright.parameters import DTYPES
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

    copies_reduce_scatter: bool
    """True if a reduce-scatter needs a copy of its whole input (gloo has no buffers of its own)."""


GLOO, NCCL = Backend(True), Backend(False)


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
    gathers_experts: bool = False
    """ZeRO-3 shards the weights of experts that ranks share."""

    @property
    def sums_experts(self) -> bool:
        """True if gradients of experts are summed in buckets."""
        return expert_shard_factor(self.config) > 1 and not self.gathers_experts

    @property
    def narrow(self) -> int:
        """Bytes per element of the compute dtype."""
        return DTYPES[self.config.train.dtype].itemsize

    @property
    def wide(self) -> int:
        """Bytes per element of a gradient that is reduced."""
        return max(4, self.narrow)

    def at(
        self,
        points: Sequence[BackwardPoint],
        index: int,
        *,
        reduces: bool,
        in_halves: bool = False,
        held: int = 0,
        ends_in_loss: bool = True,
    ) -> int:
        """Return the temporary bytes while one layer's backward runs, at ``index`` of the path of a stage's backward.

        ``in_halves``: this is the weight half (W), where the first gradient exists before the first layer's peak.
        ``held``: bytes that :meth:`held` returned for the stage's backward before. ``ends_in_loss``: the first layer
        of the path is followed by the loss.
        """
        if shard_factor(self.config) == 1:
            return 0
        point, whole, experts = points[index], points[-1], 0
        if reduces and point.experts + point.experts_before and self.sums_experts:
            is_end = index == len(points) - 1
            experts = self._in_buckets(point.experts_before, whole.experts_before, is_end, in_halves, False)
        if self.config.parallel.zero == 3:
            return experts + self._fully_sharded(points, index, reduces=reduces, in_halves=in_halves, held=held)
        if not reduces:
            return 0
        # the loss has its peak before the head's gradient
        counts = point.elements_before, whole.elements_before, point.elements == 0
        return experts + self._in_buckets(*counts, in_halves, ends_in_loss)

    def _in_buckets(self, before: int, whole: int, is_end: bool, in_halves: bool, waits: bool) -> int:
        """Return the temporary bytes of buckets at one layer's turn in backward.

        Args:
            before: elements whose gradients exist; ``whole``: those of the stage. ``is_end``: no layer is left.
            waits: no gradient of the layer exists at its peak.
        """
        gradient_bytes, bucket = before * self.wide, bucket_bytes(self.config)
        copies = 1 if self.backend.copies_reduce_scatter else 0
        if self.config.parallel.zero >= 2 and reduces_each_microbatch(self.config):
            # a whole bucket is allocated at its first gradient
            num_buckets = 2 if gradient_bytes or in_halves else 0 if waits else 1
            allocated = min(whole * self.wide, num_buckets * bucket)
            is_complete = gradient_bytes >= bucket or is_end
            return allocated + (min(whole * self.wide, bucket) * copies if is_complete else 0)
        return (gradient_bytes if is_end else gradient_bytes // bucket * bucket) * copies

    def _fully_sharded(
        self, points: Sequence[BackwardPoint], index: int, *, reduces: bool, in_halves: bool, held: int
    ) -> int:
        """Return the temporary bytes of ZeRO-3 at one layer's turn.

        gathered      this layer's weights, experts included, and those of the layer before it, which are prefetched
        in flight     input of the last reduce-scatter, until the next one is posted: of the layer after it,
                      or ``held`` from the backward before
        weight half   no weights, but the full gradients of all layers so far, which are reduced at its end
        """
        point = points[index]
        experts = point.experts if self.gathers_experts else 0
        if in_halves:
            before = point.experts_before if self.gathers_experts else 0
            return self.narrow * (point.elements_before + before + point.elements + experts) + held
        prefetched = points[index + 1].gathered if index + 1 < len(points) else 0
        in_flight = self.wide * points[index - 1].elements if index and reduces else held
        return self.narrow * (point.gathered + experts + prefetched) + in_flight

    def held(self, of: Footprint, backward: Action) -> int:
        """Return the bytes that a stage's backward leaves in flight: under ZeRO-3 until its next one, under ZeRO-2
        until a forward.

        FSDP keeps the input of the last reduce-scatter: that of the first layer, and after the weight half of the last.
        ZeRO-2 has its last bucket in flight, and gloo what it receives: on the first stage the embedding's. On others
        it is that of norms, which are too small to count.
        """
        if shard_factor(self.config) == 1 or self.config.parallel.zero < 2:
            return 0
        first_layer = self.wide * of.backward[-2].elements
        if self.config.parallel.zero == 3:
            return self.wide * of.backward[0].elements if backward.kind is Kind.W else first_layer
        is_in_flight = backward.stage == 0 and reduces_each_microbatch(self.config)
        return (2 if self.backend.copies_reduce_scatter else 1) * first_layer if is_in_flight else 0

    def peak(self, of: Footprint, action: Action, *, reduces: bool, held: int) -> int:
        """Return the peak bytes while an action runs, above those live before it, ``held`` included."""
        if action.kind is Kind.F:
            return of.forward_peak + self.forward(of)
        in_halves = action.kind is Kind.W
        points = of.weight_half if in_halves else of.backward
        at = partial(self.at, points, reduces=reduces, in_halves=in_halves, held=held, ends_in_loss=of.outputs == 0)
        peak = max(point.bytes + at(index) for index, point in enumerate(points))
        return peak - (held if self.config.parallel.zero == 3 else 0)  # `at` has counted it

    def forward(self, of: Footprint) -> int:
        """Return the temporary bytes in a forward: gathered weights of ZeRO-3, of a layer and the prefetched next."""
        gathers = shard_factor(self.config) > 1 and self.config.parallel.zero == 3
        return self.narrow * (of.forward_elements + of.forward_experts * self.gathers_experts) if gathers else 0

    def after(self, end: BackwardPoint) -> int:
        """Return the temporary bytes between the last backward and REDUCE, for the gradients at its ``end``."""
        if shard_factor(self.config) == 1 or not self.backend.copies_reduce_scatter:
            return 0
        if self.config.parallel.zero >= 2 and reduces_each_microbatch(self.config):
            return 0
        dense = 0 if self.config.parallel.zero == 3 else end.elements_before
        return (dense + (end.experts_before if self.sums_experts else 0)) * self.wide


def walk(schedule: Schedule, pp_rank: int, footprints: Sequence[Footprint], buffers: ReductionBuffers) -> ActionMemory:
    """Walk along a row and return its moment of peak memory; approximate for a schedule that is not lowered."""
    last = schedule.last_backwards(pp_rank)
    reduces_each = reduces_each_microbatch(buffers.config)
    sends: deque[tuple[int, Action]] = deque()
    held: dict[int, int] = {}
    """By stage: bytes that its last backward has left behind."""
    released: set[Action] = set()
    """Sends of forwards whose backward is done while their output is still being sent."""
    activations = messages = reductions = leaving = 0
    previous: Action | None = None
    highest = ActionMemory(0, 0, 0, "rest")
    for item in _row(schedule, pp_rank, last):
        group = actions_of(item)
        if group[0].kind in COMPUTE:
            (action,) = group
            stage = action.stage or 0
            of = footprints[stage]
            reduces = action in last or (reduces_each and action.kind is not Kind.I)
            if action.kind is Kind.F and buffers.config.parallel.zero == 2:
                held[stage] = 0  # a forward waits for the collective of each layer's bucket
            peak = buffers.peak(of, action, reduces=reduces, held=held.get(stage, 0))
            if action.kind is Kind.F or previous == action._replace(kind=Kind.F):
                waits, leaving = (leaving, of.last_group) if action.kind is Kind.F else (0, 0)
            else:
                waits, leaving = leaving, 0
            previous = action
            moment = ActionMemory(activations + waits, messages, reductions + sum(held.values()) + peak, str(action))
            if moment.total > highest.total:
                highest = moment
            if action.kind is not Kind.F and reduces:
                held[stage] = 0 if action in last else buffers.held(of, action)
            if action in last:
                reductions += buffers.after(of.backward[-1])
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
                reductions -= buffers.after(of.backward[-1])
        while len(sends) > 2 * schedule.pp:  # as the executor; on CUDA the host, far ahead, sees none done earlier
            size, action = sends.popleft()
            if action.kind is Kind.SEND_B or action in released:
                messages -= size
            released.discard(action)
    return highest


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
