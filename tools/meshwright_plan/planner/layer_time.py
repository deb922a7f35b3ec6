"""Time of one layer for one micro-batch: its products and other operations,
and the collectives of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright_plan.planner.experts import exchange_s
from meshwright_plan.planner.layer_profile import CoreCall, GroupMessages, LayerProfile
from meshwright_plan.planner.links import GroupLink
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import FrameworkTraits, PerformanceModel

PRODUCTS = (WorkKind.PRODUCT, WorkKind.FLOAT8)


class LayerTime(NamedTuple):
    """Seconds of one layer for one micro-batch."""

    forward: float
    backward: float
    weight_half: float
    messages: float
    """Seconds of tensor-parallel messages, included in ``forward`` and ``backward``."""
    exchange: float = 0.0
    """Seconds of context-parallel messages, included in ``forward`` and ``backward``."""
    expert_exchange: float = 0.0
    """Seconds of expert-parallel messages, included in ``forward`` and ``backward``."""
    dispatched: float = 0.0
    """Part of ``expert_exchange`` in forward."""


def layer_time(
    layer: LayerProfile,
    performance: PerformanceModel,
    dtype: str,
    tp: GroupLink,
    context: GroupLink,
    ep: int = 1,
) -> LayerTime:
    """Return a layer's seconds. ``tp``, ``context``: links of its groups. ``ep``:
    degree of expert parallelism.
    """
    traits = performance.traits

    def messages_s(
        messages: Sequence[GroupMessages],
        overlapped: Mapping[str, float],
        products_s: Mapping[str, float],
    ) -> float:
        seconds = 0.0
        for message in messages:
            if message.axis != "tp":
                continue
            share = min(1.0, overlapped.get(message.operation, 0.0) / message.calls)
            whole_s = tp.seconds(message.wire_bytes, message.calls, message.operation)
            hidden_s = whole_s * performance.fractions.hidden * share
            seconds += whole_s - min(hidden_s, products_s.get(message.operation, hidden_s))
        return seconds

    works = _WorkTimer(layer, performance, dtype, tp.size)
    forward_overlap, backward_overlap = overlapped_calls(layer, traits)
    in_columns = {} if traits.overlaps_tp or traits.splits_tp_products else works.column_seconds()
    forward_messages = messages_s(layer.forward_messages, forward_overlap, {})
    backward_messages = messages_s(layer.backward_messages, backward_overlap, in_columns)
    attends = [
        [w for w in each if w.kind is WorkKind.ATTENTION]
        for each in (layer.forward, layer.backward)
    ]
    in_forward, in_backward = (
        seconds - hidden_s(layer.cores, seconds, works.seconds(attention, at == 1), performance)
        for at, (seconds, attention) in enumerate(
            zip(context_exchange_s(layer, context, traits), attends, strict=True)
        )
    )
    dispatched_s, returned_s = (
        exchange_s(performance, ep, messages)
        for messages in (layer.forward_messages, layer.backward_messages)
    )
    backward, weight_half = (
        works.seconds(layer.backward, True),
        works.seconds(layer.weight_half, True),
    )
    if not traits.accumulates_in_product:
        add_bytes = layer.num_parameters * (2 + 2 * traits.wide_gradient_bytes)
        add_s = add_bytes / performance.memory_bytes_per_s
        if layer.weight_half:
            weight_half += add_s
        else:
            backward += add_s
    forward = works.seconds(layer.forward, False) + forward_messages + in_forward + dispatched_s
    return LayerTime(
        max(forward, works.host_s(layer.forward)),
        max(backward + backward_messages + in_backward + returned_s, works.host_s(layer.backward)),
        max(weight_half, works.host_s(layer.weight_half)),
        forward_messages + backward_messages,
        in_forward + in_backward,
        dispatched_s + returned_s,
        dispatched_s,
    )


class _WorkTimer:
    """Timer of the operations of one layer."""

    def __init__(
        self, layer: LayerProfile, performance: PerformanceModel, dtype: str, tp: int
    ) -> None:
        self._layer, self._performance, self._dtype, self._tp = layer, performance, dtype, tp
        low = performance.traits.product_dtype
        self._product_dtype = (
            low if layer.attended and low in performance.hardware.flops_per_s else ""
        )
        self._token_counts = {work.shape[1] for work in layer.forward if work.kind in PRODUCTS}

    def seconds(self, works: Sequence[Work], backward: bool) -> float:
        """Return the seconds of all operations."""
        return sum(work.times * self._one_s(work, backward) for work in works)

    def host_s(self, works: Sequence[Work]) -> float:
        """Return the seconds in which the host launches these operations:
        a lower bound of their time on a GPU.
        """
        traits, casts = (
            self._performance.traits,
            2 * self._performance.traits.casts if self._product_dtype else 0.0,
        )
        groups = (work.groups if traits.starts_each_expert else 1 for work in works)
        starts = (1.0 + (casts if work.kind in PRODUCTS else 0.0) for work in works)
        return traits.host_operation_s * sum(
            work.times * each * start
            for work, each, start in zip(works, groups, starts, strict=True)
        )

    def column_seconds(self) -> dict[str, float]:
        """Return, per collective, the seconds of the backward products of column linears
        that hide it.

            all-gather of x                        dx (tokens, I) = gy W
            all-reduce, reduce-scatter of dx       dW (O/tp, I) = gy^T x

        In forward a column linear has k = I, the layer's width, and a row linear n = I; of those
        with both, half count.
        """
        input_s = weight_s = 0.0
        for work in self._layer.forward:
            batch, m, n, k = work.shape
            if work.kind in PRODUCTS and k == self._layer.width:
                times = work.times * (0.5 if n == k else 1.0)
                input_s += times * self._one_s(work._replace(shape=(batch, m, k, n)), True)
                weight_s += times * self._one_s(
                    work._replace(kind=WorkKind.PRODUCT, shape=(batch, n, k, m)), True
                )
        return {"all_gather": input_s, "all_reduce": weight_s, "reduce_scatter": weight_s}

    def _one_s(self, work: Work, backward: bool) -> float:
        if work.kind not in PRODUCTS:
            return self._performance.work_s(work, self._dtype, backward=backward)
        (batch, m, n, k), tp = work.shape, self._tp
        splits = self._performance.traits.splits_tp_products and tp > 1
        if not splits or m not in self._token_counts or m % tp:
            return self._product_s(work, backward)
        part = work._replace(
            flops=work.flops / tp, bytes=work.bytes / tp, shape=(batch, m // tp, n, k)
        )
        return tp * self._product_s(part, backward)

    def _product_s(self, work: Work, backward: bool) -> float:
        performance = self._performance
        if not self._product_dtype or work.kind is WorkKind.FLOAT8:
            return performance.work_s(work, self._dtype, backward=backward)
        batch, m, n, k = work.shape
        # of n by k; in a weight gradient both factors are of tokens
        is_weight = m in self._token_counts
        own = m if is_weight and not performance.traits.casts_weights else m + n
        # read for the largest value, read and written for the cast
        cast_bytes = 5 * batch * k * own
        cast_s = cast_bytes / performance.memory_bytes_per_s + 2 * performance.fractions.operation_s
        product_s = performance.work_s(work, self._product_dtype, backward=backward)
        return product_s / performance.traits.cast_product_speed + performance.traits.casts * cast_s


def overlapped_calls(
    layer: LayerProfile, traits: FrameworkTraits
) -> tuple[dict[str, float], dict[str, float]]:
    """Count the calls of each collective that products can hide, in forward and in backward.

    For ``overlaps_tp_with_weight_gradients``, backward hides as many reductions as forward has, and
    the all-gathers in excess of the reduce-scatters (of inputs that were kept as shards). A split
    backward defers the weight gradients, so that they hide nothing.
    """
    both = layer.forward_messages, layer.backward_messages
    forward, backward = (
        {m.operation: float(m.calls) for m in messages if m.axis == "tp"} for messages in both
    )
    gathers, scatters = forward.get("all_gather", 0.0), backward.get("reduce_scatter", 0.0)
    if traits.overlaps_tp:
        return forward, backward
    if traits.splits_tp_products:
        return forward, backward | {"reduce_scatter": max(0.0, scatters - gathers)}
    if not traits.overlaps_tp_with_weight_gradients:
        return {}, {}
    names = () if layer.weight_half else ("all_reduce", "reduce_scatter")
    reductions = {name: forward.get(name, 0.0) for name in names}
    return {}, reductions | {"all_gather": max(0.0, backward.get("all_gather", 0.0) - scatters)}


def hidden_s(
    cores: Sequence[CoreCall], messages_s: float, attention_s: float, performance: PerformanceModel
) -> float:
    """Return the seconds of a key exchange that attention hides:
    at most those of all head groups but one.
    """
    groups = min((core.groups for core in cores), default=1)
    if groups == 1 or not performance.traits.overlaps_context:
        return 0.0
    share = (groups - 1) / groups
    return performance.fractions.hidden * share * min(messages_s, attention_s)


def context_exchange_s(
    layer: LayerProfile, context: GroupLink, traits: FrameworkTraits
) -> tuple[float, float]:
    """Return the seconds of context-parallel messages, in forward and in backward,
    as if they blocked.

    ``traits.context`` > 1: the layer was profiled without its messages, and another framework's
    follow from its keys.
    """
    both = layer.forward_messages, layer.backward_messages
    forward, backward = (
        sum(context.seconds(m.wire_bytes, m.calls, m.operation) for m in messages if m.axis == "cp")
        for messages in both
    )
    others = traits.context - 1
    for queries, keys in layer.attended if others else ():
        if traits.context_exchange == "heads":
            num_bytes = (2 * queries + keys) * others / context.size
            forward += context.seconds(num_bytes, 4)
            backward += context.seconds(num_bytes, 4)
        else:
            forward += context.seconds(keys * others)
            backward += context.seconds(2 * keys * others, 2)
    return forward, backward
