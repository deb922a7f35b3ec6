"""Nearest requests that have a solution, as command line options. Every suggested option has been tried.

no layout keeps the rules   --global-batch below and above, fewer --nodes, fewer --devices-per-node
none fits into memory       more --nodes, shorter sequences; else a known device with more memory, or the memory needed
"""

from __future__ import annotations

import dataclasses
import math
from itertools import islice

from meshwright.errors import UserError
from meshwright.tools.planner.choices import MICRO_BATCH_SIZES, MOST_CHUNKS, Choice, choices
from meshwright.tools.planner.hardware import Hardware, known, read_hardware
from meshwright.tools.planner.model_cache import ModelCache
from meshwright.tools.planner.plan import Plan
from meshwright.tools.planner.search import BEST, search

DOUBLINGS = 6
"""Most doublings of the number of nodes, and most halvings of the sequence length."""
HALVINGS = 3
"""Bisection steps between a number of nodes that is too small and one that is enough."""
TRIED = 2
"""Most candidates of one kind to try; a candidate keeps the rules but may not fit into memory."""


def search_with_offload(cache: ModelCache, hardware: Hardware, nodes: int, best: int = BEST) -> Plan:
    """Search, and if nothing fits into memory, search again with the optimizer offloaded to the host."""
    found = search(cache, hardware, nodes, best=best)
    if found.best or found.closest is None:
        return found
    offloaded = search(cache, hardware, nodes, best=best, offload=True)
    return offloaded if offloaded.best or offloaded.closest is not None else found


def nearest(cache: ModelCache, hardware: Hardware, nodes: int, found: Plan) -> list[str]:
    """Return options, such as ``--nodes 4``, that each make the search succeed. ``found``: the failed search."""
    if found.closest is None:
        ways = [
            _other_batch(cache, hardware, nodes, -1),
            _other_batch(cache, hardware, nodes, 1),
            _fewer(cache, hardware, nodes),
        ]
        both = None if any(ways) else _more_with_other_batch(cache, hardware, nodes)
        return [each for each in (*ways, both) if each]
    more = _more_nodes(cache, hardware, nodes)
    ways = [f"--nodes {more}" if more else None, _shorter(cache, hardware, nodes)]
    if any(ways):
        return [each for each in ways if each]
    larger = _larger(cache, hardware, nodes) or _roomier(cache, hardware, nodes)
    return [larger] if larger else []


def _samples(cache: ModelCache) -> int:
    samples = cache.config.batch.global_batch
    assert samples is not None
    return samples


def _serves(cache: ModelCache, hardware: Hardware, nodes: int, samples: int) -> bool:
    """Check if a plan with this global batch, in samples, has a layout that fits."""
    return bool(search_with_offload(_with_samples(cache, samples), hardware, nodes, best=1).best)


def _with_samples(cache: ModelCache, samples: int) -> ModelCache:
    batch = cache.config.batch.model_copy(update={"chunks": samples, "global_batch": samples})
    other = dataclasses.replace(cache, config=cache.config.model_copy(update={"batch": batch}))
    other.__dict__["model"] = cache.model
    return other


def _tps(cache: ModelCache, hardware: Hardware) -> list[int]:
    """Return the tensor-parallel degrees that the model and a node allow."""
    offered = choices(_with_samples(cache, hardware.devices_per_node), hardware, 1)
    return sorted({each.tp for each in offered if isinstance(each, Choice)})


def _width(per_replica: int) -> int | None:
    """Return the smallest micro-batch size that splits ``per_replica`` samples into at most ``MOST_CHUNKS``."""
    return next((size for size in MICRO_BATCH_SIZES if per_replica <= size * MOST_CHUNKS), None)


