"""Weights that ZeRO-3 has gathered at a layer's turn: of its unit, of the one that is prefetched,
and of those that stay gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright_plan.planner.memory.footprint import BackwardPoint


class StageUnits(NamedTuple):
    """Units of a stage, with the numbers of elements of its layers."""

    points: Sequence[BackwardPoint]
    """Path of a whole backward: last layer to first, then the end."""
    sizes: tuple[tuple[int, bool], ...] = ()
    """Number of layers of each unit, first to last, and whether it stays gathered between forward
    and backward. Empty: a unit of each layer.
    """
    was_gathered: bool = False
    """True if an earlier forward has gathered those that stay, and no backward followed."""

    @property
    def units(self) -> list[tuple[range, bool]]:
        """Layers of each unit, and whether it stays gathered."""
        found, start = [], 0
        for size, is_kept in self.sizes or [(1, False)] * (len(self.points) - 1):
            found.append((range(start, start + size), is_kept))
            start += size
        return found

    def _layer(self, layer: int) -> BackwardPoint:
        return self.points[len(self.points) - 2 - layer]

    def _gathered(self, layers: range) -> int:
        return sum(self._layer(layer).gathered for layer in layers)

    def _trained(self, layers: range) -> int:
        return sum(self._layer(layer).elements for layer in layers)

    def _unit_of(self, layer: int) -> int:
        return next(at for at, (layers, _) in enumerate(self.units) if layer in layers)

    @property
    def kept(self) -> int:
        """Number of weights that stay gathered between forward and backward."""
        return sum(self._gathered(layers) for layers, is_kept in self.units if is_kept)

    def in_forward(self, layer: int) -> int:
        """Return the number of gathered weights in the forward of a layer."""
        own, total = self._unit_of(layer), 0
        for at, (layers, is_kept) in enumerate(self.units):
            stays = is_kept and (at < own or self.was_gathered)
            total += self._gathered(layers) if at in (own, own + 1) or stays else 0
        return total

    def in_backward(self, index: int, *, with_own: bool = True) -> int:
        """Return the number of gathered weights at a point of the path; ``with_own``: with those of
        its unit.
        """
        if index >= len(self.points) - 1:
            return 0
        own, total = self._unit_of(len(self.points) - 2 - index), 0
        for at, (layers, is_kept) in enumerate(self.units[: own + with_own]):
            stays = is_kept and self.was_gathered
            total += self._gathered(layers) if at >= own - 1 or stays else 0
        return total

    def late(self, index: int) -> int:
        """Return the number of gradients of later layers of the same unit, not reduced yet."""
        if index >= len(self.points) - 1:
            return 0
        layer = len(self.points) - 2 - index
        layers, _ = self.units[self._unit_of(layer)]
        return self._trained(range(layer + 1, layers.stop))

    def after(self, index: int) -> int | None:
        """Return the number of trained elements of the unit after that of a point; None: it is the
        last unit.
        """
        layer = len(self.points) - 2 - index
        unit = self._unit_of(layer) if layer >= 0 else -1
        if unit + 1 == len(self.units):
            return None
        return self._trained(self.units[unit + 1][0])

    def reduced_at(self, index: int) -> int:
        """Return the number of trained elements of the unit whose reduction a point's layer
        completes; 0: other layers of the unit follow.
        """
        layer = len(self.points) - 2 - index
        layers, _ = self.units[self._unit_of(layer)]
        return self._trained(layers) if layer == layers.start else 0

    def end(self, *, is_last: bool) -> int:
        """Return the number of trained elements of the first unit, or of the last one."""
        return self._trained(self.units[-1 if is_last else 0][0])
