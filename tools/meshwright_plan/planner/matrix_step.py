"""Step of an optimizer of matrices on one pipeline rank: time and temporary memory of the fullest home of its matrices.

holders       ranks with parts of a matrix: a shard group of replicas, times tp where tp cuts the weight; with
              parallel.ep > 1 those of an expert are a shard group of its own replicas
home          the holder that runs its Newton-Schulz: costliest first, each on the least busy (optimizer/matrix_plan.py)
seconds       the all-to-all to the homes, Newton-Schulz of the busiest home, its all-to-all back
temporaries   the message to the homes, the matrices at home, and the largest matrix in its iterations
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.config import Optimizer, Parallel, Train, expert_shard_factor, shard_factor
from meshwright.optimizer import batch_size, find_homes, iteration_flops, matrices_of
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import PerformanceModel


class MatrixSize(NamedTuple):
    """Sides of a whole matrix."""

    rows: int
    columns: int
    is_cut: bool
    """True if tp cuts its weight."""
    is_of_expert: bool = False
    """True if Newton-Schulz processes it in a batch with others of its shape."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns


MatrixCounts = tuple[tuple[MatrixSize, int], ...]
"""Sizes of a stage's matrices, and their numbers."""


class Exchange(NamedTuple):
    """All-to-all of the matrices with the same holders."""

    num_holders: int
    stride: int
    """Distance in ranks between two holders."""
    numel: int
    """Elements of all matrices."""
    homes: tuple[MatrixCounts, ...]
    """Matrices at each home; homes with equal matrices are listed once."""
    home_of: tuple[int, ...]
    """Holder -> index of its matrices in ``homes``."""


class MatrixHolders(NamedTuple):
    """Ranks that hold parts of the same matrices, of which each takes some home."""

    num: int
    stride: int
    """Distance in ranks between two holders."""


class HolderGroups(NamedTuple):
    """Holders of a stage's matrices, by kind."""

    whole: MatrixHolders
    """Holders of matrices that tp does not cut."""
    cut: MatrixHolders
    """Holders of those that tp cuts."""
    of_expert: MatrixHolders | None
    """Holders of experts' matrices, with ``parallel.ep`` > 1; None: as others."""


def sizes_of(info: ParameterInfo) -> tuple[MatrixSize, ...]:
    """Return the sizes of a weight's matrices; none unless it has some."""
    return tuple(
        MatrixSize(*matrix.stepped, info.slice is not None, matrix.is_of_expert)
        for matrix in matrices_of(info)
        for _ in matrix.num_columns or (0,)
    )


def count_sizes(sizes: Iterable[MatrixSize]) -> MatrixCounts:
    """Return the sizes with their numbers."""
    return tuple(sorted(Counter(sizes).items()))


@lru_cache(maxsize=4096)
def plan_exchanges(stages: tuple[MatrixCounts, ...], groups: HolderGroups) -> tuple[Exchange, ...]:
    """Return the exchanges of a pipeline rank with these stages, as its optimizer plans them."""
    together: dict[tuple[MatrixHolders, bool], list[MatrixSize]] = {}
    for size in (size for stage in stages for size, number in stage for _ in range(number)):
        apart = size.is_of_expert and groups.of_expert is not None
        holders = groups.of_expert if apart else groups.cut if size.is_cut else groups.whole
        assert holders is not None
        together.setdefault((holders, apart), []).append(size)
    return tuple(_exchange(holders, sizes) for (holders, _), sizes in together.items())


def _exchange(holders: MatrixHolders, sizes: Sequence[MatrixSize]) -> Exchange:
    at_home: list[list[MatrixSize]] = [[] for _ in range(holders.num)]
    homes = find_homes([iteration_flops(size.rows, size.columns) for size in sizes], holders.num)
    for size, home in zip(sizes, homes, strict=True):
        at_home[home].append(size)
    counts = list(map(count_sizes, at_home))
    unlike = {each: index for index, each in enumerate(dict.fromkeys(counts))}
    home_of = tuple(unlike[each] for each in counts)
    return Exchange(*holders, sum(size.numel for size in sizes), tuple(unlike), home_of)


def exchanges_of(parallel: Parallel, stages: Sequence[MatrixCounts]) -> tuple[Exchange, ...]:
    """Return the exchanges of a pipeline rank with these stages; none unless it has matrices."""
    shards, tp, ep = shard_factor(parallel), parallel.tp, parallel.ep
    of_expert = MatrixHolders(expert_shard_factor(parallel), ep) if ep > 1 else None
    return plan_exchanges(
        tuple(stages),
        HolderGroups(MatrixHolders(shards, tp), MatrixHolders(shards * tp, 1), of_expert),
    )


def itemsize_of(train: Train) -> int:
    """Return the bytes per element of Newton-Schulz and its messages."""
    return 4 if train.dtype == "float16" else DTYPES[train.dtype].itemsize


