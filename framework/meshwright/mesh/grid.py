"""The grid of ranks, pp x dp x cp x tp, tp innermost: pure arithmetic, so that it runs for 16,384 ranks on a laptop.

rank = ((pp_rank x dp + dp_rank) x cp + cp_rank) x tp + tp_rank

  pp=2 dp=2 tp=2 on 2 nodes of 4         A tp group is a run of neighbours inside one node. The replicas
  node 0   | 0 1 | 2 3 |   pp_rank 0     of a stage come next. Neighbouring stages are the farthest
  node 1   | 4 5 | 6 7 |   pp_rank 1     apart, because they exchange the fewest bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Axis(StrEnum):
    """Parallelism axes, outermost first."""

    PP = "pp"
    DP = "dp"
    CP = "cp"
    TP = "tp"


class Coordinates(NamedTuple):
    """Coordinates of a rank, one per axis. Fields are not in the order of the axes: cp is last, and optional."""

    pp_rank: int
    dp_rank: int
    tp_rank: int
    cp_rank: int = 0


class Grid(NamedTuple):
    """Degree of each axis, from which ranks, coordinates and groups follow. Fields are not in the order of the axes."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    """Not an axis: experts are distributed over ep neighbouring ranks of a stage, first over tp, then cp, then dp."""

    def __str__(self) -> str:
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return " x ".join(f"{axis} {self.degree(axis)}" for axis in self.axes) + experts

    @property
    def layout(self) -> str:
        """Short name of the layout, such as ``pp2 dp2 tp2``."""
        return " ".join(f"{axis}{self.degree(axis)}" for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.num_replicas * self.tp

    @property
    def num_replicas(self) -> int:
        """Number of replicas, ranks with the same weights. cp ranks count: they split tokens, not weights."""
        return self.dp * self.cp

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first; cp only if its degree is above 1."""
        return tuple(axis for axis in Axis if axis is not Axis.CP or self.cp > 1)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        return ((at.pp_rank * self.dp + at.dp_rank) * self.cp + at.cp_rank) * self.tp + at.tp_rank

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank, the inverse of :meth:`rank`."""
        assert 0 <= rank < self.size, (rank, self.size)
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        return Coordinates(*divmod(rest, self.dp), tp_rank, cp_rank)

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        degree: int = getattr(self, axis)
        return degree

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, in its order; contains ``rank``."""
        degree, stride = self.degree(axis), self.rank(Coordinates(0, 0, 0)._replace(**{f"{axis}_rank": 1}))
        first = rank - rank // stride % degree * stride
        return tuple(range(first, first + degree * stride, stride))

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return the dp x cp ranks with the weights of ``rank``, in order; contains ``rank``."""
        first = rank - rank % (self.num_replicas * self.tp) + rank % self.tp
        return tuple(range(first, first + self.num_replicas * self.tp, self.tp))