def _batches(cache: ModelCache, hardware: Hardware, nodes: int, way: int) -> list[int]:
    """Return global batches that keep the rules, the nearest first; ``way``: -1 below, 1 above."""
    samples, size, found = _samples(cache), nodes * hardware.devices_per_node, set()
    pipelines = {tp * pp for tp in _tps(cache, hardware) for pp in range(1, len(cache.names) + 1)}
    for dp in {size // ranks for ranks in pipelines if size % ranks == 0}:
        per_replica = samples // dp + 1 if way > 0 else min((samples - 1) // dp, MOST_CHUNKS * MICRO_BATCH_SIZES[-1])
        width = _width(per_replica)
        if width is not None and per_replica:
            found.add(dp * (per_replica + (-per_replica % width if way > 0 else -(per_replica % width))))
    return sorted(found, reverse=way < 0)


def _other_batch(cache: ModelCache, hardware: Hardware, nodes: int, way: int) -> str | None:
    """Return the nearest global batch below or above that keeps the rules and fits into memory."""
    near = islice(_batches(cache, hardware, nodes, way), TRIED)
    return next((f"--global-batch {each}" for each in near if _serves(cache, hardware, nodes, each)), None)


def _fewer(cache: ModelCache, hardware: Hardware, nodes: int) -> str | None:
    """Return the largest smaller number of nodes, or of devices on one node, that works with this global batch."""
    samples = _samples(cache)
    for fewer in islice(_sizes_below(cache, hardware, nodes), TRIED):
        if _serves(cache, hardware, fewer, samples):
            return f"--nodes {fewer}"
    for devices in range(hardware.devices_per_node - 1, 0, -1):
        part = hardware.model_copy(update={"devices_per_node": devices})
        if hardware.devices_per_node % devices == 0 and 1 in _sizes_below(cache, part, 2):
            return f"--nodes 1 --devices-per-node {devices}" if _serves(cache, part, 1, samples) else None
    return None


def _sizes_below(cache: ModelCache, hardware: Hardware, nodes: int) -> list[int]:
    """Return smaller numbers of nodes on which some layout keeps the rules, the largest first."""
    samples, per_node = _samples(cache), hardware.devices_per_node
    small = [each for each in range(1, math.isqrt(samples) + 1) if samples % each == 0]
    replicas = [dp for dp in {*small, *(samples // each for each in small)} if _fills(samples // dp)]
    pipelines = {tp * pp for tp in _tps(cache, hardware) for pp in range(1, len(cache.names) + 1)}
    sizes = {ranks * dp for ranks in pipelines for dp in replicas if ranks * dp % per_node == 0}
    return sorted((size // per_node for size in sizes if size < nodes * per_node), reverse=True)


def _fills(per_replica: int) -> bool:
    width = _width(per_replica)
    return width is not None and per_replica % width == 0


def _more_nodes(cache: ModelCache, hardware: Hardware, nodes: int) -> int | None:
    """Return the smallest number of nodes found to be enough, by doubling and then bisection."""
    samples = _samples(cache)
    doubled = (nodes << doublings for doublings in range(1, DOUBLINGS + 1))
    enough = next((each for each in doubled if _serves(cache, hardware, each, samples)), None)
    if enough is None:
        return None
    too_few = enough // 2
    for _ in range(HALVINGS):
        between = (too_few + enough) // 2
        if between == too_few:
            break
        if _serves(cache, hardware, between, samples):
            enough = between
        else:
            too_few = between
    return enough


def _more_with_other_batch(cache: ModelCache, hardware: Hardware, nodes: int) -> str | None:
    """Return more nodes and another global batch, for requests that no global batch alone can solve."""
    for more in (nodes << doublings for doublings in range(1, DOUBLINGS + 1)):
        if (way := _other_batch(cache, hardware, more, 1)) is not None:
            return f"--nodes {more} {way}"
    return None


def _shorter(cache: ModelCache, hardware: Hardware, nodes: int) -> str | None:
    """Return the longest sequence that fits, among half of the current length, a quarter, and so on."""
    data = cache.config.data
    if data.builder is not None:
        return None
    for halvings in range(1, DOUBLINGS + 1):
        length = data.sequence_length // 2**halvings
        config = cache.config.model_copy(update={"data": data.model_copy(update={"sequence_length": length})})
        try:
            if length and _serves(ModelCache(config, cache.execution), hardware, nodes, _samples(cache)):
                return f"--data.sequence_length={length}"
        except UserError:  # too short for its task, or for what a layer does with it
            return None
    return None


def _larger(cache: ModelCache, hardware: Hardware, nodes: int) -> str | None:
    """Return the known hardware with the least memory that is enough and more than the current one's."""
    others = [
        (each.memory_bytes, name, each) for name in known() if (each := read_hardware(name)).kind == hardware.kind
    ]
    for memory_bytes, name, other in sorted(others, key=lambda each: each[:2]):
        if memory_bytes > hardware.memory_bytes and cache.config.train.dtype in other.flops_per_s:
            box = other.model_copy(update={"devices_per_node": hardware.devices_per_node})
            if _serves(cache, box, nodes, _samples(cache)):
                alike = other.devices_per_node == hardware.devices_per_node
                return f"--cluster {name}" + ("" if alike else f" --devices-per-node {hardware.devices_per_node}")
    return None


def _roomier(cache: ModelCache, hardware: Hardware, nodes: int) -> str | None:
    """Return the memory that would be enough, in doublings of the current one's; no real device may have it."""
    for doublings in range(1, 2 * DOUBLINGS + 1):
        memory_bytes = hardware.memory_bytes << doublings
        box = hardware.model_copy(update={"memory_bytes": memory_bytes})
        if _serves(cache, box, nodes, _samples(cache)):
            return f"memory_bytes = {memory_bytes} in the file of --cluster, which is {2**doublings} times as much"
    return None
