"""Plan of whole matrices in flat shards: which elements of a shard belong to which matrix,
and the matrices' homes.

    rank 0    | layer 0 ........ | layer 1        a flat bucket, cut anywhere
    rank 1      .... | layer 2 ......... | 0 |

Messages to a home need no indices. A shard is a contiguous run of a weight's elements. Its share of
a matrix is then a contiguous run of the matrix's elements, and the shares of successive shards
follow each other. Their lengths have a closed form in the global shape, the slice and the cut,
which every rank evaluates for all others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from meshwright.errors import ModelError
from meshwright.mesh.comm import Group
from meshwright.parameters import ParameterInfo

TOGETHER = 2**24
"""Most elements in a batch of experts' matrices of one shape. Batches amortise kernel launches over
small matrices. A single matrix may be larger.
"""


def with_matrices(
    infos: Mapping[str, ParameterInfo],
    matrices: Mapping[str, tuple[int, ...]],
    canonical: Callable[[str], str],
) -> dict[str, ParameterInfo]:
    """Return ``infos`` with the field ``matrix``. ``matrices``:
    canonical name -> rows of the parts; others: None.

    Raises:
        ModelError: several tp ranks share a unit of a weight, and cut it at other rows than its
            matrices.
    """
    for name, info in infos.items():
        rows = matrices.get(canonical(name))
        if not rows or info.slice is None or not info.slice.several:
            continue
        lengths = [stop - start for start, stop in info.slice.several]
        whole = [length * sum(rows) for length in lengths]
        if [part_rows * info.slice.padded for part_rows in rows] != whole:
            raise ModelError(
                "MW-OPTIM-008",
                f"model.matrices gives {name} {rows}, and of its unit in model.shared_units a tp"
                f" rank holds {lengths} rows: give the same parts in both, or use a smaller"
                " parallel.tp",
            )
    return {
        name: info._replace(matrix=matrices.get(canonical(name))) for name, info in infos.items()
    }


def iteration_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of one Newton-Schulz iteration: 4 m^2 n + 2 m^3 for m the shorter side,
    n the longer.
    """
    m, n = sorted((rows, columns))
    return 4 * m * m * n + 2 * m**3


