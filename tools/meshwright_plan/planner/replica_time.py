"""Exposed seconds of gradient reduction and of weight all-gathers, over the replicas of a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.config import (
    RunConfig,
    batch_numbers,
    bucket_bytes,
    expert_shard_factor,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.parameters import DTYPES
from meshwright.schedule.action import Kind
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.links import GroupLink
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.stage_time import StageTime, stages_by_rank


def replicas_s(
    layout: LayoutModel, performance: PerformanceModel, stages: Sequence[StageTime]
) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers,
    on the slowest rank.
    """
    if layout.grid.num_replicas == 1:  # ep is then 1 or tp: no expert has replicas either
        return 0.0, 0.0
    by_rank = stages_by_rank(layout.schedule)
    fullest = max(by_rank, key=lambda own: sum(layout.elements[stage].trained for stage in own))
    candidates = [
        _replica_s(layout, performance, stages, own) for own in (by_rank[0], by_rank[-1], fullest)
    ]
    return max(candidates, key=sum)


def _replica_s(
    layout: LayoutModel,
    performance: PerformanceModel,
    stages: Sequence[StageTime],
    own: Sequence[int],
) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers,
    on a rank with the stages ``own``.
    """
    config, grid, traits = layout.config, layout.grid, performance.traits
    elements = sum(layout.elements[stage].dense for stage in own)
    dense = _Collectives(
        performance, config, elements, grid.num_replicas, shard_factor(config.parallel), grid.tp
    )
    experts = _experts(layout, performance, own)

    def exposed_s(seconds: float, compute_s: float, overlaps: bool) -> float:
        hidden = performance.fractions.hidden
        return (
            max(seconds - hidden * compute_s, (1 - hidden) * min(seconds, compute_s))
            if overlaps
            else seconds
        )

    forward_s = sum(stages[stage].forward for stage in own)
    backward_s = sum(stages[stage].backward + stages[stage].weight_half for stage in own)
    chunks = batch_numbers(config.batch).chunks
    if config.parallel.zero == 3:
        units = [unit for stage in own for unit in _units_of(layout, stage)]
        layers = len(units)
        with_experts = sum(
            layout.layers[at].num_experts > 0 for stage in own for at in layout.stages[stage]
        )
        gathers_experts = layout.gathers_experts(own)
        frozen = sum(layout.elements[stage].frozen for stage in own)
        copy_s, add_s = _host_shards_s(
            layout, performance, elements / dense.shards, frozen / dense.shards
        )
        sums = dense.reduce_scatter_s(layers) + (
            dense.all_reduce_s(layers) if dense.replicas > dense.shards else 0.0
        )
        sums += experts.sums_s(with_experts if gathers_experts else None)
        of_experts = (
            experts.all_gather_s(with_experts) if gathers_experts and experts.elements else 0.0
        )
        in_forward = max(
            dense._replace(elements=elements + frozen).all_gather_s(layers) + of_experts, copy_s
        )
        gathered = sum(unit.weights for unit in units)
        again = sum(unit.weights * unit.gathers_in_backward for unit in units) / max(1, gathered)
        first = sum(unit.weights * unit.gathers_in_forward for unit in units) / max(1, gathered)
        in_backward = in_forward * again + sums
        in_forward *= first
        reduce = chunks * (exposed_s(in_backward, backward_s, traits.overlaps_reduce) + add_s)
        once = (
            0.0
            if gathers_experts
            else exposed_s(experts.gathers_s(), forward_s, traits.overlaps_gather)
        )
        return reduce, chunks * exposed_s(in_forward, forward_s, traits.overlaps_gather) + once
    sums = dense.sums_s() + experts.sums_s()
    each, beside = reduces_each_microbatch(config.parallel), _passes_beside(layout, len(own))
    reduce = (chunks if each else 1) * exposed_s(
        sums, backward_s * (1 if each else beside), traits.overlaps_reduce
    )
    gathers = dense.gathers_s() + experts.gathers_s()
    return reduce, exposed_s(gathers, forward_s * beside, traits.overlaps_gather)


class _Unit(NamedTuple):
    """Unit of layers that ZeRO-3 gathers in one message."""

    weights: int
    """Elements that are gathered, without experts that ranks share."""
    gathers_in_forward: float = 1.0
    """Share of the forwards that gather them; less than 1 if they stay until a backward."""
    gathers_in_backward: float = 1.0


def _units_of(layout: LayoutModel, stage: int) -> list[_Unit]:
    """Return the units of a stage."""
    path = layout.footprints[stage].backward
    sizes = [point.gathered for point in reversed(path[:-1])]
    forwards, backwards = _gathers_of_kept(layout, stage)
    found, start = [], 0
    for length, is_kept in layout.footprints[stage].units or [(1, False)] * len(sizes):
        weights = sum(sizes[start : start + length])
        found.append(_Unit(weights, forwards, backwards) if is_kept else _Unit(weights))
        start += length
    return found


def _gathers_of_kept(layout: LayoutModel, stage: int) -> tuple[float, float]:
    """Return the shares of a stage's forwards and backwards that gather the weights which stay
    until a backward: those that follow a backward.

    Without actions, in an estimate: each forward, as where forwards and backwards alternate.
    """
    if not layout.schedule.rows[0]:
        return 1.0, 0.0
    gathers = {Kind.F: 0, Kind.B: 0}
    is_gathered, chunks = False, 0
    for _, action in layout.schedule.actions(layout.schedule.rank_of(stage)):
        if action.stage != stage or action.kind not in (Kind.F, Kind.B, Kind.I):
            continue
        kind = Kind.F if action.kind is Kind.F else Kind.B
        chunks += kind is Kind.F
        gathers[kind] += not is_gathered
        is_gathered = kind is Kind.F
    return gathers[Kind.F] / max(1, chunks), gathers[Kind.B] / max(1, chunks)


class _Collectives(NamedTuple):
    """Collectives over the replicas of some parameters of a rank."""

    performance: PerformanceModel
    config: RunConfig
    elements: int
    replicas: int
    shards: int
    stride: int
    """Distance of neighbouring replicas in ranks."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.config.train.dtype].itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that is reduced."""
        wide = self.performance.traits.wide_gradient_bytes
        return wide if self.weight_bytes == 2 else max(wide, self.weight_bytes)

    @property
    def near(self) -> GroupLink:
        """Link of the ranks that shard among themselves."""
        return self.performance.group_link(self.shards, self.stride)

    def reduce_scatter_s(self, calls: int) -> float:
        """Return the seconds of the reduce-scatters of all gradients, in ``calls`` messages."""
        ring = (self.shards - 1) / self.shards
        return self.near.seconds(
            self.elements * self.gradient_bytes * ring, calls, "reduce_scatter"
        )

    def all_reduce_s(self, calls: int) -> float:
        """Return the seconds of the all-reduces of this rank's shards."""
        groups = self.replicas // self.shards
        far = self.performance.group_link(groups, self.stride * self.shards)
        across = 2 * (groups - 1) / groups
        return far.seconds(
            self.elements * self.gradient_bytes / self.shards * across, calls, "all_reduce"
        )

    def all_gather_s(self, calls: int) -> float:
        """Return the seconds of the all-gathers of all weights."""
        ring = (self.shards - 1) / self.shards
        return self.near.seconds(self.elements * self.weight_bytes * ring, calls, "all_gather")

    @property
    def _calls(self) -> int:
        return max(
            1,
            math.ceil(
                self.elements
                * self.gradient_bytes
                / bucket_bytes(self.config.parallel, self.config.train)
            ),
        )

    def sums_s(self, calls: int | None = None) -> float:
        """Return the seconds of the sums of all gradients, in ``calls`` messages; None:
        in buckets.
        """
        number = self._calls if calls is None else calls
        return self.reduce_scatter_s(number) + self.all_reduce_s(number) if self.elements else 0.0

    def gathers_s(self) -> float:
        """Return the seconds of the all-gathers of updated weights, in buckets."""
        return self.all_gather_s(self._calls) if self.shards > 1 and self.elements else 0.0


