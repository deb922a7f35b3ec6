"""Adafactor on flat shards of any layout (Shazeer and Stern 2018): the updates of ``torch.optim.Adafactor``.

    v    running mean of squared gradients: of a matrix r_i c_j / mean(r), with r of its rows and c of its columns; of a
         vector that of its elements
    u    g / sqrt(v), divided by max(1, RMS(u) / clip_threshold)
    w    w (1 - rate decay) - u max(1e-3, RMS(w)) min(rate, 1 / sqrt(step))

The holders of a weight, the ranks with parts of it, are a shard group of replicas, times tp where tp cuts it. Each sums
its squares by row and column; one all-reduce adds these sums, a second one those of u^2. r, c and the squares of
vectors are whole on every holder: about a thousandth of a weight's bytes. The sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.mesh.comm import Group
from meshwright.optimizer.pieces import pieces_of
from meshwright.optimizer.rounded import ShardPlace, whole_positions
from meshwright.parameters import ParameterInfo

ROWS, COLUMNS, SQUARES = "row_var", "col_var", "exp_avg_sq"
"""Names of the states: of weights of two and more dims, and of vectors."""
SMALLEST_RMS = 1e-3
"""Least root mean square by which the step of a weight is scaled, so that a weight of zeros can move."""
TOGETHER = {"cpu": 2**18, "cuda": 2**24}
"""Elements updated at a time, by device: each takes about 12 bytes of temporaries."""


def factor_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the states of a weight of this global shape."""
    return {ROWS: shape[:-1], COLUMNS: (*shape[:-2], shape[-1])} if len(shape) > 1 else {SQUARES: shape}


def factor_infos(config: Optimizer, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, ParameterInfo]]:
    """Yield name and metadata of the states of a trained weight of this global shape; none for other optimizers."""
    if config.name == "adafactor" and config.builder is None:
        for kind, of in factor_shapes(shape).items():
            yield kind, ParameterInfo(name, of)


def factor_elements(config: Optimizer, shape: tuple[int, ...]) -> int:
    """Return the number of elements of the states of :func:`factor_infos`."""
    return sum(math.prod(info.global_shape) for _, info in factor_infos(config, "", shape))


def step_bytes(factors: int, numel: int, device: str) -> int:
    """Return the temporary bytes of a step: sums of ``factors`` elements, and one piece of a shard of ``numel``."""
    return 8 * factors + 12 * min(numel, TOGETHER[device])


class Factor(NamedTuple):
    """One state of one weight: whole, on every rank that holds a part of the weight."""

    kind: str
    info: ParameterInfo
    tensor: Tensor


class _Block(NamedTuple):
    """Rows [start, stop) of this rank's part of a weight of two or more dims."""

    start: int
    stop: int
    rows: Tensor
    """Index of each row in the whole weight, all dims but the last flattened."""
    columns: Tensor
    """Index of each column in the whole weight."""
    lengths: list[int]
    """Numbers of consecutive rows in one matrix (the last two dims of a weight of three or more)."""
    matrices: Tensor
    """Index of the matrix for each of ``lengths``."""


