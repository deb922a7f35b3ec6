"""Muon on flat shards of any layout: momentum, orthogonalised matrix by matrix (Jordan et al. 2024,
"Muon").

    momentum        each rank, on its shard of a bucket: element by element
    all-to-all      the parts of each matrix are sent to its home, the one holder that orthogonalises it
    Newton-Schulz   at home, on the whole matrix
    all-to-all      the parts of the update are sent back
    weights         each rank, on its shard; the usual all-gather follows

The holders of a matrix, the ranks with parts of it, are a shard group of replicas, times tp for
weights that tp cuts. Other shard groups do the same on their copies. This runs once per step, after
gradients are summed and clipped, in any ZeRO stage. AdamW steps the other weights while the first
messages are on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.config.optimizers import StateSpec
from meshwright.mesh.comm import CollectiveHandle
from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.layout import Shards
from meshwright.optimizer.matrix_plan import (
    Matrix,
    MatrixShard,
    batch_size,
    find_homes,
    matrices_of,
    tp_part,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 of one iteration: Jordan's, steep at zero,
with singular values within 0.7 .. 1.2.
"""
EPSILON = 1e-7
"""Least norm that a matrix is divided by: matrices with a smaller norm stay small."""
MOMENTUM = "momentum"
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
}
"""Factor on the update of an m x n matrix: Jordan's, and that of Liu et al.
2025 (arXiv:2502.16982), eq. 4.
"""


@torch.no_grad()
def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix (m, n), or each of a batch (k, m, n), orthogonalised approximately,
    in its dtype.

    Each iteration maps every singular value x to a x + b x^3 + c x^5.
    """
    a, b, c = COEFFICIENTS
    multiply = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    norm = x.norm() if matrix.dim() == 2 else torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class _Run(NamedTuple):
    """Contiguous elements [start, stop) of this rank's shard number ``shard`` that belong
    to one matrix.
    """

    shard: int
    start: int
    stop: int
    scale: float


class _Resident(NamedTuple):
    """Matrix whose home is this rank."""

    matrix: Matrix
    tp: int
    runs: list[tuple[int, int]]
    """(offset, length) of each holder's elements in the received tensor."""


def _in_batches(residents: Sequence[_Resident]) -> list[list[_Resident]]:
    """Group matrices in batches: those of experts that have one shape together,
    every other one alone.
    """
    batches: list[list[_Resident]] = []
    alike: dict[tuple[int, ...], list[_Resident]] = {}
    for resident in residents:
        matrix = resident.matrix
        if matrix.is_of_expert and resident.tp == 1:
            alike.setdefault((*matrix.shape, *matrix.num_columns), []).append(resident)
        else:
            batches.append([resident])
    for (rows, columns, *_), group in alike.items():
        size = batch_size(rows * columns, len(group))
        batches += [group[first : first + size] for first in range(0, len(group), size)]
    return batches


