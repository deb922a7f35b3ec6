"""Enumeration of every layout that the rules allow on a cluster; for other layouts,
the rule that they break.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

from meshwright.config import Pipeline, batch_numbers, phases
from meshwright.errors import UserError
from meshwright.placement.patterns import matching
from meshwright.tensor_parallel.check import check_sequence_length
from meshwright_plan.planner import experts
from meshwright_plan.planner.choice import EVERY_SECOND, Choice, Pins, Rejection, with_choice
from meshwright_plan.planner.context import degrees_to_try
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.requirements import (
    buffers_refusal,
    changed_buffers,
    check_requirements,
    combination_refusal,
    has_synchronised,
)

SCHEDULES = (
    ("1f1b", 1),
    *(("interleaved_1f1b", each) for each in (2, 3, 4, 5, 6, 8, 10, 12)),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("v_half", 2),
    ("v_min", 2),
    (experts.PAIRED, 2),
)
"""(schedule, stages per rank) to try. GPipe is never better than 1f1b; F/B pairs (DualPipe)
hide only ep messages.
"""
MICRO_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_CHUNKS = 1024
GATHERS = ((1, False), (4, False), (1, True), (4, True))
"""Layers of a unit of ZeRO-3, and whether weights stay gathered from forward to backward."""


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def choices(
    cache: ModelCache, hardware: Hardware, nodes: int, *, offload: bool = False
) -> Iterator[Choice | Rejection]:
    """Yield all layouts and rejections, grouped by :attr:`Choice.shape`. ``offload``:
    all with optimizer offload.
    """
    per_node, pins = hardware.devices_per_node, cache.pins
    size = nodes * per_node
    pinned_cp = pins.get("cp")
    only_cp = pinned_cp if isinstance(pinned_cp, int) else None
    if (recompute := pins.get("recompute", "none")) not in (offered := _recomputes(cache)):
        rule = f"recompute {recompute} does not suit this model and train.compile"
        yield Rejection(f"{rule}: {', '.join(offered)} do", f"recompute {recompute}", 1)
        return
    for tp in divisors(size):
        if tp != pins.get("tp", tp):
            continue
        if per_node % tp:
            if tp <= 2 * per_node:
                rule = f"tp across nodes: tp {tp} does not divide the {per_node} devices of a node"
                yield Rejection(rule, f"tp {tp}", 1)
            continue
        for cp in degrees_to_try(cache.config.data, cache.traits, divisors(size // tp), only_cp):
            sequence, refusal = _sequence(cache, tp, cp)
            if refusal:
                yield Rejection(refusal, f"tp {tp}" if cp == 1 else f"cp {cp} x tp {tp}", 1)
                continue
            stages_and_replicas = size // tp // cp
            contexts = cache.context.contexts(cp, tp, pins.get("order"))
            for pp, context in itertools.product(divisors(stages_and_replicas), contexts):
                layout = partial(
                    Choice,
                    pp=pp,
                    dp=stages_and_replicas // pp,
                    cp=cp,
                    tp=tp,
                    sequence=sequence,
                    offload=offload,
                    **context,
                )
                yield from _of_grid(cache, hardware, layout)


def _of_grid(
    cache: ModelCache, hardware: Hardware, layout: partial[Choice]
) -> Iterator[Choice | Rejection]:
    """Yield the layouts and rejections of one grid, whose degrees but ep ``layout`` sets."""
    pp, dp, tp = (layout.keywords[axis] for axis in ("pp", "dp", "tp"))
    pins, global_batch = cache.pins, batch_numbers(cache.config.batch).global_batch
    if pp != pins.get("pp", pp) or dp != pins.get("dp", dp):
        return
    if pp > len(cache.names):
        rule = f"pp {pp} stages, but {len(cache.names)} layers"
        yield Rejection(rule, f"pp {pp} x tp {tp}", 1)
        return
    unit = math.gcd(*(phase.global_batch for phase in phases(cache.config.batch)))
    if unit % dp:
        nearest = max(divisor for divisor in divisors(unit) if divisor <= dp)
        ramp = "" if unit == global_batch else ", with its ramp,"
        rule = f"global batch {global_batch}{ramp} is not a multiple of dp {dp}"
        rule += f" (nearest smaller divisor: {nearest})"
        yield Rejection(rule, f"pp {pp} x dp {dp} x tp {tp}", 1)
        return

    def is_offered(choice: Choice | Rejection) -> bool:
        if isinstance(choice, Rejection):
            return True
        return unit % (dp * choice.micro_batch_size) == 0 and choice.has(pins)

    stages_in_node = max(1, hardware.devices_per_node // tp)
    without_experts = list(_of_degrees(cache, layout, global_batch // dp, stages_in_node))
    with_experts = _with_experts(cache, without_experts, hardware.devices_per_node)
    yield from _without_changed_buffers(cache, list(filter(is_offered, with_experts)))


def _recomputes(cache: ModelCache) -> list[str]:
    """Return the kinds of recompute that suit the model. "half" is of all layers alone."""
    parts = ["pointwise", *(["selective"] if cache.model.selective_recompute else [])]
    if cache.config.train.compile is True:
        parts = []
    has_seconds = bool(matching([EVERY_SECOND], cache.names))
    has_half = has_seconds and cache.config.pipeline.recompute_layers == ["*"]
    return ["none", *parts, *(["half"] if has_half else []), "full"]


def _schedules(cache: ModelCache) -> Sequence[tuple[str, int]]:
    """Return (schedule, stages per rank) to try with several stages: those of the pins, too."""
    name, interleave = (cache.pins.get(each) for each in ("schedule", "interleave"))
    if not isinstance(name, str):
        return SCHEDULES
    if isinstance(interleave, int):
        return [(name, interleave)]
    known = [each for each in SCHEDULES if each[0] == name]
    return known or [(name, Pipeline(schedule=name).stages_per_rank)]


def _zero_stages(pins: Pins) -> Sequence[int]:
    """Return the ZeRO stages to try with several replicas."""
    zero = pins.get("zero")
    return (zero,) if isinstance(zero, int) else (1, 2, 3)


def _shard_factors(pins: Pins, zero: int, replicas: int, in_node: int) -> list[int]:
    """Return the numbers of replicas that share a sharded state."""
    pinned = pins.get("shard_factor")
    if not zero:
        return [1]
    if isinstance(pinned, int):
        return [pinned] if replicas % pinned == 0 else []
    return [replicas, *([in_node] if 1 < in_node < replicas and replicas % in_node == 0 else [])]


def _gathers(pins: Pins, zero: int) -> Sequence[tuple[int, bool]]:
    """Return what :data:`GATHERS` has, for a ZeRO stage."""
    if zero < 3:
        return GATHERS[:1]
    units = pins.get("unit_layers")
    if not isinstance(units, int):
        return GATHERS
    return [(units, False), (units, True)]


def _sequences(pins: Pins) -> Sequence[bool]:
    """Return whether to try sequence parallelism, the better first."""
    pinned = pins.get("sequence")
    return (True, False) if pinned is None else (bool(pinned),)


def _sequence(cache: ModelCache, tp: int, cp: int) -> tuple[bool, str]:
    """Return (True if sequence parallelism is possible,
    reason why these degrees are impossible or "").
    """
    refusal = ""
    for sequence in _sequences(cache.pins) if tp > 1 else (False,):
        try:
            alone = {"tp": tp, "cp": cp, "sequence": sequence}
            check_requirements(cache, cache.config.replace(parallel=alone))
            if sequence:
                check_sequence_length(cache.config.data.sequence_length, tp)
            cache.split(tp, sequence, cp)
        except UserError as error:
            refusal = error.message.splitlines()[0]
        else:
            return sequence, ""
    return False, refusal


def _without_changed_buffers(
    cache: ModelCache, offered: list[Choice | Rejection]
) -> Iterator[Choice | Rejection]:
    """Yield what is offered; a layout that would change running buffers becomes a rejection,
    after the others.
    """
    has_state = bool(changed_buffers(cache)) or has_synchronised(cache.model)
    refused = []
    for each in offered:
        refusal = ""
        if has_state and isinstance(each, Choice):
            refusal = buffers_refusal(cache, with_choice(cache.config, each))
        if refusal:
            refused.append(Rejection(refusal, str(each), 1))
        else:
            yield each
    yield from refused


def _with_experts(
    cache: ModelCache, alone: list[Choice | Rejection], devices_per_node: int
) -> Iterator[Choice | Rejection]:
    """Yield choices of equal degrees, which have ep = 1, with each ep that the search tries;
    then their rejections.
    """
    first = next((each for each in alone if isinstance(each, Choice)), None)
    if first is None:
        yield from alone
        return
    pinned = cache.pins.get("ep")
    only = pinned if isinstance(pinned, int) else None
    across_nodes = cache.config.parallel.ep_across_nodes
    for ep in experts.degrees_to_try(
        cache.traits, only, first.tp, devices_per_node, across_nodes=across_nodes
    ):
        refusal = combination_refusal(cache.traits, first._replace(ep=ep).layout)
        if not refusal:
            yield from (
                c._replace(ep=ep)
                for c in alone
                if isinstance(c, Choice) and experts.suits(c.schedule, ep)
            )
        elif only is not None or ep == 1:
            yield Rejection(refusal, f"dp {first.dp} x tp {first.tp}", 1)
    yield from (each for each in alone if isinstance(each, Rejection))


def _micro_batch_sizes(pins: Pins, dp: int) -> Sequence[int]:
    """Return the micro-batch sizes to try: one where a number of samples is part of the model."""
    if "samples_together" in pins:
        return (int(pins["samples_together"]) // dp,)
    return (int(pins["micro_batch_size"]),) if "micro_batch_size" in pins else MICRO_BATCH_SIZES


def _of_degrees(
    cache: ModelCache, layout: partial[Choice], per_replica: int, in_node: int
) -> Iterator[Choice | Rejection]:
    """Yield choices of batch, schedule, ZeRO stage and recompute for the degrees
    that ``layout`` sets.

    Args:
        per_replica: samples of a step per replica.
        in_node: replicas of one pipeline stage in a node.
    """
    pp, dp, cp = (layout.keywords[axis] for axis in ("pp", "dp", "cp"))
    replicas, num_layers, recomputes = dp * cp, len(cache.names), _recomputes(cache)
    schedules = _schedules(cache)
    wants_gathers = "zero" in cache.pins and not cache.pins.keys().isdisjoint(
        ("schedule", "interleave")
    )
    together = int(cache.pins.get("samples_together", 0))
    if together % dp:
        rule = f"dp does not divide the {together} samples whose statistics nn.SyncBatchNorm takes"
        yield Rejection(rule, f"dp {dp}", 1)
        return
    for size in _micro_batch_sizes(cache.pins, dp):
        if per_replica % size:
            continue
        chunks = per_replica // size
        if chunks > MAX_CHUNKS:
            rule = f"{chunks} micro-batches in a step (the search stops at {MAX_CHUNKS})"
            yield Rejection(rule, f"dp {dp}", 1)
            continue
        for schedule, interleave in schedules if pp > 1 else SCHEDULES[:1]:
            if pp * interleave > num_layers:
                rule = f"{pp} x {interleave} stages, but {num_layers} layers"
                yield Rejection(rule, f"pp {pp}, {schedule}", 1)
                continue
            for zero in _zero_stages(cache.pins) if replicas > 1 else (0,):
                if zero == 3 and pp > 1 and chunks > 1 and interleave > 2 and not wants_gathers:
                    continue  # each micro-batch would gather the weights of each stage
                factors = _shard_factors(cache.pins, zero, replicas, in_node)
                gathers = _gathers(cache.pins, zero)
                for factor, of_units, recompute in itertools.product(factors, gathers, recomputes):
                    unit_layers, keeps_gathered = of_units
                    if schedule == experts.PAIRED and unit_layers > 1:
                        continue  # refused: MW-CONFIG-106
                    yield layout(
                        schedule=schedule,
                        interleave=interleave,
                        micro_batch_size=size,
                        chunks=chunks,
                        zero=zero,
                        shard_factor=factor,
                        recompute=recompute,
                        unit_layers=unit_layers,
                        keeps_gathered=keeps_gathered,
                    )
