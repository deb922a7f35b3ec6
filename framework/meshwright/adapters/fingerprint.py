"""Fingerprint of the frozen base under adapters:
the same on every layout and in every dtype that holds its values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.parameters import ParameterInfo

FINGERPRINT = "adapter_base"
"""Key of the fingerprint in the ``state`` of a checkpoint's manifest."""
ELEMENTS_AT_ONCE = 2**22


def base_sum(tensors: Iterable[tuple[ParameterInfo, Tensor]]) -> Tensor:
    """Return this rank's term of the fingerprint, () int64 on CPU, of local tensors.
    Ranks' terms add up modulo 2**64.

    A term sums the values' bfloat16 bits, each times a factor hashed from (parameter, row) and
    (parameter, column).
    """
    total = torch.zeros((), dtype=torch.int64)
    for info, local in tensors:
        matrix = info.unpadded(local)
        shape = info.global_shape
        dim = 0 if info.slice is None else info.slice.dim
        if len(shape) < 2:  # a vector or a single number is one row
            matrix, shape, dim = matrix.reshape(1, -1), (1, *(shape or (1,))), dim + 1
        ranges = ((0, shape[dim]),) if info.slice is None else info.slice.ranges
        held = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        rows = held if dim == 0 else torch.arange(len(matrix))
        columns = torch.arange(torch.Size(shape[1:]).numel()).view(shape[1:])
        if dim > 0:
            columns = columns.index_select(dim - 1, held)
        key = int.from_bytes(hashlib.blake2b(info.name.encode(), digest_size=7).digest(), "big")
        by_row = _factors(rows + key)
        by_column = _factors(columns.flatten() - key).to(matrix.device)
        step = max(1, ELEMENTS_AT_ONCE // max(1, by_column.numel()))
        for part, factors in zip(
            torch.split(matrix.flatten(1), step), torch.split(by_row, step), strict=True
        ):
            bits = part.to(torch.bfloat16).contiguous().view(torch.int16).long()
            total += ((bits * by_column).sum(1).cpu() * factors).sum()
    return total


def check_base(saved: object, total: Tensor, place: str, builder: str) -> None:
    """Compare the sum over all ranks with the fingerprint ``saved`` in a checkpoint of adapters.

    Raises:
        CheckpointError: they differ.
    """
    if saved != fingerprint_of(total):
        raise CheckpointError(
            "MW-RUN-035",
            f"{place}: its adapters were trained beside a base with the fingerprint {saved}, and"
            f" the weights of {builder} have {fingerprint_of(total)}: adapters of one base mean"
            " nothing on another. Give model.builder the directory that the run began with, or"
            " choose another run.name",
        )


def fingerprint_of(total: Tensor) -> str:
    """Return the sum over all ranks as 16 hex digits."""
    return f"{int(total) % 2**64:016x}"


def _factors(indices: Tensor) -> Tensor:
    """Hash each index to an odd factor, int64."""
    mixed = indices * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
