"""Exposed seconds of gradient reduction and of weight all-gathers, over the replicas of a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.blueprint import DTYPES, batch_numbers
from meshwright.config import bucket_bytes, reduces_each_microbatch, shard_factor
from meshwright.tools.planner.layout_model import LayoutModel
from meshwright.tools.planner.rates import PerformanceModel
from meshwright.tools.planner.stage_time import StageTime, stages_by_rank


def replicas_s(layout: LayoutModel, performance: PerformanceModel, stages: Sequence[StageTime]) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers, on the slowest rank."""
    if layout.grid.num_replicas == 1:
        return 0.0, 0.0
    by_rank = stages_by_rank(layout.schedule)
    fullest = max(by_rank, key=lambda own: sum(layout.elements[stage].trained for stage in own))
    candidates = [_replica_s(layout, performance, stages, own) for own in (by_rank[0], by_rank[-1], fullest)]
    return max(candidates, key=sum)


def _replica_s(
    layout: LayoutModel, performance: PerformanceModel, stages: Sequence[StageTime], own: Sequence[int]
) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers, on a rank with the stages ``own``."""
    config, tp, traits = layout.config, layout.grid.tp, performance.traits
    replicas = layout.grid.num_replicas
    shards = shard_factor(config)
    weight_bytes, gradient_bytes = DTYPES[config.train.dtype].itemsize, traits.wide_gradient_bytes
    if weight_bytes != 2:
        gradient_bytes = max(gradient_bytes, weight_bytes)
    near = performance.group_link(shards, tp)
    far = performance.group_link(replicas // shards, tp * shards)
    ring, across = (shards - 1) / shards, 2 * (replicas // shards - 1) / (replicas // shards)
    elements = sum(layout.elements[stage].trained for stage in own)

    def reduce_scatter_s(calls: int) -> float:
        return near.seconds(elements * gradient_bytes * ring, calls, "reduce_scatter")

    def all_reduce_s(calls: int) -> float:
        return far.seconds(elements * gradient_bytes / shards * across, calls, "all_reduce")

    def all_gather_s(calls: int) -> float:
        return near.seconds(elements * weight_bytes * ring, calls, "all_gather")

    def exposed_s(seconds: float, compute_s: float, overlaps: bool) -> float:
        hidden = performance.fractions.hidden
        return max(seconds - hidden * compute_s, (1 - hidden) * min(seconds, compute_s)) if overlaps else seconds

    forward_s = sum(stages[stage].forward for stage in own)
    backward_s = sum(stages[stage].backward + stages[stage].weight_half for stage in own)
    chunks = batch_numbers(config).chunks
    if config.parallel.zero == 3:
        layers = sum(len(layout.stages[stage]) for stage in own)
        copy_s, add_s = _host_shards_s(layout, performance, elements / shards)
        sums = reduce_scatter_s(layers) + (all_reduce_s(layers) if replicas > shards else 0.0)
        in_forward = max(all_gather_s(layers), copy_s)
        in_backward = in_forward + sums
        reduce = chunks * (exposed_s(in_backward, backward_s, traits.overlaps_reduce) + add_s)
        return reduce, chunks * exposed_s(in_forward, forward_s, traits.overlaps_gather)
    calls = max(1, math.ceil(elements * gradient_bytes / bucket_bytes(config)))
    sums = reduce_scatter_s(calls) + all_reduce_s(calls)
    each, beside = reduces_each_microbatch(config), _passes_beside(layout, len(own))
    reduce = (chunks if each else 1) * exposed_s(sums, backward_s * (1 if each else beside), traits.overlaps_reduce)
    gathers = all_gather_s(calls) if shards > 1 else 0.0
    return reduce, exposed_s(gathers, forward_s * beside, traits.overlaps_gather)


def _passes_beside(layout: LayoutModel, num_stages: int) -> float:
    """Return the passes of a rank's stages that run beside its gradient reduction, or beside its weight all-gather.

    One, of the last micro-batch; in an interleaved schedule, pp micro-batches follow in all other stages of the rank.
    """
    if layout.schedule.name != "interleaved_1f1b":
        return 1.0
    more = min(layout.schedule.pp, layout.schedule.chunks) - 1
    return 1.0 + more * (num_stages - 1) / num_stages


def _host_shards_s(layout: LayoutModel, performance: PerformanceModel, shard: float) -> tuple[float, float]:
    """Return the seconds of one copy of float32 shards over the host link, and of a sum of gradients on the host.

    ZeRO-3 with offload copies each shard (``shard`` elements) to the device for forward, again for backward, and its
    gradient back: in each micro-batch. The link carries both directions at once. The host then adds the gradients.
    """
    hardware = performance.hardware
    if not layout.config.parallel.offload or hardware.kind == "cpu":
        return 0.0, 0.0
    copy_s = shard * 4.0 / hardware.host_link.bytes_per_s
    return copy_s, shard * 12.0 * hardware.devices_per_node / hardware.host_memory_bytes_per_s
