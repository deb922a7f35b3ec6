"""Frozen base of a run with adapters: its fingerprint in checkpoints, which may leave its weights out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import Manifest
from meshwright.config import leaves_out_base
from meshwright.errors import CheckpointError
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts

FINGERPRINT = "adapter_base"
"""Key of the fingerprint in the manifest's ``state``."""
ELEMENTS_AT_ONCE = 2**22


def saves_frozen(parts: Parts) -> bool:
    """Return whether checkpoints of a run hold its frozen weights."""
    return not leaves_out_base(parts.config)


def fingerprint(parts: Parts) -> str | None:
    """Return 16 hex digits of the frozen weights, equal in every layout; None without adapters. Collective; blocks.

    It is a sum over elements, modulo 2**64, of each value's 16 bits in bfloat16 times factors of its name, row and
    column. 8 bytes on the wire.
    """
    if not parts.config.adapter.rank:
        return None
    mesh = parts.mesh
    members = [member for replica in parts.replicas.values() for member in replica.frozen]
    owned = [m for m in members if mesh.at.dp_rank == 0 and m.kind.owns(mesh.at.tp_rank)]
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    total += sum_of((member.info, member.parameter.detach()) for member in owned).to(mesh.device)
    mesh.world.all_reduce(total).wait()
    return f"{int(total) % 2**64:016x}"


def sum_of(tensors: Iterable[tuple[ParameterInfo, Tensor]]) -> Tensor:
    """Return this rank's part of the fingerprint, () int64, of local tensors."""
    total = torch.zeros((), dtype=torch.int64)
    for info, local in tensors:
        matrix = info.unpadded(local)
        matrix = matrix.reshape(1, -1) if matrix.dim() < 2 else matrix
        shape = info.global_shape if len(info.global_shape) > 1 else (1, *info.global_shape)
        dim, start = (info.slice.dim, info.slice.start) if info.slice is not None else (0, 0)
        if len(info.global_shape) < 2:
            dim += 1  # a vector is one row
        rows = torch.arange(len(matrix)) + (start if dim == 0 else 0)
        columns = torch.arange(torch.Size(shape[1:]).numel()).view(shape[1:])
        if dim > 0:
            columns = columns.narrow(dim - 1, start, matrix.shape[dim])
        key = int.from_bytes(hashlib.blake2b(info.name.encode(), digest_size=7).digest(), "big")
        by_row, by_column = _factors(rows + key), _factors(columns.flatten() - key).to(matrix.device)
        step = max(1, ELEMENTS_AT_ONCE // max(1, by_column.numel()))
        for part, factors in zip(torch.split(matrix.flatten(1), step), torch.split(by_row, step), strict=True):
            bits = part.to(torch.bfloat16).contiguous().view(torch.int16).long()
            total += ((bits * by_column).sum(1).cpu() * factors).sum()
    return total


def _factors(indices: Tensor) -> Tensor:
    """Return an odd pseudo-random factor of each index, int64."""
    mixed = indices * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1


def check_base(parts: Parts, manifest: Manifest, place: str) -> None:
    """Compare the frozen weights with those that a checkpoint's adapters were trained on. Collective; blocks.

    Raises:
        CheckpointError: on every rank, when they differ.
    """
    saved = manifest.state.get(FINGERPRINT)
    found = fingerprint(parts) if saved is not None else None
    if saved != found:
        raise CheckpointError(
            "MW-RUN-035",
            f"{place}: its adapters were trained beside a base with the fingerprint {saved}, and the weights of "
            f"{parts.config.model.builder} have {found}: adapters of one base mean nothing on another. Give "
            f"model.builder the directory that the run began with, or choose another run.name",
        )
