"""Frozen base weights of a run with adapters: their fingerprint in checkpoints,
which may omit the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT, base_sum, check_base, fingerprint_of
from meshwright.checkpoint.manifest import Manifest
from meshwright.config import leaves_out_base
from meshwright.data_parallel.members import full_weights
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts


def saves_frozen(parts: Parts) -> bool:
    """Return whether checkpoints of a run hold its frozen weights."""
    config = parts.config
    return not leaves_out_base(config.adapter, config.model, config.run)


def fingerprint(parts: Parts) -> str | None:
    """Return the fingerprint of the frozen weights; None without adapters.
    Collective over all ranks; blocks.
    """
    return fingerprint_of(_total(parts)) if parts.config.adapter.rank else None


def check_resumed(parts: Parts, manifest: Manifest, place: str) -> None:
    """Compare the frozen weights with those that a checkpoint's adapters were trained on.
    Collective; blocks.

    Raises:
        CheckpointError: on every rank, when they differ.
    """
    saved = manifest.state.get(FINGERPRINT)
    if saved is not None:
        check_base_of(saved, parts, place, parts.config.model.builder)


def check_base_of(saved: object, parts: Parts, place: str, base: str) -> None:
    """Compare the frozen weights, which come from ``base``, with the fingerprint in ``place``;
    see :func:`check_resumed`.
    """
    check_base(saved, _total(parts), place, base)


def _total(parts: Parts) -> Tensor:
    """All-reduce the fingerprint over all ranks: 8 bytes;
    under ZeRO-3 also all-gather the frozen weights. Blocks.
    """
    total = base_sum(_owned(parts)).to(parts.mesh.device)
    parts.mesh.world.all_reduce(total).wait()
    return total


def _owned(parts: Parts) -> Iterator[tuple[ParameterInfo, Tensor]]:
    """Yield the local frozen weights that this rank adds: of ranks with a copy one does.
    Under ZeRO-3 collective over the shard group.
    """
    for replica in parts.replicas.values():
        for member in replica.frozen:
            if member.holders.is_saved and not is_adapter(member.info.name):
                yield member.info, member.parameter.detach()
        for bucket in replica.frozen_shards:
            weights, ((info, *_), start, stop) = full_weights(bucket), bucket.slots[0]
            if bucket.holders.is_saved and not is_adapter(info.name):
                yield info, weights[start:stop].view(info.local_shape)
