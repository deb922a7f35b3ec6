"""How a tensor of ours is made of theirs, and theirs of ours: the same numbers in another order, bit for bit.

Ours are fused, and laid out so that a contiguous run of rows is whole (see ``models/__init__.py``): a rule says of how
many units a tensor is, and how many rows each of theirs gives to a unit::

    ours   | q0 q1 | k0 | v0 | q2 q3 | k1 | v1 |       units = 2, rows = (2 d, d, d)
    theirs | q0 q1 q2 q3 |   | k0 k1 |   | v0 v1 |     one tensor each, or ``stacked``: one after another in one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Rule(NamedTuple):
    """One tensor of ours and the tensors of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    """In the order in which they follow one another in a unit."""
    units: int = 1
    rows: tuple[int, ...] = ()
    """Of each part in one unit; (): a single part, all rows."""
    stacked: bool = False
    """Theirs is one tensor that holds the parts one after another."""
    transposed: bool = False
    """Theirs is (inputs, outputs): GPT-2's Conv1D."""
    same_as: tuple[str, ...] = ()
    """Names under which theirs may hold the same numbers once more (tied weights); never written."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """Of each of theirs, when ours has this shape."""
        rest = ours[1:]
        order = -1 if self.transposed else 1
        if self.stacked or not self.rows:
            return {self.theirs[0]: ours[::order]}
        return {name: (self.units * rows, *rest)[::order] for name, rows in zip(self.theirs, self.rows, strict=True)}

    def join(self, read: Callable[[str], Tensor], ours: Shape, dtype: torch.dtype) -> Tensor:
        """Ours, out of theirs by name, each read when it is its turn."""
        whole = torch.empty(ours, dtype=dtype)
        targets = self._parts(whole)
        if self.stacked:
            for target, section in zip(targets, self._sections(self._turned(read(self.theirs[0]))), strict=True):
                target.copy_(torch.unflatten(section, 0, target.shape[:2]))
            return whole
        for target, name in zip(targets, self.theirs, strict=True):
            found = self._turned(read(name))
            target.copy_(torch.unflatten(found, 0, target.shape[:2]) if self.rows else found)
        return whole

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Theirs out of ours, contiguous, one at a time."""
        if not self.rows:
            yield self.theirs[0], self._turned(ours).contiguous()
            return
        rest = tuple(ours.shape[1:])
        parts = self._parts(ours)
        if self.stacked:
            stacked = torch.empty_like(ours)
            for section, part in zip(self._sections(stacked), parts, strict=True):
                section.view(part.shape).copy_(part)
            yield self.theirs[0], self._turned(stacked).contiguous()
            return
        for name, part in zip(self.theirs, parts, strict=True):
            yield name, self._turned(part.reshape(-1, *rest)).contiguous()

    def _parts(self, ours: Tensor) -> Sequence[Tensor]:
        """Views (units, rows of the part, ...) of ours; (): all of it as one."""
        if not self.rows:
            return (ours,)
        units = ours.view(self.units, sum(self.rows), *ours.shape[1:])
        return torch.split(units, list(self.rows), dim=1)

    def _sections(self, theirs: Tensor) -> Sequence[Tensor]:
        """Views of their stacked tensor, a part each."""
        return torch.split(theirs, [self.units * rows for rows in self.rows])

    def _turned(self, theirs: Tensor) -> Tensor:
        return theirs.t() if self.transposed and theirs.dim() == 2 else theirs
