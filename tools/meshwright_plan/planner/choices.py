"""Enumeration of every layout that the rules allow on a cluster; for other layouts, the rule that they break."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

from meshwright.config import batch_numbers, phases
from meshwright.errors import UserError
from meshwright.tensor_parallel.check import check_sequence_length
from meshwright_plan.planner import experts
from meshwright_plan.planner.choice import EVERY_SECOND, Choice, Rejection, with_choice
from meshwright_plan.planner.context import degrees_to_try
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.requirements import buffers_refusal, changed_buffers, check_requirements

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
"""(schedule, stages per rank) to try. GPipe is never better than 1f1b; F/B pairs (DualPipe) hide only ep messages."""
MICRO_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_CHUNKS = 1024


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def choices(
    cache: ModelCache, hardware: Hardware, nodes: int, *, offload: bool = False
) -> Iterator[Choice | Rejection]:
    """Yield all layouts and rejections, grouped by :attr:`Choice.shape`. ``offload``: all with optimizer offload."""
    size, global_batch = nodes * hardware.devices_per_node, batch_numbers(cache.config).global_batch
    unit = math.gcd(*(phase.global_batch for phase in phases(cache.config.batch)))
    num_layers = len(cache.names)
    parts = ["pointwise", *(["selective"] if cache.model.selective_recompute else [])]
    half = ["half"] if any(fnmatchcase(name, EVERY_SECOND) for name in cache.names) else []
    recomputes = ["none", *([] if cache.config.train.compile is True else parts), *half, "full"]
    pins = cache.pins
    sizes = (int(pins["micro_batch_size"]),) if "micro_batch_size" in pins else MICRO_BATCH_SIZES
    for tp in divisors(size):
        if tp != pins.get("tp", tp):
            continue
        if tp > hardware.devices_per_node or hardware.devices_per_node % tp:
            if tp <= 2 * hardware.devices_per_node:
                rule = f"tp across nodes: tp {tp} does not divide the {hardware.devices_per_node} devices of a node"
                yield Rejection(rule, f"tp {tp}", 1)
            continue
        pinned = pins.get("cp")
        only = pinned if isinstance(pinned, int) else None
        tried = degrees_to_try(cache.config, cache.model, divisors(size // tp), only)
        for cp in tried:
            sequence, refusal = _sequence(cache, tp, cp)
            if refusal:
                yield Rejection(refusal, f"tp {tp}" if cp == 1 else f"cp {cp} x tp {tp}", 1)
                continue
            contexts = cache.context.contexts(cp, tp)
            for pp, context in itertools.product(divisors(size // tp // cp), contexts):
                dp = size // tp // cp // pp
                of_degrees = partial(Choice, pp=pp, dp=dp, cp=cp, tp=tp, sequence=sequence, offload=offload, **context)
                if pp != pins.get("pp", pp) or dp != pins.get("dp", dp):
                    continue
                if pp > num_layers:
                    yield Rejection(f"pp {pp} stages, but {num_layers} layers", f"pp {pp} x tp {tp}", 1)
                elif unit % dp:
                    near = [each for each in divisors(unit) if each <= dp]
                    ramp = "" if unit == global_batch else ", with its ramp,"
                    rule = f"global batch {global_batch}{ramp} is not a multiple of dp {dp}"
                    rule += f" (nearest smaller divisor: {near[-1]})"
                    yield Rejection(rule, f"pp {pp} x dp {dp} x tp {tp}", 1)
                else:
                    in_node = max(1, hardware.devices_per_node // tp)
                    alone = list(_of_degrees(of_degrees, global_batch // dp, num_layers, recomputes, in_node, sizes))
                    offered = [
                        each
                        for each in _with_experts(cache, alone, hardware.devices_per_node)
                        if isinstance(each, Rejection) or (unit % (dp * each.micro_batch_size) == 0 and each.has(pins))
                    ]
                    yield from _without_changed_buffers(cache, offered)


def _sequence(cache: ModelCache, tp: int, cp: int) -> tuple[bool, str]:
    """Return (True if sequence parallelism is possible, reason why these degrees are impossible or "")."""
    refusal = ""
    for sequence in (True, False) if tp > 1 else (False,):
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


def _without_changed_buffers(cache: ModelCache, offered: list[Choice | Rejection]) -> Iterator[Choice | Rejection]:
    """Yield what is offered; a layout that would change running buffers becomes a rejection, after the others."""
    changes_buffers, refused = bool(changed_buffers(cache)), []
    for each in offered:
        refusal = ""
        if changes_buffers and isinstance(each, Choice):
            refusal = buffers_refusal(cache, with_choice(cache.config, each))
        if refusal:
            refused.append(Rejection(refusal, str(each), 1))
        else:
            yield each
    yield from refused


def _with_experts(
    cache: ModelCache, alone: list[Choice | Rejection], devices_per_node: int
) -> Iterator[Choice | Rejection]:
    """Yield choices of equal degrees, which have ep = 1, with each ep that the search tries; then their rejections."""
    first = next((each for each in alone if isinstance(each, Choice)), None)
    if first is None:
        yield from alone
        return
    pinned, of_model = cache.pins.get("ep"), (cache.config, cache.expert_counts)
    only = pinned if isinstance(pinned, int) else None
    for ep in experts.degrees_to_try(*of_model, only, first.tp, devices_per_node):
        refusal = experts.refusal(*of_model, ep, first.tp, first.sequence, first.num_replicas * first.tp)
        if not refusal:
            yield from (c._replace(ep=ep) for c in alone if isinstance(c, Choice) and experts.suits(c.schedule, ep))
        elif only is not None:
            yield Rejection(refusal, f"dp {first.dp} x tp {first.tp}", 1)
    yield from (each for each in alone if isinstance(each, Rejection))


def _of_degrees(
    of_degrees: partial[Choice],
    per_replica: int,
    num_layers: int,
    recomputes: list[str],
    in_node: int,
    sizes: Sequence[int],
) -> Iterator[Choice | Rejection]:
    """Yield choices of batch, schedule, ZeRO stage and recompute for the degrees that ``of_degrees`` sets.

    Args:
        per_replica: samples of a step per replica.
        in_node: replicas of one pipeline stage in a node.
        sizes: samples of a micro-batch.
    """
    pp, dp, cp = (of_degrees.keywords[axis] for axis in ("pp", "dp", "cp"))
    replicas = dp * cp
    for size in sizes:
        if per_replica % size:
            continue
        chunks = per_replica // size
        if chunks > MAX_CHUNKS:
            yield Rejection(f"{chunks} micro-batches in a step (the search stops at {MAX_CHUNKS})", f"dp {dp}", 1)
            continue
        for schedule, interleave in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            if pp * interleave > num_layers:
                rule = f"{pp} x {interleave} stages, but {num_layers} layers"
                yield Rejection(rule, f"pp {pp}, {schedule}", 1)
                continue
            for zero in (1, 2, 3) if replicas > 1 else (0,):
                if zero == 3 and pp > 1 and chunks > 1 and interleave > 2:
                    continue
                factors = [replicas] if zero else [1]
                if zero and 1 < in_node < replicas and replicas % in_node == 0:
                    factors.append(in_node)
                for factor, recompute in itertools.product(factors, recomputes):
                    yield of_degrees(
                        schedule=schedule,
                        interleave=interleave,
                        micro_batch_size=size,
                        chunks=chunks,
                        zero=zero,
                        shard_factor=factor,
                        recompute=recompute,
                    )
