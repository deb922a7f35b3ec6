"""Temporary memory of gradient reduction over replicas, and of gathered weights.

ZeRO-1, ZeRO-2   gradients in buckets of the configured size, as they are completed in backward
ZeRO-3           weights of a layer and the next one, gradients of a layer (as FSDP)
gloo             a copy of what a reduce-scatter sends, until it is done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.config import (
    RunConfig,
    bucket_bytes,
    expert_shard_factor,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.parameters import DTYPES
from meshwright.schedule.action import Action, Kind
from meshwright_plan.planner.memory.footprint import BackwardPoint, Footprint
from meshwright_plan.planner.memory.units import StageUnits


class Backend(NamedTuple):
    """Extra memory of a communication backend, besides the tensors themselves."""

    copies_reduce_scatter: bool
    """True if a reduce-scatter needs a copy of its whole input (gloo has no buffers of its own)."""


GLOO, NCCL = Backend(True), Backend(False)


class ReductionBuffers(NamedTuple):
    """Temporary memory of gradient reduction over replicas and of weight all-gathers."""

    config: RunConfig
    backend: Backend
    gathers_experts: bool = False
    """ZeRO-3 shards the weights of experts that ranks share."""
    gradient_bytes: int = 4
    """Bytes per element of a gradient that is reduced; at least those of the compute dtype."""

    @property
    def is_sharded(self) -> bool:
        """True if replicas share optimizer states, gradients or weights."""
        return shard_factor(self.config.parallel) > 1

    @property
    def is_zero3(self) -> bool:
        """True if weights are sharded too."""
        return self.config.parallel.zero == 3

    @property
    def reduces_each(self) -> bool:
        """True if ZeRO-2 or -3 reduces the gradients of each micro-batch."""
        return self.config.parallel.zero >= 2 and reduces_each_microbatch(self.config.parallel)

    @property
    def sums_experts(self) -> bool:
        """True if gradients of experts are summed in buckets."""
        return expert_shard_factor(self.config.parallel) > 1 and not self.gathers_experts

    @property
    def itemsize(self) -> int:
        """Bytes per element of the compute dtype."""
        return DTYPES[self.config.train.dtype].itemsize

    @property
    def reduced_itemsize(self) -> int:
        """Bytes per element of a gradient that is reduced."""
        return max(self.gradient_bytes, self.itemsize)

    def peak(
        self, of: Footprint, action: Action, *, reduces: bool, held: int, was_gathered: bool = False
    ) -> int:
        """Return the peak bytes while an action runs, above those live before it,
        ``held`` and gathered weights included.

        Args:
            held: result of :meth:`held` for the stage's previous backward.
            was_gathered: the weights that stay between forward and backward are gathered already.
        """
        units = StageUnits(of.backward, of.units, was_gathered)
        if action.kind is Kind.F:
            return of.forward_peak + self.forward(of, units)
        in_halves, ends_in_loss = action.kind is Kind.W, of.outputs == 0
        points = of.weight_half if in_halves else of.backward
        peak = max(
            point.bytes
            + self.at(
                points,
                index,
                reduces=reduces,
                in_halves=in_halves,
                held=held,
                ends_in_loss=ends_in_loss,
                units=units,
            )
            for index, point in enumerate(points)
        )
        if reduces and self.is_sharded:
            for index, point in enumerate(points[:-1]):
                # FSDP reduces at the end of a weight half
                live = points[-1].bytes if in_halves else point.after
                in_reduction = self.at_reduction(
                    points, index, in_halves=in_halves, ends_in_loss=ends_in_loss, units=units
                )
                if self.is_zero3 and not in_halves:  # those before it, which backward needs next
                    in_reduction += self.itemsize * units.in_backward(index, with_own=False)
                peak = max(peak, live + in_reduction)
        return peak - (held if self.is_zero3 else 0)  # `at` has counted it

    def at(
        self,
        points: Sequence[BackwardPoint],
        index: int,
        *,
        reduces: bool,
        in_halves: bool = False,
        held: int = 0,
        ends_in_loss: bool = True,
        units: StageUnits | None = None,
    ) -> int:
        """Return the temporary bytes while one layer's backward runs,
        at ``index`` of the path of a stage's backward.

        Args:
            in_halves: this is the weight half (W), where the first gradient exists before the
                first layer's peak.
            held: result of :meth:`held` for the stage's previous backward.
            ends_in_loss: the path's first layer is followed by the loss.
            units: of ZeRO-3; None: of a layer each.
        """
        if not self.is_sharded:
            return 0
        point, whole, experts = points[index], points[-1], 0
        if reduces and point.experts + point.experts_before and self.sums_experts:
            is_end = index == len(points) - 1
            experts = self._in_buckets(
                point.experts_before, whole.experts_before, is_end, in_halves, False
            )
        if self.is_zero3:
            units = units or StageUnits(points)
            if in_halves:
                return experts + self._weight_half(points[index], held)
            return experts + self._fully_sharded(units, index, reduces, held)
        if not reduces:
            return 0
        # the loss has its peak before the head's gradient
        return experts + self._in_buckets(
            point.elements_before,
            whole.elements_before,
            point.elements == 0,
            in_halves,
            ends_in_loss,
        )

    def at_reduction(
        self,
        points: Sequence[BackwardPoint],
        index: int,
        *,
        in_halves: bool,
        ends_in_loss: bool,
        units: StageUnits | None = None,
    ) -> int:
        """Return the temporary bytes as the reduction of a layer's gradients starts,
        with the last of them alive.

        buckets   the gradient that completes one, unless it is in the bucket itself, and the complete buckets' copies
        ZeRO-3    all of the unit's, beside their reduce-scatter; in halves those of the layers that follow too
        """
        point, whole = points[index], points[-1]
        if self.is_zero3:
            reduced = (units or StageUnits(points)).reduced_at(index)
            if not reduced:
                return 0
            left = whole.elements_before - point.elements_before if in_halves else reduced
            # a reduce-scatter in progress: its input, the backend's copy of it, and its output
            tensors = (
                1 + self.backend.copies_reduce_scatter + 1 / shard_factor(self.config.parallel)
            )
            in_progress = int(self.reduced_itemsize * tensors * reduced)
            return self.itemsize * left + in_progress
        before = point.elements_before + point.elements
        per_bucket = bucket_bytes(self.config.parallel, self.config.train) // self.reduced_itemsize
        is_end = index == len(points) - 2
        completes_one = before // per_bucket != point.elements_before // per_bucket
        if not point.elements or not (completes_one or is_end):
            return 0
        is_one_of_several = point.largest < point.elements  # the last of them may be small
        is_in_bucket = self.itemsize == self.reduced_itemsize
        alive = 0 if is_one_of_several or is_in_bucket else self.itemsize * point.largest
        return alive + self._in_buckets(
            before, whole.elements_before, is_end, in_halves, ends_in_loss
        )

    def _in_buckets(
        self, before: int, whole: int, is_end: bool, in_halves: bool, waits: bool
    ) -> int:
        """Return the temporary bytes of buckets at one layer's turn in backward.

        Args:
            before: elements whose gradients exist. ``whole``: elements of the stage. ``is_end``: no
                layer is left.
            waits: True if no gradient of the layer exists yet at its peak.
        """
        gradient_bytes, bucket = (
            before * self.reduced_itemsize,
            bucket_bytes(self.config.parallel, self.config.train),
        )
        copies = 1 if self.backend.copies_reduce_scatter else 0
        if not self.reduces_each:
            in_copies = gradient_bytes if is_end else gradient_bytes // bucket * bucket
            return in_copies * copies
        # a whole bucket is allocated at its first gradient
        whole_bytes = whole * self.reduced_itemsize
        num_buckets = 2 if gradient_bytes or in_halves else 0 if waits else 1
        allocated = min(whole_bytes, num_buckets * bucket)
        if gradient_bytes < bucket and not is_end:
            return allocated
        reduced = min(whole_bytes, bucket) * (copies + 1 / shard_factor(self.config.parallel))
        return allocated + int(reduced)

    def _fully_sharded(self, units: StageUnits, index: int, reduces: bool, held: int) -> int:
        """Return the temporary bytes of ZeRO-3 at one layer's turn.

        gathered      weights of this layer's unit and of the one before it, which is prefetched, and those that stay;
                      this layer's experts
        late          gradients of the unit's later layers, which are reduced with this layer's
        in flight     input of the last reduce-scatter, until the next one is posted: of the unit after this one,
                      or ``held`` from the backward before
        """
        experts = units.points[index].experts if self.gathers_experts else 0
        after = units.after(index)
        in_flight = held
        if reduces and after is not None:
            in_flight = self.reduced_itemsize * after
        gathered = units.in_backward(index) + experts
        return self.itemsize * (gathered + units.late(index)) + in_flight

    def _weight_half(self, point: BackwardPoint, held: int) -> int:
        """Return the temporary bytes of ZeRO-3 in a weight half: no weights, but the full gradients
        of all layers so far, which are reduced at its end.
        """
        experts = point.experts + point.experts_before if self.gathers_experts else 0
        return self.itemsize * (point.elements_before + point.elements + experts) + held

    def held(self, of: Footprint, backward: Action) -> int:
        """Return the bytes that a stage's backward leaves in flight: under ZeRO-3 until its next
        one, under ZeRO-2 until a forward.

        FSDP keeps the input of the last reduce-scatter: that of the first layer, and after the
        weight half of the last. ZeRO-2 has its last bucket in flight, and gloo what it receives: on
        the first stage the embedding's. On others it is that of norms, which are too small to
        count.
        """
        if not self.is_sharded:
            return 0
        if self.is_zero3:
            units = StageUnits(of.backward, of.units)
            return self.reduced_itemsize * units.end(is_last=backward.kind is Kind.W)
        if not self.reduces_each or backward.stage != 0:
            return 0
        copies = 2 if self.backend.copies_reduce_scatter else 1
        return copies * self.reduced_itemsize * of.backward[-2].elements

    def kept(self, of: Footprint) -> int:
        """Return the bytes of the weights that stay gathered between forward and backward."""
        if not (self.is_sharded and self.is_zero3):
            return 0
        return self.itemsize * StageUnits(of.backward, of.units).kept

    def forward(self, of: Footprint, units: StageUnits | None = None) -> int:
        """Return the temporary bytes in a forward: gathered weights of ZeRO-3,
        of a unit and the prefetched next, and those that stay.
        """
        if not (self.is_sharded and self.is_zero3):
            return 0
        experts = of.forward_experts if self.gathers_experts else 0
        units = units or StageUnits(of.backward, of.units)
        dense = units.in_forward(of.forward_layer)
        return self.itemsize * (dense + experts)

    def after(self, end: BackwardPoint) -> int:
        """Return the temporary bytes between the last backward and REDUCE,
        for the gradients at its ``end``.
        """
        if not self.is_sharded or not self.backend.copies_reduce_scatter or self.reduces_each:
            return 0
        dense = 0 if self.is_zero3 else end.elements_before
        experts = end.experts_before if self.sums_experts else 0
        return (dense + experts) * self.reduced_itemsize
