"""The grid of ranks, pp x dp x cp x tp, tp innermost: pure arithmetic,
so that it runs for 16,384 ranks on a laptop.

rank = ((pp_rank x dp + dp_rank) x cp + cp_rank) x tp + tp_rank

  pp=2 dp=2 tp=2 on 2 nodes of 4         A tp group is a run of neighbours inside one node. The replicas
  node 0   | 0 1 | 2 3 |   pp_rank 0     of a stage come next. Neighbouring stages are the farthest
  node 1   | 4 5 | 6 7 |   pp_rank 1     apart, because they exchange the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """Parallelism axes, outermost first."""

    PP = "pp"
    DP = "dp"
    CP = "cp"
    TP = "tp"


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Coordinates of a rank, one per axis. By keyword only: four integers in the wrong order would
    still be the coordinates of some rank.
    """

    pp_rank: int = 0
    dp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0

    def along(self, axis: Axis) -> int:
        """Return the coordinate along an axis."""
        coordinate: int = getattr(self, f"{axis}_rank")
        return coordinate


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Degree of each axis, from which ranks, coordinates and groups follow."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Not an axis: experts are distributed over ep neighbouring ranks of a stage, first over tp,
    then cp, then dp.
    """

    @classmethod
    def of(cls, degrees: Sequence[int]) -> Grid:
        """Return the grid of (pp, dp, tp, cp, ep): the order in configurations and saved files,
        older than cp and ep. The last ones may be missing.
        """
        return cls(**dict(zip(("pp", "dp", "tp", "cp", "ep"), degrees, strict=False)))

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """Degrees (pp, dp, tp, cp, ep), which :meth:`of` reads."""
        return self.pp, self.dp, self.tp, self.cp, self.ep

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
        """Number of replicas, ranks with the same weights. cp ranks count: they split tokens,
        not weights.
        """
        return self.dp * self.cp

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first; cp only if its degree is above 1."""
        # most runs have no cp: their texts and pictures do not name it
        return tuple(axis for axis in Axis if axis is not Axis.CP or self.cp > 1)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        return ((at.pp_rank * self.dp + at.dp_rank) * self.cp + at.cp_rank) * self.tp + at.tp_rank

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank, the inverse of :meth:`rank`."""
        assert 0 <= rank < self.size, (rank, self.size)
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        degree: int = getattr(self, axis)
        return degree

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, in its order;
        contains ``rank``.
        """
        degree = self.degree(axis)
        # the distance between neighbours along the axis: the rank of coordinate 1 there
        stride = self.rank(Coordinates(**{f"{axis}_rank": 1}))
        # from the rank back to coordinate 0 of this axis
        first = rank - rank // stride % degree * stride
        return tuple(range(first, first + degree * stride, stride))

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return the dp x cp ranks with the weights of ``rank``, in order; contains ``rank``."""
        ranks_per_stage = self.num_replicas * self.tp
        first = rank - rank % ranks_per_stage + rank % self.tp
        return tuple(range(first, first + ranks_per_stage, self.tp))