def _of_columns(weights: Tensor, num_columns: Sequence[int], steps: int) -> Tensor:
    """Run Newton-Schulz on matrices (k, m, n), on each part of ``num_columns`` by itself; ():
    on each whole.
    """
    if len(num_columns) < 2:
        return newton_schulz(weights, steps)
    # (k, m, units, parts, columns)
    units = weights.view(*weights.shape[:2], -1, len(num_columns), num_columns[0])
    parts = units.permute(0, 3, 1, 2, 4)
    alone = parts.reshape(-1, weights.shape[1], weights.shape[2] // len(num_columns))
    updates = newton_schulz(alone, steps).view(parts.shape)
    return updates.permute(0, 2, 3, 1, 4).reshape(weights.shape)


class MatrixExchange:
    """Exchange of the matrices of some flat shards with their homes, among one group of holders."""

    def __init__(self, shards: Sequence[MatrixShard], scale: str) -> None:
        """Plan the exchange. No communication.

        Every holder passes the shards of the same buckets, in the same order.
        """
        self.holders = shards[0].holders
        self.dtype = shards[0].dtype
        matrices = [
            (k, slot.start, matrix)
            for k, shard in enumerate(shards)
            for slot in shard.slots
            for matrix in matrices_of(slot.info)
        ]
        self.homes = find_homes([matrix.flops for *_, matrix in matrices], self.holders.size)
        me, ranks = self.holders.rank, range(self.holders.size)
        self._runs: list[_Run] = []
        """This rank's runs, by home."""
        self._sizes = [0] * len(ranks)
        """Elements that this rank sends to each holder."""
        self._received = [0] * len(ranks)
        """Elements that this rank receives from each holder."""
        counts: list[tuple[Matrix, int, list[int]]] = []
        for index in sorted(range(len(matrices)), key=lambda index: (self.homes[index], index)):
            k, start, matrix = matrices[index]
            shard, home = shards[k], self.homes[index]
            first, stop, part = shard.share(matrix, start, me)
            offset = start - me // shard.tp * shard.per_shard
            factor = SCALES[scale](*matrix.stepped)
            for low, high in part.runs(first, stop):
                self._runs.append(_Run(k, offset + low, offset + high, factor))
                self._sizes[home] += high - low
            if home == me:
                lengths = [shard.count_of(matrix, start, holder) for holder in ranks]
                assert sum(lengths) == math.prod(matrix.shape), (matrix, lengths)
                counts.append((matrix, shard.tp, lengths))
        self._batches = _in_batches(self._place(counts))

    def _place(self, counts: Sequence[tuple[Matrix, int, list[int]]]) -> list[_Resident]:
        """Return the matrices whose home is this rank,
        with the offsets of their elements as received.
        """
        residents = [_Resident(matrix, tp, []) for matrix, tp, _ in counts]
        at = 0
        for holder in range(self.holders.size):
            for resident, (*_, lengths) in zip(residents, counts, strict=True):
                resident.runs.append((at, lengths[holder]))
                at += lengths[holder]
                self._received[holder] += lengths[holder]
        return residents

    def send(self, shards: Sequence[Tensor]) -> CollectiveHandle:
        """Post the all-to-all of the matrices in these flat shards (numel/n,) to their homes.
        Does not block.

        Bytes on the wire per rank: M (n-1)/n, M = bytes of this rank's elements of matrices, n =
        holders.
        """
        self._sent = shards[0].new_empty(sum(self._sizes), dtype=self.dtype)
        pieces = torch.split(self._sent, [run.stop - run.start for run in self._runs])
        for piece, run in zip(pieces, self._runs, strict=True):
            piece.copy_(shards[run.shard][run.start : run.stop])
        is_alone = self.holders.size == 1  # sends to itself, in the same order
        self._at_home = self._sent if is_alone else self._sent.new_empty(sum(self._received))
        return self.holders.all_to_all(self._at_home, self._sent, self._received, self._sizes)

    def orthogonalise(self, steps: int) -> CollectiveHandle:
        """Run Newton-Schulz on the matrices at home here, and post the all-to-all back.
        Does not block.

        Bytes on the wire per rank: M (n-1)/n, M = bytes of the matrices at home here.
        """
        for batch in self._batches:
            if len(batch) > 1 or batch[0].matrix.num_columns:
                self._orthogonalise_together(batch, steps)
            else:
                self._orthogonalise(batch[0], steps)
        return self.holders.all_to_all(self._sent, self._at_home, self._sizes, self._received)

    def _orthogonalise(self, resident: _Resident, steps: int) -> None:
        """Run Newton-Schulz on one matrix whose home is this rank, in place.
        Frees all temporary memory.
        """
        matrix, tp, runs = resident
        pieces = [self._at_home[at : at + length] for at, length in runs]
        shapes = [tp_part(matrix, tp_rank, tp).shape for tp_rank in range(tp)]
        dim = 0 if matrix.info.slice is None else matrix.info.slice.dim
        # holders are ordered by shard, then tp: every tp-th piece belongs to one tp rank.
        # The parts have no name: they would live through Newton-Schulz, beside the whole matrix.
        whole = torch.cat(
            [torch.cat(pieces[t::tp]).view(shape) for t, shape in enumerate(shapes)], dim
        )
        update = newton_schulz(whole, steps)
        for t, part in enumerate(torch.split(update, [shape[dim] for shape in shapes], dim)):
            lengths = [length for _, length in runs[t::tp]]
            torch._foreach_copy_(pieces[t::tp], torch.split(part.flatten(), lengths))

    def _orthogonalise_together(self, batch: Sequence[_Resident], steps: int) -> None:
        """Run Newton-Schulz on experts' matrices of one shape (m, n) whose home is this rank,
        in place.
        """
        pieces = [
            [self._at_home[at : at + length] for at, length in resident.runs] for resident in batch
        ]
        together = self._at_home.new_empty((len(batch), *batch[0].matrix.shape))
        for whole, runs in zip(together, pieces, strict=True):
            torch.cat(runs, out=whole.view(-1))
        num_columns = batch[0].matrix.num_columns
        for whole, runs in zip(_of_columns(together, num_columns, steps), pieces, strict=True):
            torch._foreach_copy_(runs, torch.split(whole.flatten(), [len(run) for run in runs]))

    def subtract(self, weights: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Subtract the received updates from flat shards of weights. ``rates``:
        learning rate of each shard.
        """
        pieces = torch.split(self._sent, [run.stop - run.start for run in self._runs])
        for run, piece in zip(self._runs, pieces, strict=True):
            weights[run.shard][run.start : run.stop].add_(
                piece, alpha=-rates[run.shard] * run.scale
            )
        del self._sent, self._at_home


class ShardedMuon(FlatAdamW):
    """Muon on the flat shards of matrices, torch's AdamW on all others.

    Weight decay is AdamW's: weights shrink by learning rate x decay, independent of
    ``optimizer.scale``.
    """

    @classmethod
    def build(cls, groups: list[dict[str, Any]], keys: Optimizer, shards: Shards) -> Self:
        """Build the optimizer over parameter groups. No communication."""
        built = super().build(groups, keys, shards)
        built.place(shards.of("matrices"), keys)
        return built

    def place(self, matrices: Mapping[Tensor, MatrixShard], config: Optimizer) -> None:
        """Find the homes of the matrices. ``matrices``: of each parameter that has some."""
        self._config = config
        self._of_matrices = config.spec.matrix_states
        self._stepped_as_matrices = frozenset(matrices)
        self._group_of = {
            parameter: group for group in self.param_groups for parameter in group["params"]
        }
        together: dict[tuple[str, int], list[Tensor]] = {}
        for parameter, shard in matrices.items():
            together.setdefault((repr(shard.holders), shard.tp), []).append(parameter)
        self.exchanges: list[tuple[list[Tensor], MatrixExchange]] = []
        """Parameters with the same holders, and their exchange."""
        for parameters in together.values():
            shards = [matrices[parameter] for parameter in parameters]
            self.exchanges.append((parameters, MatrixExchange(shards, config.scale)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. Gradients of matrices may be overwritten.

        Collective over the holders of the matrices; blocks.
        """
        handles = [
            exchange.send([self._moment(p) for p in parameters])
            for parameters, exchange in self.exchanges
        ]
        for parameters, _ in self.exchanges:
            for parameter in parameters:
                parameter.grad = None  # AdamW skips it
        super().step()  # the others, while the messages are on the wire
        for handle in handles:
            handle.wait()
        handles = [exchange.orthogonalise(self._config.ns_steps) for _, exchange in self.exchanges]
        for (parameters, exchange), handle in zip(self.exchanges, handles, strict=True):
            rates = [self._group_of[parameter]["lr"] for parameter in parameters]
            for parameter, rate in zip(parameters, rates, strict=True):
                parameter.mul_(1 - rate * self._group_of[parameter]["weight_decay"])
            handle.wait()
            exchange.subtract(parameters, rates)

    def _moment(self, parameter: Tensor) -> Tensor:
        """Update the momentum of a shard; return the tensor to orthogonalise,
        with ``nesterov`` the look-ahead.
        """
        gradient, state = parameter.grad, self.state[parameter]
        momentum = self._config.muon_momentum
        assert gradient is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        mean: Tensor = state[MOMENTUM]
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp_(mean, momentum) if self._config.nesterov else mean

    def states_of(self, shard: Tensor) -> tuple[StateSpec, ...]:
        is_of_matrices = shard in self._stepped_as_matrices
        return self._of_matrices if is_of_matrices else super().states_of(shard)

    def count(self, shard: Tensor, steps: int) -> dict[str, Any]:
        is_of_matrices = shard in self._stepped_as_matrices
        return {} if is_of_matrices else super().count(shard, steps)