def temporary_bytes(parallel: Parallel, train: Train, stages: Sequence[MatrixCounts]) -> int:
    """Return the peak bytes of a step besides those at rest, on the fullest rank.

    Newton-Schulz of a matrix of m x n elements, m <= n: it, two iterates, and two products of m x
    m. Experts: a batch.
    """
    return _temporary_bytes(train, exchanges_of(parallel, stages))


def fullest_rank(parallel: Parallel, train: Train, stages: Sequence[MatrixCounts]) -> int:
    """Return the rank of a pipeline rank's ranks, counted from 0,
    whose matrices take most memory in a step.

    Homes are even in FLOPs, not in elements. Only ranks with tp, cp and ep rank 0 are considered.
    """
    exchanges = exchanges_of(parallel, stages)

    def num_bytes(rank: int) -> int:
        own = []
        for each in exchanges:
            home = each.homes[each.home_of[rank // each.stride % each.num_holders]]
            own.append(each._replace(homes=(home,)))
        return _temporary_bytes(train, own)

    ranks = range(0, parallel.num_replicas * parallel.tp, parallel.cp * parallel.tp)
    return max((rank for rank in ranks if rank % parallel.ep == 0), key=num_bytes)


def _temporary_bytes(train: Train, exchanges: Sequence[Exchange]) -> int:
    elements = largest = 0
    for exchange in exchanges:
        at_home = max(_numel(home) for home in exchange.homes)
        elements += exchange.numel // exchange.num_holders + (
            at_home if exchange.num_holders > 1 else 0
        )
        for size, number in (each for home in exchange.homes for each in home):
            together = batch_size(size.numel, number) if size.is_of_expert else 1
            largest = max(
                largest, together * (3 * size.numel + 2 * min(size.rows, size.columns) ** 2)
            )
    return (elements + largest) * itemsize_of(train)


def newton_schulz_flops(
    parallel: Parallel, optimizer: Optimizer, stages: Sequence[MatrixCounts]
) -> int:
    """Return the FLOPs of Newton-Schulz in a step of a pipeline rank with these stages,
    on its busiest home.
    """
    return optimizer.ns_steps * sum(
        max(
            sum(number * iteration_flops(size.rows, size.columns) for size, number in home)
            for home in exchange.homes
        )
        for exchange in exchanges_of(parallel, stages)
    )


def matrix_step_s(
    parallel: Parallel,
    optimizer: Optimizer,
    train: Train,
    stages: Sequence[MatrixCounts],
    performance: PerformanceModel,
) -> float:
    """Return the seconds of the exchanges and of Newton-Schulz, on the busiest rank."""
    total, itemsize = 0.0, itemsize_of(train)
    own_traffic = optimizer.spec.matrix_traffic
    for exchange in exchanges_of(parallel, stages):
        n = exchange.num_holders
        link, at_home = performance.group_link(n, exchange.stride), max(map(_numel, exchange.homes))
        # measured links have no all-to-all; an all-gather is as large
        for numel in (exchange.numel / n, at_home):
            total += link.seconds(numel * itemsize * (n - 1) / n, 1, "all_gather")
        total += max(
            sum(
                number * newton_schulz_s(optimizer, train, size, performance)
                for size, number in home
            )
            for home in exchange.homes
        )
        total += exchange.numel / n * (own_traffic + 2 * itemsize) / performance.memory_bytes_per_s
    return total


def newton_schulz_s(
    optimizer: Optimizer, train: Train, size: MatrixSize, performance: PerformanceModel
) -> float:
    """Return the seconds of Newton-Schulz on one matrix,
    with its gather from parts and scatter of the update.
    """
    itemsize = itemsize_of(train)
    dtype = "float32" if train.dtype == "float16" else train.dtype
    m, n = sorted((size.rows, size.columns))

    def seconds(
        kind: WorkKind, elements: int, shape: tuple[int, int, int, int] = (1, 0, 0, 0)
    ) -> float:
        work = Work(kind, 2.0 * shape[1] * shape[2] * shape[3], float(elements * itemsize), shape)
        return performance.work_s(work, dtype, backward=False)

    iteration = (
        seconds(WorkKind.PRODUCT, m * n + m * m, (1, m, m, n))
        + seconds(WorkKind.PRODUCT, 2 * m * m, (1, m, m, m))
        + seconds(WorkKind.PRODUCT, 2 * m * n + m * m, (1, m, n, m))
    )
    gathered, divided, scattered = 2 * m * n, 3 * m * n, 2 * m * n
    around = sum(seconds(WorkKind.MEMORY, elements) for elements in (gathered, divided, scattered))
    return optimizer.ns_steps * iteration + around


def _numel(counts: MatrixCounts) -> int:
    """Return the elements of all matrices."""
    return sum(size.numel * number for size, number in counts)
