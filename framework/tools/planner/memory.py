"""Peak memory of a rank, by category: layer profiles combined along its row of the schedule.

at rest       weights, gradients, optimizer        by the ZeRO stage, as meshwright.tools.summary counts them
along the row activations    of every micro-batch from its F to its B (or, split, to W)
              messages       received for a later action, or still being sent
              temporaries    peak of the running action, and reductions over replicas in progress
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.config import RunConfig, bucket_bytes, reduces_each_microbatch, shard_factor
from meshwright.optimizer.eight_bit import table_bytes
from meshwright.schedule.action import COMPUTE, Action, Item, Kind, Schedule, actions_of
from meshwright.tools.planner.profile import LayerProfile
from meshwright.tools.summary import Elements, held_at_rest


class Point(NamedTuple):
    """One layer's turn in the backward of a stage."""

    bytes: int
    """Peak bytes, above those live at the start of the stage's backward."""
    elements: int
    """Number of the layer's parameters."""
    elements_before: int
    """Number of parameters whose gradients exist by then, which are those of the later layers."""


class Footprint(NamedTuple):
    """Memory of one stage for one micro-batch, in bytes."""

    inputs: int
    """Tensors from the previous stage, held from their receive to their backward."""
    kept: int
    """Tensors that the layers keep between forward and backward, with values between layers, without ``inputs``."""
    forward_peak: int
    """Peak in forward, above the bytes live before it."""
    backward: tuple[Point, ...]
    """Path of a whole backward, or of its first half: from the last layer to the first, then the end."""
    noted: int
    """Bytes kept between the halves of a split backward."""
    weight_half: tuple[Point, ...]
    """Path of the second half of a split backward."""
    outputs: int
    """Outputs sent to the next stage and held for backward."""
    input_gradients: int
    output_gradients: int
    """Gradients received from the next stage."""


def footprint(layers: Sequence[LayerProfile], inputs: Sequence[tuple[int, bool]], *, last: bool) -> Footprint:
    """Combine the layers of a stage.

    Args:
        inputs: (bytes, needs gradient) of each tensor from the previous stage. Empty for the first stage: its samples
            are small, and counted where a layer keeps them.
        last: True if the stage ends in the loss.
    """
    value: list[int] = []
    sizes: dict[int, int] = {}  # of tensors between layers that the layer before does not keep itself
    keepers: dict[int, int] = {}  # the first layer that keeps one: the last to let it go
    for _ in inputs:
        value.append(len(sizes))
        sizes[len(sizes)] = 0
    received = set(value)
    owned = forward_peak = 0
    for index, layer in enumerate(layers):
        if not value:
            value = [len(sizes) + place for place in range(len(layer.inputs_kept))]
            sizes |= dict.fromkeys(value, 0)
        for place, tensor in enumerate(value):
            if layer.inputs_kept[place]:
                keepers.setdefault(tensor, index)
        there = owned + sum(sizes[tensor] for tensor in {*value, *keepers} - received)
        forward_peak = max(forward_peak, there + layer.forward_peak)
        owned += layer.kept_bytes
        handed = []
        for leaf in layer.outputs:
            if leaf.comes_from is not None:
                handed.append(value[leaf.comes_from])
                continue
            tensor = len(sizes)
            sizes[tensor] = 0 if leaf.kept else leaf.bytes
            handed.append(tensor)
        value = handed
    if not last:
        for leaf, tensor in zip(layers[-1].outputs, value, strict=True):
            if leaf.needs_gradient:
                keepers.setdefault(tensor, len(layers))
    kept = owned + sum(sizes[tensor] for tensor in keepers if tensor not in received)
    noted = sum(layer.noted_bytes for layer in layers)
    back: list[Point] = []
    halves: list[Point] = []
    remaining, remaining_notes, elements = kept, noted, 0
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        from_outside = index == len(layers) - 1 and not last
        peak = layer.backward_peak_from_outside if from_outside else layer.backward_peak
        back.append(Point(remaining + peak - kept, layer.num_parameters, elements))
        halves.append(Point(remaining_notes + layer.weight_peak - noted, layer.num_parameters, elements))
        remaining -= layer.kept_bytes + sum(sizes[t] for t, keeper in keepers.items() if keeper == index)
        remaining_notes -= layer.noted_bytes
        elements += layer.num_parameters
    back.append(Point(noted - kept, 0, elements))
    halves.append(Point(-noted, 0, elements))
    handed_on = sum(leaf.bytes for leaf in layers[-1].outputs if leaf.needs_gradient)
    return Footprint(
        sum(size for size, _ in inputs),
        kept,
        forward_peak,
        tuple(back),
        noted,
        tuple(halves),
        0 if last else handed_on,
        sum(size for size, needs in inputs if needs),
        0 if last else handed_on,
    )


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


class Transport(NamedTuple):
    """Extra memory that a communication backend needs besides the tensors themselves."""

    holds_sends: bool
    """True if a sent tensor is freed only after 2 x pp others have been sent (gloo reports completion late)."""
    sums_in_copies: bool
    """True if a reduce-scatter needs a copy of its whole input (gloo has no buffers of its own)."""


GLOO, NCCL = Transport(True, True), Transport(False, False)


