"""Rules that build a meshwright tensor from transformers tensors, and back: same values, other order, bit for bit.

In names and comments, "ours" is the tensor of the meshwright model and "theirs" are the tensors of transformers.
Ours is fused: its rows form units, and a shard of consecutive units is itself a valid layer (see
``meshwright_models/__init__.py``). A rule holds the number of units, and the rows that each of
theirs contributes to a unit::

    ours   | q0 q1 | k0 | v0 | q2 q3 | k1 | v1 |       units = 2, rows = (2 d, d, d)
    theirs | q0 q1 q2 q3 |   | k0 k1 |   | v0 v1 |     one tensor each, or ``stacked``: concatenated in one tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.parameters import ParameterInfo, Slice

Shape = tuple[int, ...]


class TensorMapping(NamedTuple):
    """Mapping between one meshwright tensor (``ours``) and the transformers tensors in it (``theirs``)."""

    ours: str
    theirs: tuple[str, ...]
    """Transformers names, in their order within a unit."""
    units: int = 1
    rows: tuple[int, ...] = ()
    """Number of rows of each part in one unit; (): a single part with all rows."""
    stacked: bool = False
    """True if theirs is one tensor with the parts concatenated along the rows."""
    transposed: bool = False
    """True if theirs is stored as (inputs, outputs), as in GPT-2's Conv1D."""
    same_as: tuple[str, ...] = ()
    """Further transformers names under which files may repeat this tensor (tied weights); never written."""
    factors: tuple[float, ...] = ()
    """Factors on the leading parts of ours at export (muP); parts without a factor are unchanged."""
    place: int | None = None
    """Position along dim 0 of ours, a batch of matrices of which each has a rule: an expert. None: all of ours."""
    pairs: tuple[int, int] | None = None
    """(n, r): of n rows each the last r are pairs of neighbours in theirs, and two halves in ours: rotated features."""
    keeps_dtype: bool = False
    """True if an export writes it in the saved element type, whatever is asked for."""

    def info(self, ours: Shape) -> ParameterInfo:
        """Return the metadata of the part of ours that this rule covers: all of it, or one expert."""
        part = None if self.place is None else Slice(0, self.place, self.place + 1, 1)
        return ParameterInfo(self.ours, ours, part)

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """Return the name and shape of each transformers tensor, given the global shape of ours."""
        ours = ours if self.place is None else ours[1:]
        rest = ours[1:]
        order = -1 if self.transposed else 1
        if self.stacked or not self.rows:
            return {self.theirs[0]: ours[::order]}
        return {name: (self.units * rows, *rest)[::order] for name, rows in zip(self.theirs, self.rows, strict=True)}

    def join(self, read: Callable[[str], Tensor], ours: Shape, dtype: torch.dtype) -> Tensor:
        """Build the meshwright tensor of shape ``ours`` in ``dtype``, calling ``read`` for one of theirs at a time.

        Of a batch, build the matrix at ``place``.
        """
        whole = torch.empty(ours if self.place is None else ours[1:], dtype=dtype)
        targets = self._parts(whole)
        if self.stacked:
            for target, section in zip(targets, self._sections(self._transpose(read(self.theirs[0]))), strict=True):
                target.copy_(torch.unflatten(section, 0, target.shape[:2]))
            return whole
        for target, name in zip(targets, self.theirs, strict=True):
            part = self._halves(self._transpose(read(name)), 1)
            target.copy_(torch.unflatten(part, 0, target.shape[:2]) if self.rows else part)
        return whole

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the contiguous values of each transformers tensor, one at a time.

        ``ours``: the whole tensor, or its part of :meth:`info`.
        """
        ours = ours if self.place is None else ours.squeeze(0)
        if any(factor != 1 for factor in self.factors):
            ours = ours.clone()
            for part, factor in zip(self._parts(ours), self.factors, strict=False):
                part.mul_(factor)
        if not self.rows:
            yield self.theirs[0], self._transpose(self._halves(ours, -1)).contiguous()
            return
        rest = tuple(ours.shape[1:])
        parts = self._parts(ours)
        if self.stacked:
            stacked = torch.empty_like(ours)
            for section, part in zip(self._sections(stacked), parts, strict=True):
                section.view(part.shape).copy_(part)
            yield self.theirs[0], self._transpose(stacked).contiguous()
            return
        for name, part in zip(self.theirs, parts, strict=True):
            yield name, self._transpose(part.reshape(-1, *rest)).contiguous()

    def _parts(self, ours: Tensor) -> Sequence[Tensor]:
        """Split ours into views (units, rows of the part, ...), one per part; without ``rows``, return it whole."""
        if not self.rows:
            return (ours,)
        units = ours.view(self.units, sum(self.rows), *ours.shape[1:])
        return torch.split(units, list(self.rows), dim=1)

    def _sections(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split a stacked transformers tensor into views, one per part."""
        return torch.split(theirs, [self.units * rows for rows in self.rows])

    def _halves(self, tensor: Tensor, direction: int) -> Tensor:
        """Reorder the rotated rows: from theirs to ours (``direction`` 1), or from ours to theirs (-1)."""
        if self.pairs is None:
            return tensor
        each, rotated = self.pairs
        places = torch.arange(each)
        turned = places[each - rotated :]
        order = torch.cat((places[: each - rotated], turned[0::2], turned[1::2]))
        units = tensor.reshape(-1, each, *tensor.shape[1:])
        return units[:, order if direction == 1 else order.argsort()].flatten(0, 1)

    def _transpose(self, theirs: Tensor) -> Tensor:
        return theirs.t() if self.transposed and theirs.dim() == 2 else theirs


def unchanged(ours: str, theirs: str) -> TensorMapping:
    """Return the mapping of a tensor that differs in its name alone."""
    return TensorMapping(ours, (theirs,))