def _experts(
    layout: LayoutModel, performance: PerformanceModel, own: Sequence[int]
) -> _Collectives:
    """Return the collectives of the experts that ranks share,
    over the ranks with the same experts.
    """
    elements = sum(layout.elements[stage].of_experts.trained for stage in own)
    grid, config = layout.grid, layout.config
    replicas = grid.num_replicas * grid.tp // grid.ep
    return _Collectives(
        performance, config, elements, replicas, expert_shard_factor(config.parallel), grid.ep
    )


def _passes_beside(layout: LayoutModel, num_stages: int) -> float:
    """Return the passes of a rank's stages that overlap its gradient reduction,
    or its weight all-gather.

    It is one, of the last micro-batch. In an interleaved schedule up to pp micro-batches follow on
    its other stages.
    """
    if layout.schedule.name != "interleaved_1f1b":
        return 1.0
    more = min(layout.schedule.pp, layout.schedule.chunks) - 1
    return 1.0 + more * (num_stages - 1) / num_stages


def _host_shards_s(
    layout: LayoutModel, performance: PerformanceModel, shard: float, frozen: float
) -> tuple[float, float]:
    """Return the seconds of one copy of float32 shards over the host link,
    and of a sum of gradients on the host.

    ZeRO-3 with offload copies each shard (``shard`` elements) to the device for forward, again for
    backward, and its gradient back: in each micro-batch. The link carries both directions at once.
    The host then adds the gradients.
    ``frozen``: elements of this rank's shards that are not trained, in the dtype of the weights.
    """
    hardware = performance.hardware
    if not layout.config.parallel.offload or hardware.kind == "cpu":
        return 0.0, 0.0
    copied = shard * 4.0 + frozen * DTYPES[layout.config.train.dtype].itemsize
    copy_s = copied / hardware.host_link.bytes_per_s
    return copy_s, shard * 12.0 * hardware.devices_per_node / hardware.host_memory_bytes_per_s