class Moment(NamedTuple):
    """Bytes held in addition to those at rest while one action runs."""

    activations: int
    messages: int
    temporaries: int
    at: str

    @property
    def total(self) -> int:
        """Bytes of all three categories."""
        return self.activations + self.messages + self.temporaries


def rank_memory(
    config: RunConfig,
    schedule: Schedule,
    pp_rank: int,
    footprints: Mapping[int, Footprint],
    elements: Mapping[int, Elements],
    transport: Transport,
) -> RankMemory:
    """Return the peak memory of one pipeline rank.

    Args:
        footprints: of the stages of this rank.
        elements: this rank's parameters of those stages.
    """
    stages = schedule.stages_of(pp_rank)
    held = [held_at_rest(config, elements[stage]) for stage in stages]
    weights, gradients, optimizer, host = (sum(column) for column in zip(*held, strict=True))
    highest = walk(schedule, pp_rank, footprints, _Sums(config, transport), transport)
    if config.optimizer.name == "adamw8bit":
        optimizer += table_bytes(config.train.dtype == "float64")
    return RankMemory(weights, gradients, optimizer, *highest[:3], host, highest.at)


class _Sums(NamedTuple):
    """Temporary memory of gradient reduction over replicas and of weight all-gathers."""

    config: RunConfig
    transport: Transport

    @property
    def narrow(self) -> int:
        """Bytes per element of the compute dtype."""
        return {"bfloat16": 2, "float32": 4, "float64": 8}[self.config.train.dtype]

    @property
    def wide(self) -> int:
        """Bytes per element of a gradient that is reduced."""
        return max(4, self.narrow)

    def at(self, point: Point, whole: int, *, reduces: bool, at_once: bool = False) -> int:
        """Return the temporary bytes while one layer's backward runs.

        ``whole``: elements of the stage. ``at_once``: the first gradient exists before the first layer's peak.
        """
        parallel = self.config.parallel
        if shard_factor(self.config) == 1:
            return 0
        if parallel.zero == 3:  # what came, and what is computed with; then the gradient and what is summed
            return 2 * self.narrow * point.elements
        if not reduces:
            return 0
        there, bucket = point.elements_before * self.wide, bucket_bytes(self.config)
        copies = 1 if self.transport.sums_in_copies else 0
        if parallel.zero == 2 and reduces_each_microbatch(
            self.config
        ):  # a bucket is there, whole, from its first gradient on
            opened = min(whole * self.wide, 2 * bucket) if there or at_once else 0
            complete = there >= bucket or point.elements == 0
            return opened + (min(whole * self.wide, bucket) * copies if complete else 0)
        return (there if point.elements == 0 else there // bucket * bucket) * copies

    def after(self, elements: int) -> int:
        """Return the temporary bytes between the last backward and REDUCE, for ``elements`` gradients."""
        if shard_factor(self.config) == 1 or self.config.parallel.zero == 3:
            return 0
        if self.config.parallel.zero == 2 and reduces_each_microbatch(self.config):
            return 0
        return elements * self.wide if self.transport.sums_in_copies else 0


def walk(
    schedule: Schedule, pp_rank: int, footprints: Mapping[int, Footprint], sums: _Sums, transport: Transport
) -> Moment:
    """Walk along a row and return its moment of peak memory; approximate for a schedule that is not lowered."""
    last = schedule.last_backwards(pp_rank)
    each = reduces_each_microbatch(sums.config)
    sends: deque[tuple[int, Action]] = deque()
    gone: set[Action] = set()
    """Forwards whose backward is done while their output is still being sent."""
    activations = messages = under_way = 0
    highest = Moment(0, 0, 0, "rest")
    for item in _row(schedule, pp_rank, last):
        group = actions_of(item)
        if group[0].kind in COMPUTE:
            (action,) = group
            stage = action.stage or 0
            of = footprints[stage]
            if action.kind is Kind.F:
                largest = Point(0, max(point.elements for point in of.backward), 0)
                peak = of.forward_peak + sums.at(largest, 0, reduces=False)
            else:
                reduces = action in last or (each and action.kind is not Kind.I)
                second, whole = action.kind is Kind.W, of.backward[-1].elements_before
                points = of.weight_half if second else of.backward
                peak = max(p.bytes + sums.at(p, whole, reduces=reduces, at_once=second) for p in points)
            moment = Moment(activations, messages, under_way + peak, str(action))
            if moment.total > highest.total:
                highest = moment
            if action in last:
                under_way += sums.after(of.backward[-1].elements_before)
            activations, messages = _after(schedule, action, of, activations, messages)
            if action.kind in (Kind.B, Kind.I) and any(send == _sent(action) for _, send in sends):
                gone.add(_sent(action))
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
                under_way -= sums.after(of.backward[-1].elements_before)
        while sends and (not transport.holds_sends or len(sends) > 2 * schedule.pp):
            size, action = sends.popleft()
            if action.kind is Kind.SEND_B or action in gone:
                messages -= size
            gone.discard(action)
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
        return activations - of.noted, messages
    activations -= of.kept
    if schedule.receive_for(action._replace(kind=Kind.F)) is not None:
        activations -= of.inputs
    if action.kind is Kind.I:
        activations += of.noted
    return activations, messages - of.output_gradients + of.input_gradients
