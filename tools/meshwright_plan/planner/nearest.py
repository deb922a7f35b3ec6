"""Nearest requests for which some layout works, as command line options.
Every suggestion has been searched.

no layout keeps the rules   --global-batch below and above, fewer --nodes, fewer --devices-per-node
none fits into memory       more --nodes, shorter sequences; else a known device with more memory
"""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright_plan.planner.choice import Choice
from meshwright_plan.planner.choices import MAX_CHUNKS, MICRO_BATCH_SIZES, choices, divisors
from meshwright_plan.planner.hardware import Hardware, known, read_hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan
from meshwright_plan.planner.search import search

DOUBLINGS = 6
"""Most doublings of the number of nodes, and most halvings of the sequence length."""
HALVINGS = 3
"""Bisection steps between a number of nodes that is too small and one that is enough."""
TRIED = 2
"""Most candidates of one kind to try; a candidate keeps the rules but may not fit into memory."""


def search_with_offload(
    cache: ModelCache, hardware: Hardware, nodes: int, best: int, *, settles: bool = False
) -> Plan:
    """Search, and if nothing fits into memory,
    search again with the optimizer offloaded to the host.

    Optimizers of whole parameters are never offloaded, unless the pins want it. ``settles``: as in
    :func:`search`.
    """
    if cache.pins.get("offload") is True:
        return search(cache, hardware, nodes, best=best, offload=True, settles=settles)
    plan = search(cache, hardware, nodes, best=best, settles=settles)
    if plan.best or plan.closest is None or cache.config.optimizer.spec.needs_full_weights:
        return plan
    if "offload" in cache.pins:
        return plan
    offloaded = search(cache, hardware, nodes, best=best, offload=True, settles=settles)
    return offloaded if offloaded.best or offloaded.closest is not None else plan


class _Request(NamedTuple):
    """Model and batch, and the cluster on which a plan is requested."""

    cache: ModelCache
    hardware: Hardware
    nodes: int

    @property
    def samples(self) -> int:
        """Global batch in samples."""
        samples = self.cache.config.batch.global_batch
        assert samples is not None
        return samples

    def with_samples(self, samples: int) -> _Request:
        """Return the request with another global batch."""
        config = self.cache.config.replace(
            batch={"chunks": samples, "global_batch": samples, "ramp": None}
        )
        cache = dataclasses.replace(self.cache, config=config)
        cache.__dict__["model"] = self.cache.model
        return self._replace(cache=cache)

    def is_solvable(self) -> bool:
        """Check if some layout keeps the rules and fits."""
        return bool(search_with_offload(self.cache, self.hardware, self.nodes, best=1).best)

    def replica_sizes(self) -> set[int]:
        """Return the numbers of ranks, pp x cp x tp,
        that one replica of this model may have on such nodes.

        Held are its degrees alone: one node with one sample a device has no place for a held batch,
        nor for all stages.
        """
        pins = self.cache.pins
        probe = self.with_samples(self.hardware.devices_per_node).cache.replaced(
            pins={axis: pins[axis] for axis in ("cp", "tp", "ep") if axis in pins}
        )
        offered = choices(probe, self.hardware, 1)
        ranks = {each.cp * each.tp for each in offered if isinstance(each, Choice)}
        num_stages = range(1, len(self.cache.names) + 1)
        return {
            in_stage * pp for in_stage in ranks for pp in num_stages if pins.get("pp", pp) == pp
        }


def nearest(cache: ModelCache, hardware: Hardware, nodes: int, failed: Plan) -> list[str]:
    """Return options, such as ``--nodes 4``, that each make the ``failed`` search succeed."""
    request = _Request(cache, hardware, nodes)
    if failed.closest is None:
        ways = [_other_batch(request, -1), _other_batch(request, 1), _fewer(request)]
    else:
        more = _more_nodes(request)
        ways = [f"--nodes {more}" if more else None, _shorter(request)]
        if not any(ways):
            ways = [_larger_device(request)]
    return [way for way in ways if way]


def _width(per_replica: int) -> int | None:
    """Return the smallest micro-batch size that splits ``per_replica`` samples into
    at most ``MAX_CHUNKS``.
    """
    sizes = (size for size in MICRO_BATCH_SIZES if size & (size - 1) == 0)
    return next((size for size in sizes if per_replica <= size * MAX_CHUNKS), None)