class _Weight:
    """One weight: its states, and [begin, end), the elements of its tp part that lie in this rank's shard."""

    def __init__(self, info: ParameterInfo, first: int, place: ShardPlace, like: Tensor) -> None:
        size = math.prod(info.local_shape)
        low, high = place.offset - first, place.offset + like.numel() - first
        self.info, self.begin, self.end = info, min(max(low, 0), size), min(max(high, 0), size)
        self.at = self.begin - low
        """Position of the first of these elements in the shard."""
        self.numel = math.prod(info.global_shape)
        self.states = {name: like.new_zeros(shape) for name, shape in factor_shapes(info.global_shape).items()}
        self.is_factored, self.width = len(info.global_shape) > 1, info.local_shape[-1] if info.local_shape else 1

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of the weight's elements in a shard."""
        return shard[self.at : self.at + self.end - self.begin]

    def blocks(self, device: torch.device) -> Iterator[_Block]:
        """Yield the blocks of rows that hold this rank's elements."""
        *outer, height, width = self.info.global_shape
        local_height, last = self.info.local_shape[-2], -(-self.end // self.width)
        together = max(TOGETHER.get(device.type, TOGETHER["cpu"]) // self.width, 1)
        columns = whole_positions(self.info, torch.arange(self.width, device=device)) % width
        for start in range(self.begin // self.width, last if self.begin < self.end else 0, together):
            stop = min(start + together, last)
            rows = whole_positions(self.info, torch.arange(start, stop, device=device) * self.width) // width
            rows = rows.clamp_(max=math.prod(outer) * height - 1)  # padding is zero, wherever it is added
            edges = [start, *range((start // local_height + 1) * local_height, stop, local_height), stop]
            matrices = torch.stack([rows[edge - start] for edge in edges[:-1]]) // height
            yield _Block(start, stop, rows, columns, [b - a for a, b in pairwise(edges)], matrices)

    def rows_of(self, shard: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return (block (rows, width) with zeros outside of the shard, its elements in the shard, their view in it).

        If the whole block lies in the shard, all three are views of the shard.
        """
        low, high = max(block.start * self.width, self.begin), min(block.stop * self.width, self.end)
        inside, size = self.of(shard)[low - self.begin : high - self.begin], (block.stop - block.start) * self.width
        if high - low == size:
            return inside.view(-1, self.width), inside, inside
        whole = inside.new_zeros(size)
        view = whole[low - block.start * self.width : high - block.start * self.width]
        view.copy_(inside)
        return whole.view(-1, self.width), inside, view

    def add_squares(self, gradient: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add this rank's squared gradients to ``sums``: name of a state -> its elements, flat, float64."""
        if not self.is_factored:
            positions = torch.arange(self.begin, self.end, device=gradient.device)
            places = whole_positions(self.info, positions).clamp_(max=self.numel - 1)
            sums[SQUARES].index_add_(0, places, self.of(gradient).double().square())
            return
        for block in self.blocks(gradient.device):
            squares = self.rows_of(gradient, block)[0].square()
            sums[ROWS].index_add_(0, block.rows, squares.sum(1, dtype=torch.float64))
            by_matrix = torch.stack([part.sum(0, dtype=torch.float64) for part in torch.split(squares, block.lengths)])
            places = block.matrices[:, None] * self.info.global_shape[-1] + block.columns
            sums[COLUMNS].index_add_(0, places.flatten(), by_matrix.flatten())

    def average(self, sums: Mapping[str, Tensor], share: float) -> None:
        """Update the running means by the means of ``sums`` over the whole weight, with weight ``share``."""
        counts = {ROWS: self.info.global_shape[-1:], COLUMNS: self.info.global_shape[-2:-1], SQUARES: ()}
        for name, state in self.states.items():
            state.lerp_((sums[name] / math.prod(counts[name])).to(state.dtype).view_as(state), share)

    def divide(self, gradient: Tensor, eps: float) -> Tensor:
        """Divide this rank's gradient by sqrt(v) in place; return the sum of squares of the result, () float64."""
        total = torch.zeros((), dtype=torch.float64, device=gradient.device)
        if not self.is_factored:
            own = self.of(gradient)
            places = whole_positions(self.info, torch.arange(self.begin, self.end, device=own.device))
            variance = self.states[SQUARES].view(-1)[places.clamp_(max=self.numel - 1)]
            return total + own.mul_(variance.clamp_(min=eps * eps).rsqrt_()).double().square().sum()
        height, width = self.info.global_shape[-2:]
        rows = self.states[ROWS].view(-1, height)
        rows = (rows / rows.mean(1, keepdim=True).clamp_(min=eps)).view(-1)
        columns = self.states[COLUMNS].view(-1, width)
        for block in self.blocks(gradient.device):
            whole, inside, view = self.rows_of(gradient, block)
            of_rows, of_columns = (
                torch.split(rows[block.rows], block.lengths),
                columns[block.matrices][:, block.columns],
            )
            for index, part in enumerate(torch.split(whole, block.lengths)):
                part.mul_((of_rows[index][:, None] * of_columns[index]).clamp_(min=eps * eps).rsqrt_())
            if view is not inside:
                inside.copy_(view)
            total += torch.linalg.vector_norm(view, dtype=torch.float64).square()
        return total


class ShardedAdafactor(torch.optim.Optimizer):
    """Adafactor over flat shards, with means over whole parameters."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: Optimizer,
        places: Mapping[Tensor, ShardPlace],
        holders: Mapping[Tensor, Group],
        tied: Mapping[Tensor, Group],
    ) -> None:
        """Build the optimizer. No communication.

        Args:
            groups: each with "lr", "weight_decay" and "eps".
            places: place of each parameter in its bucket.
            holders: ranks with parts of each parameter's weights.
            tied: ranks with copies of a parameter that is one tied weight; this rank alone may have several.
        """
        super().__init__(groups, {})
        self._config, self.taken, self._tied = config, 0, tied
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._weights = {
            p: [_Weight(info, first, places[p], p) for info, first in places[p].slots] for p in self._group_of
        }
        together: dict[str, list[Tensor]] = {}
        for parameter in self._group_of:
            together.setdefault(repr(holders[parameter]), []).append(parameter)
        by_holders = [(holders[parameters[0]], parameters) for parameters in together.values()]
        self._together = sorted(by_holders, key=lambda each: each[0].size)  # one order on all stages, for tied weights

    def factors(self, parameter: Tensor) -> Iterator[Factor]:
        """Yield the states of the weights of a shard."""
        for weight in self._weights[parameter]:
            for kind, tensor in weight.states.items():
                yield Factor(kind, ParameterInfo(weight.info.name, tuple(tensor.shape)), tensor)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter. Gradients are overwritten. Collective over the holders and over tied ranks; blocks.

        Bytes on the wire per rank: 2 M (n-1)/n, M = 8 bytes for each row, column and element of a vector, and 16 for
        each weight; with n > 2, M (m-1)/m more of a weight tied over m pipeline ranks.
        """
        self.taken += 1
        for holders, parameters in self._together:
            weights = [(parameter, weight) for parameter in parameters for weight in self._weights[parameter]]
            if weights:
                self._step(holders, weights)

    def _step(self, holders: Group, weights: list[tuple[Tensor, _Weight]]) -> None:
        """Step the weights with the same holders."""
        sizes = [[1, *(math.prod(state.shape) for state in weight.states.values())] for _, weight in weights]
        flat = torch.zeros(sum(map(sum, sizes)), dtype=torch.float64, device=weights[0][0].device)
        parts = torch.split(flat, [sum(each) for each in sizes])
        copies = self._copies(weights) if holders.size > 2 else []
        sums = []
        for (_, weight), part, each in zip(weights, parts, sizes, strict=True):
            sums.append(dict(zip(weight.states, torch.split(part, each)[1:], strict=True)))
        for index, (parameter, weight) in enumerate(weights):
            assert parameter.grad is not None
            weight.add_squares(parameter.grad, sums[index])
            parts[index][0] = _square_sum(weight.of(parameter))
        holders.all_reduce(flat).wait()
        _take_first(copies, parts)
        squares = torch.stack([part[0] for part in parts])
        numels = torch.cat([flat.new_full((1,), weight.numel) for _, weight in weights])  # filled without a host wait
        rms_of_weights, divided = squares.div(numels).sqrt_(), torch.zeros_like(squares)
        for index, (parameter, weight) in enumerate(weights):
            assert parameter.grad is not None
            weight.average(sums[index], self.taken**self._config.beta2_decay)
            divided[index] = weight.divide(parameter.grad, self._group_of[parameter]["eps"])
        holders.all_reduce(divided).wait()
        _take_first(copies, torch.split(divided, 1))
        clip = divided.div_(numels).sqrt_().div_(self._config.clip_threshold).clamp_(min=1.0)
        factors = rms_of_weights.clamp_(min=SMALLEST_RMS).div_(clip)
        for index, (parameter, weight) in enumerate(weights):
            rate, decay = (self._group_of[parameter][key] for key in ("lr", "weight_decay"))
            assert parameter.grad is not None
            factor = factors[index].to(parameter.dtype) * min(rate, self.taken**-0.5)
            weight.of(parameter).mul_(1 - rate * decay)
            weight.of(parameter).addcmul_(weight.of(parameter.grad), factor, value=-1.0)

    def _copies(self, weights: list[tuple[Tensor, _Weight]]) -> list[tuple[Group, list[int]]]:
        """Return (ranks with copies, indices of this rank's copies) of each tied weight, by name."""
        found: dict[str, tuple[Group, list[int]]] = {}
        for index, (parameter, weight) in enumerate(weights):
            if parameter in self._tied:
                found.setdefault(weight.info.name, (self._tied[parameter], []))[1].append(index)
        return [found[name] for name in sorted(found)]


# NOTE [sums of tied weights] An all-reduce adds three and more addends in an order that depends on their place in the
# message. A tied weight has another place on each stage, so its copies would drift apart by one bit. All take the
# sums of the first copy. The sum of two does not depend on their order: no message.


def _take_first(copies: list[tuple[Group, list[int]]], sums: Sequence[Tensor]) -> None:
    """Replace the sums of each copy of a tied weight by those of the first. Collective over the tied ranks; blocks.

    ``sums``: of each weight, contiguous. The order is by name, the same on all ranks. See NOTE [sums of tied weights].
    """
    for ranks, (first, *others) in copies:
        ranks.broadcast(sums[first]).wait()
        for other in others:
            sums[other].copy_(sums[first])


def _square_sum(elements: Tensor) -> Tensor:
    """Return the sum of squares of (numel,) elements, () float64."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for (piece,) in pieces_of(elements)]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