class Matrix(NamedTuple):
    """One matrix: the rows of one part of a weight's repeating unit,
    such as all rows of k in a fused qkv.

    A weight of three dims (E, rows, columns), as of experts, is a batch of E weights of two dims.
    """

    info: ParameterInfo
    part: int
    place: int = 0
    """Position in the batch, counted from the first that this rank holds."""

    @property
    def span(self) -> tuple[int, int]:
        """Rows [first, stop) of the matrix's weight of two dims, counted over the batch."""
        rows = self.info.global_shape[-2]
        return self.place * rows, (self.place + 1) * rows

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Rows of a unit, and [first, stop) of the part in it."""
        parts = self.info.matrix
        if not parts or self.num_columns:  # all rows are one part
            parts = (self.info.global_shape[-2],)
        first = sum(parts[: self.part])
        return sum(parts), first, first + parts[self.part]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        unit, first, stop = self.bounds
        rows, columns = self.info.global_shape[-2:]
        return rows // unit * (stop - first), columns

    @property
    def is_of_expert(self) -> bool:
        """True for a matrix of a weight of three dims."""
        return len(self.info.global_shape) == 3

    @property
    def num_columns(self) -> tuple[int, ...]:
        """Columns of the equal parts of a unit of a transposed weight, each part one matrix; ():
        it is one matrix.
        """
        return tuple(-columns for columns in self.info.matrix or () if columns < 0)

    @property
    def stepped(self) -> tuple[int, int]:
        """Outputs and inputs of each matrix that Newton-Schulz runs on: this one,
        or one part of its columns.
        """
        rows, columns = self.shape
        if self.num_columns:
            return columns // len(self.num_columns), rows
        return rows, columns

    @property
    def flops(self) -> int:
        """FLOPs of one Newton-Schulz iteration."""
        return max(1, len(self.num_columns)) * iteration_flops(*self.stepped)

    def rows_before(self, row: int) -> int:
        """Return the number of rows of the matrix among the first ``row`` rows of the weight."""
        unit, first, stop = self.bounds
        row = min(max(row - self.span[0], 0), self.info.global_shape[-2])
        return row // unit * (stop - first) + min(max(row % unit - first, 0), stop - first)


def matrices_of(info: ParameterInfo) -> list[Matrix]:
    """Return the matrices of a weight, of experts those on this rank;
    empty for weights that AdamW steps.
    """
    if info.matrix is None:
        return []
    batch = info.local_shape[0] if len(info.global_shape) == 3 else 1
    # with parts of columns it is exchanged as a whole
    parts = sum(rows > 0 for rows in info.matrix) or 1
    return [Matrix(info, part, place) for place in range(batch) for part in range(parts)]


class TpPart(NamedTuple):
    """A matrix on one tp rank: rows [start, stop) of the weight, and its columns there; flat,
    row by row.
    """

    matrix: Matrix
    start: int
    stop: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix on the tp rank."""
        return self.matrix.rows_before(self.stop) - self.matrix.rows_before(self.start), self.width

    def elements_before(self, position: int) -> int:
        """Return the elements of the matrix among the first ``position`` of the rank's part
        of the weight.
        """
        matrix = self.matrix
        row, column = divmod(position, self.width)
        at = min(self.start + row, self.stop)
        in_whole_rows = (matrix.rows_before(at) - matrix.rows_before(self.start)) * self.width
        is_inside = at < self.stop and matrix.rows_before(at + 1) > matrix.rows_before(at)
        return in_whole_rows + column if is_inside else in_whole_rows

    def runs(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of the matrix in elements [first, stop)
        of the rank's part of the weight.
        """
        unit, low, high = self.matrix.bounds
        first_row, last_row = self.matrix.span
        first_unit = max(self.start // unit * unit, first_row)
        runs = []
        for row in range(first_unit, min(self.stop, last_row), unit):
            begin = max((max(row + low, self.start) - self.start) * self.width, first)
            end = min((min(row + high, self.stop) - self.start) * self.width, stop)
            if begin < end:
                runs.append((begin, end))
        return runs


def tp_part(matrix: Matrix, tp_rank: int, tp: int) -> TpPart:
    """Return a matrix on a tp rank; with ``tp`` = 1 the whole.
    Derives every rank's slice from this rank's.
    """
    shape = matrix.info.local_shape if matrix.info.sliced_over == "ep" else matrix.info.global_shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if tp == 1 or matrix.info.slice is None:
        return TpPart(matrix, 0, rows, columns)
    dim = matrix.info.slice.dim
    padded = matrix.info.slice.padded
    # the rank holds one unit of shorter parts, and each is the next run of its matrix
    if matrix.info.slice.several:
        parts = tuple(b - a for a, b in matrix.info.slice.several) if matrix.info.matrix else ()
        of_rank = matrix.info._replace(global_shape=(padded, columns), matrix=parts)
        return TpPart(matrix._replace(info=of_rank), 0, padded, columns)
    length = matrix.info.global_shape[dim]
    start, stop = min(tp_rank * padded, length), min((tp_rank + 1) * padded, length)
    if dim == 0:
        return TpPart(matrix, start, stop, columns)
    return TpPart(matrix, 0, rows, stop - start)


def find_homes(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the home of each matrix, an index among its holders: the costliest first,
    each on the least busy.

    The busiest rank has at most 4/3 of the least possible work (Graham 1969).
    """
    homes = [0] * len(costs)
    work = [(0, rank) for rank in range(num_ranks)]  # a heap: the least busy first
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        busy, homes[index] = work[0]
        heapq.heapreplace(work, (busy + costs[index], homes[index]))
    return homes


def batch_size(numel: int, number: int) -> int:
    """Return the number of matrices in one batch, of ``number`` with ``numel`` elements each:
    at most TOGETHER.
    """
    return max(1, min(number, TOGETHER // numel))


class MatrixSlot(NamedTuple):
    """One weight in a flat bucket; ``start``: index of its first element there."""

    info: ParameterInfo
    start: int


class MatrixShard(NamedTuple):
    """Matrices of one flat bucket, and the ranks that hold it."""

    slots: tuple[MatrixSlot, ...]
    numel: int
    """Elements of the full bucket, which the shards divide evenly."""
    holders: Group
    """Ranks with parts of the matrices: replicas,
    each with all its tp ranks where tp cuts the weights.
    """
    tp: int
    """Number of tp ranks of each replica among the holders."""
    dtype: torch.dtype
    """Dtype of Newton-Schulz and of the messages."""

    @property
    def per_shard(self) -> int:
        """Elements of one shard."""
        return self.numel // (self.holders.size // self.tp)

    def share(self, matrix: Matrix, slot_start: int, holder: int) -> tuple[int, int, TpPart]:
        """Return (first, stop, part): a holder's elements [first, stop) of a weight's tp part;
        the matrix in it.
        """
        shard, tp_rank = divmod(holder, self.tp)
        size = math.prod(matrix.info.local_shape)
        shard_start = shard * self.per_shard - slot_start
        first = min(max(shard_start, 0), size)
        stop = min(max(shard_start + self.per_shard, 0), size)
        return first, stop, tp_part(matrix, tp_rank, self.tp)

    def count_of(self, matrix: Matrix, slot_start: int, holder: int) -> int:
        """Return the number of elements of a matrix in a holder's shard."""
        first, stop, part = self.share(matrix, slot_start, holder)
        return part.elements_before(stop) - part.elements_before(first)
