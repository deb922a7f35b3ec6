"""Expert parallelism in the planner: degrees that a search tries, rows of the busiest rank,
time of the exchange.

degrees_to_try  degrees of ep that a search tries, inside a node
ExpertGroup     fake ep group whose rank receives skew x the mean of rows; its products and messages grow with them
exchange_s      seconds of the all-to-alls: bytes inside the node and to other nodes go over separate links
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from meshwright.config.combinations.features import Traits
from meshwright.config.combinations.refused import find_excluding
from meshwright.mesh.fake import CountingGroup
from meshwright.model.build import PlainModel
from meshwright_plan.planner.layer_profile import GroupMessages
from meshwright_plan.planner.links import spread_of
from meshwright_plan.planner.rates import PerformanceModel

AXIS = "ep"
PAIRED = "dualpipe_v"
"""Schedule whose pairs hide the exchange of experts."""


class ExpertGroup(CountingGroup):
    """Fake group of the ranks that share experts, seen from the rank with the most rows."""

    skew = 1.0
    """Rows of this rank's experts over the mean of the ranks."""

    def host_counts(self, counts: Tensor, total: int) -> list[list[int]]:
        """Return even counts of the rows that this rank sends, and of those it receives:
        ``skew`` times as many.
        """
        most = round(total * min(self.skew, self.size))
        return [*super().host_counts(counts[:1], total), *super().host_counts(counts[1:], most)]


def load_limit(model: PlainModel) -> float:
    """Return the largest possible load of a rank, rows over the mean: the capacity factor,
    or infinity without one.

    A factor below 1 counts as 1, so rows dropped from a balanced load are still counted. Rounding
    of the capacity to whole tokens is ignored.
    """
    routings = [
        getattr(module, "routing", None)
        for module in model.layers.modules()
        if hasattr(module, "route_ids")
    ]
    factors = [getattr(routing, "capacity_factor", 0.0) for routing in routings]
    return max(1.0, *factors) if factors and all(factors) else math.inf


def degrees_to_try(
    traits: Traits, pinned: int | None, tp: int, devices_per_node: int, *, across_nodes: bool
) -> Iterator[int]:
    """Yield the degrees of ep that a search tries with ``tp``: only a pinned one if any.

    They are multiples of tp that divide the numbers of experts, inside a node unless
    ``across_nodes``.
    """
    if pinned is not None:
        yield pinned
        return
    yield 1
    if find_excluding("ep", traits) is not None:
        return
    for ep in range(2, min(traits.experts) + 1):
        is_near = across_nodes or devices_per_node % ep == 0
        if ep % tp == 0 and is_near and all(count % ep == 0 for count in traits.experts):
            yield ep


def suits(schedule: str, ep: int) -> bool:
    """Return False for ``PAIRED`` without expert parallelism:
    its pairs then have no messages to hide.
    """
    return ep > 1 or schedule != PAIRED


def shared_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer's experts that ranks share (ep)."""
    modules = (module for module in layer.modules() if "expert_exchange" in vars(module))
    return [parameter for module in modules for parameter in module.parameters()]


def count_shared(layer: nn.Module, trained: bool = True) -> int:
    """Return the number of this rank's elements, trained or frozen,
    in experts of a layer that ranks share (ep).
    """
    return sum(each.numel() for each in shared_parameters(layer) if each.requires_grad is trained)


def largest_parameter(layer: nn.Module) -> int:
    """Return the elements of a layer's largest trained parameter,
    without experts that ranks share.
    """
    shared = set(map(id, shared_parameters(layer)))
    own = (
        each.numel() for each in layer.parameters() if each.requires_grad and id(each) not in shared
    )
    return max(own, default=0)


def exchange_s(performance: PerformanceModel, ep: int, messages: Sequence[GroupMessages]) -> float:
    """Return the seconds of the all-to-alls of ``ep`` neighbouring ranks.

    A rank sends equally many bytes to every other rank: to its own node over the node link and, at
    the same time, to other nodes over its network link. With measured links (CPU) an all-to-all
    takes as long as a reduce-scatter.
    """
    hardware = performance.hardware
    spread = spread_of(ep, 1, performance.linked_ranks, performance.num_ranks)
    reached, far_share = performance.reached_links(spread), (ep - spread.fewest) / max(1, ep - 1)
    latency_s = reached.cluster_latency_s if far_share else reached.node_latency_s
    seconds = 0.0
    for message in messages:
        if message.axis != AXIS:
            continue
        if hardware.messages:
            seconds += performance.group_link(ep, 1).seconds(
                message.wire_bytes, message.calls, "reduce_scatter"
            )
            continue
        near_s = message.wire_bytes * (1 - far_share) / reached.node_bytes_per_s
        far_s = (
            message.wire_bytes
            * far_share
            * performance.traits.far_rows_share
            / reached.cluster_bytes_per_s
        )
        seconds += max(near_s, far_s) + message.calls * (latency_s + reached.call_s)
    return seconds
