"""Distinct parameters of a stage, and the gradient sum of weights that several stages share (tied weights)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from meshwright.data_parallel.sharding import ShardedParameters


def members_of(layers: nn.Sequential) -> list[tuple[str, nn.Parameter, str]]:
    """Return (parameter name, parameter, layer name) of each distinct parameter, in the model's order."""
    seen: set[int] = set()
    found = []
    for layer_name, layer in layers.named_children():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{layer_name}.{name}", parameter, layer_name))
    return found


def sum_ties(buckets: Iterable[ShardedParameters]) -> None:
    """Sum the gradients of each tied weight over its copies, and store the sum in every copy. Blocks.

    Copies on one rank are added directly. Copies on several ranks are all-reduced, this rank's shard only: 2 m (n-1)/n
    bytes per rank, m = bytes of the shard, n = ranks with a copy. The order is by name, the same on all ranks.

    Every rank that holds a tied weight must call it at the end of its row, after all stages are reduced. A stage's
    REDUCE would be too early: stages finish at different times, and a stage that waited there could delay the messages
    that the other stage still needs.
    """
    copies: dict[str, list[ShardedParameters]] = defaultdict(list)
    for bucket in buckets:
        if bucket.kind.tied is not None:
            copies[bucket.kind.tied.name].append(bucket)
    for name in sorted(copies):
        first, *others = copies[name]
        assert first.kind.tied is not None
        for other in others:
            first.shard_gradient.add_(other.shard_gradient)
        first.sum_shard(first.kind.tied.ranks)
    for first, *others in copies.values():
        first.wait()
        for other in others:
            other.shard_gradient.copy_(first.shard_gradient)