def _batches(request: _Request, way: int) -> list[int]:
    """Return global batches that keep the rules, the nearest first; ``way``: -1 below, 1 above."""
    samples, size, batches = (
        request.samples,
        request.nodes * request.hardware.devices_per_node,
        set(),
    )
    for dp in {size // ranks for ranks in request.replica_sizes() if size % ranks == 0}:
        per_replica = (
            samples // dp + 1
            if way > 0
            else min((samples - 1) // dp, MAX_CHUNKS * MICRO_BATCH_SIZES[-1])
        )
        width = _width(per_replica)
        if width is not None and per_replica:
            batches.add(
                dp * (per_replica + (-per_replica % width if way > 0 else -(per_replica % width)))
            )
    return sorted(batches, reverse=way < 0)


def _other_batch(request: _Request, way: int) -> str | None:
    """Return the nearest global batch below or above that keeps the rules and fits into memory."""
    near = islice(_batches(request, way), TRIED)
    return next(
        (f"--global-batch {each}" for each in near if request.with_samples(each).is_solvable()),
        None,
    )


def _fewer(request: _Request) -> str | None:
    """Return the largest smaller number of nodes, or of devices on one node,
    that works with this global batch.
    """
    for fewer in islice(_sizes_below(request), TRIED):
        if request._replace(nodes=fewer).is_solvable():
            return f"--nodes {fewer}"
    for devices in reversed(divisors(request.hardware.devices_per_node)[:-1]):
        part = request._replace(
            hardware=request.hardware.model_copy(update={"devices_per_node": devices}), nodes=1
        )
        if 1 in _sizes_below(part._replace(nodes=2)):
            return f"--nodes 1 --devices-per-node {devices}" if part.is_solvable() else None
    return None


def _sizes_below(request: _Request) -> list[int]:
    """Return smaller numbers of nodes on which some layout keeps the rules, the largest first."""
    samples, per_node = request.samples, request.hardware.devices_per_node
    replicas = [dp for dp in divisors(samples) if _fills(samples // dp)]
    sizes = {
        ranks * dp
        for ranks in request.replica_sizes()
        for dp in replicas
        if ranks * dp % per_node == 0
    }
    return sorted(
        (size // per_node for size in sizes if size < request.nodes * per_node), reverse=True
    )


def _fills(per_replica: int) -> bool:
    width = _width(per_replica)
    return width is not None and per_replica % width == 0


def _more_nodes(request: _Request) -> int | None:
    """Return the smallest number of nodes found to be enough, by doubling and then bisection."""
    doubled = (request.nodes << doublings for doublings in range(1, DOUBLINGS + 1))
    enough = next((each for each in doubled if request._replace(nodes=each).is_solvable()), None)
    if enough is None:
        return None
    too_few = enough // 2
    for _ in range(HALVINGS):
        between = (too_few + enough) // 2
        if between == too_few:
            break
        if request._replace(nodes=between).is_solvable():
            enough = between
        else:
            too_few = between
    return enough


def _shorter(request: _Request) -> str | None:
    """Return the longest sequence that fits, among half of the current length, a quarter,
    and so on.
    """
    cache, data = request.cache, request.cache.config.data
    if data.builder is not None:
        return None
    for halvings in range(1, DOUBLINGS + 1):
        length = data.sequence_length // 2**halvings
        config = cache.config.replace(data={"sequence_length": length})
        try:
            if (
                length
                and request._replace(
                    cache=ModelCache(config, cache.execution, pins=cache.pins, skew=cache.skew)
                ).is_solvable()
            ):
                return f"--data.sequence_length={length}"
        except UserError:  # too short for its task, or for what a layer does with it
            return None
    return None


def _larger_device(request: _Request) -> str | None:
    """Return the known hardware with the smallest sufficient memory above the current one's."""
    hardware = request.hardware
    others = [
        (each.memory_bytes, name, each)
        for name in known()
        if (each := read_hardware(name)).kind == hardware.kind
    ]
    for memory_bytes, name, other in sorted(others, key=lambda each: each[:2]):
        if (
            memory_bytes > hardware.memory_bytes
            and request.cache.config.train.dtype in other.flops_per_s
        ):
            box = other.model_copy(update={"devices_per_node": hardware.devices_per_node})
            if request._replace(hardware=box).is_solvable():
                alike = other.devices_per_node == hardware.devices_per_node
                return f"--cluster {name}" + (
                    "" if alike else f" --devices-per-node {hardware.devices_per_node}"
                )
    return None
