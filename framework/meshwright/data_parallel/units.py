"""Layers that ZeRO-3 gathers in one message, and those that it keeps until backward.

parallel.unit_layers = 2           (a b) (c d) (e)       a message for each unit, in forward and in backward
parallel.keep_gathered = ["e"]     forward frees the others; backward gathers them again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Units(NamedTuple):
    """Units of layers that are gathered in one message."""

    num_layers: int = 1
    """Consecutive layers of a unit."""
    kept: frozenset[str] = frozenset()
    """Names of the layers whose weights stay gathered from a forward to the next backward."""

    def of(self, names: Iterable[str]) -> Iterator[tuple[list[str], bool]]:
        """Yield the layers of each unit of a stage, and whether it stays gathered. A layer that is
        kept and one that is not are in different units.
        """
        unit: list[str] = []
        for name in names:
            if unit and (
                len(unit) == self.num_layers or (unit[0] in self.kept) != (name in self.kept)
            ):
                yield unit, unit[0] in self.kept
                unit = []
            unit.append(name)
        if unit:
            yield unit, unit[0] in self.kept


ONE_LAYER = Units()
"""A unit of each layer, none kept."""
