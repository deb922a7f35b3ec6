"""Enumeration of every layout that the rules allow on a cluster; for other layouts, the rule that they break."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple, TypeAlias

from meshwright.config import RunConfig, batch_numbers, phases, shard_factor
from meshwright.errors import UserError
from meshwright.tensor_parallel.check import check_sequence_length
from meshwright.tools.planner import experts
from meshwright.tools.planner.context import EXCHANGE, ORDER, context_keys, context_words, degrees_to_try
from meshwright.tools.planner.hardware import Hardware
from meshwright.tools.planner.model_cache import ModelCache

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
EFFORTS = ("none", "pointwise", "selective", "half", "full")
"""Values of ``pipeline.recompute``, the cheapest first; "half" is "full" for every second layer."""
EVERY_SECOND = "*[02468]"
"""Pattern of every second layer's name, by its last digit."""
MAX_CHUNKS = 1024


Degrees: TypeAlias = tuple[int, int, int, int, int]
"""Degrees of pp, dp, cp, tp and ep."""
Shape: TypeAlias = tuple[Degrees, str, int, int, str]
"""(degrees, schedule, stages per rank, samples per micro-batch, exchange of context parallelism)."""


class Choice(NamedTuple):
    """Layout of a search: degrees, schedule, batch, sharding and recompute."""

    pp: int
    dp: int
    tp: int
    schedule: str
    interleave: int
    micro_batch_size: int
    chunks: int
    zero: int
    shard_factor: int
    sequence: bool
    recompute: str
    offload: bool
    cp: int = 1
    ep: int = 1
    exchange: str = EXCHANGE
    order: str = ORDER

    @property
    def shape(self) -> Shape:
        """Fields shared by layouts that differ only in sharding and recompute."""
        return self.degrees, self.schedule, self.interleave, self.micro_batch_size, self.exchange

    @property
    def degrees(self) -> Degrees:
        """Degrees of pp, dp, cp, tp and ep."""
        return self.pp, self.dp, self.cp, self.tp, self.ep

    @property
    def num_replicas(self) -> int:
        """Number of replicas, dp x cp."""
        return self.dp * self.cp

    @property
    def effort(self) -> int:
        """Amount of recompute, from 0 for none."""
        return EFFORTS.index(self.recompute)

    def has(self, pins: Mapping[str, int | str]) -> bool:
        """Return True if the layout has the pinned values, field -> value."""
        return all(getattr(self, name) == value for name, value in pins.items())

    def __str__(self) -> str:
        pipeline = f", {self.schedule}" if self.pp > 1 else ""
        pipeline += f" x{self.interleave}" if self.schedule == "interleaved_1f1b" else ""
        sharded = f" in groups of {self.shard_factor}" if self.zero and self.shard_factor < self.num_replicas else ""
        words = context_words(self.exchange, self.order)
        context = f" x cp {self.cp}" + (f" ({words})" if words else "") if self.cp > 1 else ""
        shared = f", ep {self.ep}" if self.ep > 1 else ""
        return (
            f"pp {self.pp} x dp {self.dp}{context} x tp {self.tp}{shared}{pipeline}, "
            f"{self.micro_batch_size} x {self.chunks}, ZeRO-{self.zero}{sharded}"
            + (", sequence" if self.sequence else "")
            + (f", recompute {self.recompute}" if self.recompute != "none" else "")
            + (", offload" if self.offload else "")
        )


class Rejection(NamedTuple):
    """Layouts that cannot be run or do not fit, for one reason."""

    rule: str
    """Broken rule, with the number that breaks it."""
    example: str
    times: int


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def with_choice(base: RunConfig, choice: Choice) -> RunConfig:
    """Return the resolved configuration of a choice; everything else is that of ``base``."""
    parallel = {
        "pp": choice.pp,
        "dp": choice.dp,
        "cp": choice.cp,
        "tp": choice.tp,
        "ep": choice.ep,
        "ep_across_nodes": base.parallel.ep_across_nodes and choice.ep > 1,
        "zero": choice.zero,
        "shard_factor": choice.shard_factor if choice.zero and choice.shard_factor < choice.num_replicas else None,
        "sequence": choice.sequence,
        "offload": choice.offload,
        "offload_directory": base.parallel.offload_directory if choice.offload else None,
        "reduce": None,
        "tp_across_nodes": False,
        **context_keys(base, choice.cp, choice.exchange, choice.order),
    }
    layers = ["*"] if choice.recompute == "none" else base.pipeline.recompute_layers
    pipeline = {
        "schedule": choice.schedule,
        "schedule_file": None,
        "interleave": choice.interleave if choice.schedule == "interleaved_1f1b" or ":" in choice.schedule else None,
        "recompute": "full" if choice.recompute == "half" else choice.recompute,
        "recompute_layers": [EVERY_SECOND] if choice.recompute == "half" else layers,
        "balance": base.pipeline.balance if isinstance(base.pipeline.balance, str) else "time",
    }
    batch = {"micro_batch_size": choice.micro_batch_size, "chunks": choice.chunks}
    batch["global_batch"] = choice.micro_batch_size * choice.chunks * choice.dp
    launch = {"processes": choice.pp * choice.num_replicas * choice.tp}
    return base.replace(parallel=parallel, pipeline=pipeline, batch=batch, launch=launch)


def choice_of(config: RunConfig) -> Choice:
    """Return the layout of a resolved configuration."""
    parallel, pipeline, batch = config.parallel, config.pipeline, batch_numbers(config)
    return Choice(
        *parallel.degrees[:3],
        pipeline.schedule,
        pipeline.stages_per_rank,
        batch.micro_batch_size,
        batch.chunks,
        parallel.zero,
        shard_factor(config),
        parallel.sequence,
        "half" if pipeline.recompute == "full" and pipeline.recompute_layers == [EVERY_SECOND] else pipeline.recompute,
        parallel.offload,
        parallel.cp,
        parallel.ep,
        parallel.cp_exchange,
        parallel.cp_order,
    )


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
                    alone = list(_of_degrees(of_degrees, global_batch // dp, num_layers, recomputes, in_node))
                    for each in _with_experts(cache, alone, hardware.devices_per_node):
                        if isinstance(each, Rejection) or (unit % (dp * each.micro_batch_size) == 0 and each.has(pins)):
                            yield each


def _sequence(cache: ModelCache, tp: int, cp: int) -> tuple[bool, str]:
    """Return (True if sequence parallelism is possible, reason why these degrees are impossible or "")."""
    refusal = ""
    for sequence in (True, False) if tp > 1 else (False,):
        try:
            if sequence:
                check_sequence_length(cache.config.data.sequence_length, tp)
            cache.split(tp, sequence, cp)
        except UserError as error:
            refusal = refusal or error.message.splitlines()[0]
        else:
            return sequence, ""
    return False, refusal


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
    of_degrees: partial[Choice], per_replica: int, num_layers: int, recomputes: list[str], in_node: int
) -> Iterator[Choice | Rejection]:
    """Yield choices of batch, schedule, ZeRO stage and recompute for the degrees that ``of_degrees`` sets.

    Args:
        per_replica: samples of a step per replica.
        in_node: replicas of one pipeline stage in a node.
    """
    pp, dp, cp = (of_degrees.keywords[axis] for axis in ("pp", "dp", "cp"))
    replicas = dp * cp
    for size in MICRO_BATCH_SIZES:
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
