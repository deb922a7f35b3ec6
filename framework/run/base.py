"""Frozen base of a run with adapters: its fingerprint in checkpoints, which may leave its weights out."""

from __future__ import annotations

from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT, base_sum, check_base, fingerprint_of
from meshwright.checkpoint.manifest import Manifest
from meshwright.config import leaves_out_base
from meshwright.parts import Parts


def saves_frozen(parts: Parts) -> bool:
    """Return whether checkpoints of a run hold its frozen weights."""
    return not leaves_out_base(parts.config)


def fingerprint(parts: Parts) -> str | None:
    """Return the fingerprint of the frozen weights; None without adapters. Collective over all ranks; blocks."""
    return fingerprint_of(_total(parts)) if parts.config.adapter.rank else None


def check_resumed(parts: Parts, manifest: Manifest, place: str) -> None:
    """Compare the frozen weights with those that a checkpoint's adapters were trained on. Collective; blocks.

    Raises:
        CheckpointError: on every rank, when they differ.
    """
    saved = manifest.state.get(FINGERPRINT)
    if saved is not None:
        check_base(saved, _total(parts), place, parts.config.model.builder)


def _total(parts: Parts) -> Tensor:
    """Sum the parts of the fingerprint over all ranks: 8 bytes on the wire. Blocks."""
    mesh = parts.mesh
    members = [member for replica in parts.replicas.values() for member in replica.frozen]
    members = [member for member in members if not is_adapter(member.info.name)]
    owned = [each for each in members if mesh.is_first(each.info.over) and each.kind.owns(mesh.at.tp_rank)]
    total = base_sum((member.info, member.parameter.detach()) for member in owned).to(mesh.device)
    mesh.world.all_reduce(total).wait()
    return total
