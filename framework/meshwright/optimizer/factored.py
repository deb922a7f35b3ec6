"""Adafactor on flat shards of any layout (Shazeer and Stern 2018):
the updates of ``torch.optim.Adafactor``.

    v    running mean of squared gradients: of a matrix r_i c_j / mean(r), with r of its rows and c of its columns; of a
         vector that of its elements
    u    g / sqrt(v), divided by max(1, RMS(u) / clip_threshold)
    w    w (1 - rate decay) - u max(1e-3, RMS(w)) min(rate, 1 / sqrt(step))

The holders of a weight, the ranks with parts of it, are a shard group of replicas, times tp where
tp cuts it. Each sums its squares by row and column; one all-reduce adds these sums, a second one
those of u^2. r, c and the squares of vectors are whole on every holder: about a thousandth of a
weight's bytes. The sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.kernels import device_kind
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders
from meshwright.optimizer.codecs import StateCodec
from meshwright.optimizer.layout import Shards
from meshwright.optimizer.rounded import ShardPlace, whole_positions
from meshwright.optimizer.shard_states import Factor, ShardStates
from meshwright.parameters import ParameterInfo

ROWS, COLUMNS, SQUARES = "row_var", "col_var", "exp_avg_sq"
"""Names of the states: of weights of two and more dims, and of vectors."""
SMALLEST_RMS = 1e-3
"""Least root mean square by which the step of a weight is scaled,
so that a weight of zeros can move.
"""
TOGETHER = {"cpu": 2**18, "cuda": 2**24}
"""Elements updated at a time, by device: each takes about 12 bytes of temporaries."""


def factor_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the states of a weight of this global shape."""
    if len(shape) > 1:
        return {ROWS: shape[:-1], COLUMNS: (*shape[:-2], shape[-1])}
    return {SQUARES: shape}


def factor_infos(
    config: Optimizer, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, ParameterInfo]]:
    """Yield name and metadata of the states of a trained weight of this global shape;
    none for other optimizers.
    """
    if config.spec.unit == "parameter":
        for kind, of in factor_shapes(shape).items():
            yield kind, ParameterInfo(name, of)


def factor_elements(config: Optimizer, shape: tuple[int, ...]) -> int:
    """Return the number of elements of the states of :func:`factor_infos`."""
    return sum(math.prod(info.global_shape) for _, info in factor_infos(config, "", shape))


def step_bytes(factors: int, numel: int, device: str) -> int:
    """Return the temporary bytes of a step: sums of ``factors`` elements,
    and one piece of a shard of ``numel``.
    """
    return 8 * factors + 12 * min(numel, TOGETHER[device])


class _Block(NamedTuple):
    """Rows [start, stop) of this rank's part of a weight of two or more dims."""

    start: int
    stop: int
    rows: Tensor
    """Index of each row in the whole weight, all dims but the last flattened."""
    columns: Tensor
    """Index of each column in the whole weight."""
    lengths: list[int]
    """Numbers of consecutive rows in one matrix (the last two dims of a weight
    of three or more).
    """
    matrices: Tensor
    """Index of the matrix for each of ``lengths``."""


class _Weight:
    """One weight: its states, and [begin, end),
    the elements of its tp part that lie in this rank's shard.
    """

    def __init__(self, info: ParameterInfo, first: int, place: ShardPlace, like: Tensor) -> None:
        self.info = info
        size = math.prod(info.local_shape)
        low = place.offset - first
        self.begin = min(max(low, 0), size)
        self.end = min(max(low + like.numel(), 0), size)
        self.at = self.begin - low
        """Position of the first of these elements in the shard."""
        self.numel = math.prod(info.global_shape)
        shapes = factor_shapes(info.global_shape)
        self.states = {name: like.new_zeros(shape) for name, shape in shapes.items()}
        self.is_factored = len(info.global_shape) > 1
        self.width = info.local_shape[-1] if info.local_shape else 1

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of the weight's elements in a shard."""
        return shard[self.at : self.at + self.end - self.begin]

    def blocks(self, device: torch.device) -> Iterator[_Block]:
        """Yield the blocks of rows that hold this rank's elements."""
        if self.begin == self.end:
            return
        *outer, height, width = self.info.global_shape
        num_rows = math.prod(outer) * height
        local_height = self.info.local_shape[-2]
        together = max(TOGETHER.get(device.type, TOGETHER["cpu"]) // self.width, 1)
        columns = whole_positions(self.info, torch.arange(self.width, device=device)) % width
        last = -(-self.end // self.width)
        for start in range(self.begin // self.width, last, together):
            stop = min(start + together, last)
            first_elements = torch.arange(start, stop, device=device) * self.width
            rows = whole_positions(self.info, first_elements) // width
            rows = rows.clamp_(max=num_rows - 1)  # padding is zero, wherever it is added
            next_matrix = (start // local_height + 1) * local_height
            edges = [start, *range(next_matrix, stop, local_height), stop]
            lengths = [after - before for before, after in pairwise(edges)]
            matrices = torch.stack([rows[edge - start] for edge in edges[:-1]]) // height
            yield _Block(start, stop, rows, columns, lengths, matrices)

    def rows_of(self, shard: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return (block (rows, width) with zeros outside of the shard, its elements in the shard,
        their view in it).

        If the whole block lies in the shard, all three are views of the shard.
        """
        first = block.start * self.width
        size = (block.stop - block.start) * self.width
        low = max(first, self.begin)
        high = min(first + size, self.end)
        inside = self.of(shard)[low - self.begin : high - self.begin]
        if high - low == size:
            return inside.view(-1, self.width), inside, inside
        whole = inside.new_zeros(size)
        view = whole[low - first : high - first]
        view.copy_(inside)
        return whole.view(-1, self.width), inside, view

    def add_squares(self, gradient: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add this rank's squared gradients to ``sums``: name of a state -> its elements, flat,
        float64.
        """
        if not self.is_factored:
            positions = torch.arange(self.begin, self.end, device=gradient.device)
            places = whole_positions(self.info, positions).clamp_(max=self.numel - 1)
            sums[SQUARES].index_add_(0, places, self.of(gradient).double().square())
            return
        for block in self.blocks(gradient.device):
            squares = self.rows_of(gradient, block)[0].square()
            sums[ROWS].index_add_(0, block.rows, squares.sum(1, dtype=torch.float64))
            parts = torch.split(squares, block.lengths)
            by_matrix = torch.stack([part.sum(0, dtype=torch.float64) for part in parts])
            places = block.matrices[:, None] * self.info.global_shape[-1] + block.columns
            sums[COLUMNS].index_add_(0, places.flatten(), by_matrix.flatten())

    def average(self, sums: Mapping[str, Tensor], share: float) -> None:
        """Update the running means by the means of ``sums`` over the whole weight,
        with weight ``share``.
        """
        counts = {
            ROWS: self.info.global_shape[-1:],
            COLUMNS: self.info.global_shape[-2:-1],
            SQUARES: (),
        }
        for name, state in self.states.items():
            mean = sums[name] / math.prod(counts[name])
            state.lerp_(mean.to(state.dtype).view_as(state), share)

    def divide(self, gradient: Tensor, eps: float) -> Tensor:
        """Divide this rank's gradient by sqrt(v) in place; return the sum of squares of the result,
        () float64.
        """
        total = torch.zeros((), dtype=torch.float64, device=gradient.device)
        if not self.is_factored:
            own = self.of(gradient)
            positions = torch.arange(self.begin, self.end, device=own.device)
            places = whole_positions(self.info, positions).clamp_(max=self.numel - 1)
            variance = self.states[SQUARES].view(-1)[places]
            own.mul_(variance.clamp_(min=eps * eps).rsqrt_())
            return total + own.double().square().sum()
        height, width = self.info.global_shape[-2:]
        rows = self.states[ROWS].view(-1, height)
        rows = (rows / rows.mean(1, keepdim=True).clamp_(min=eps)).view(-1)
        columns = self.states[COLUMNS].view(-1, width)
        for block in self.blocks(gradient.device):
            whole, inside, view = self.rows_of(gradient, block)
            of_rows = torch.split(rows[block.rows], block.lengths)
            of_columns = columns[block.matrices][:, block.columns]
            for index, part in enumerate(torch.split(whole, block.lengths)):
                variance = of_rows[index][:, None] * of_columns[index]
                part.mul_(variance.clamp_(min=eps * eps).rsqrt_())
            if view is not inside:
                inside.copy_(view)
            total += torch.linalg.vector_norm(view, dtype=torch.float64).square()
        return total


class ShardedAdafactor(ShardStates, torch.optim.Optimizer):
    """Adafactor over flat shards, with means over whole parameters."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer, shards: Shards) -> None:
        """Build the optimizer over parameter groups, each with "lr", "weight_decay" and "eps".
        No communication.
        """
        super().__init__(groups, {})
        self._config = config
        self._holders: Mapping[Tensor, Holders] = shards.of("holders")
        """Holders of the weights of each parameter; this rank alone may have several copies of
        a tied one.
        """
        places = shards.of("place")
        self.taken = 0
        """Steps taken."""
        self._group_of = {
            parameter: group for group in self.param_groups for parameter in group["params"]
        }
        self._weights: dict[Tensor, list[_Weight]] = {}
        by_parts: dict[str, tuple[Group, list[Tensor]]] = {}
        for parameter in self._group_of:
            place, group = places[parameter], self._holders[parameter].parts
            assert group is not None
            self._weights[parameter] = [
                _Weight(info, first, place, parameter) for info, first in place.slots
            ]
            by_parts.setdefault(repr(group), (group, []))[1].append(parameter)
        # one order on all stages, for tied weights
        self._together = sorted(by_parts.values(), key=lambda pair: pair[0].size)

    # states by shard; see the base class

    def names_of(self, shard: Tensor) -> tuple[str, ...]:
        return ()

    def read(self, shard: Tensor) -> dict[str, Tensor]:
        return {}

    def restore(self, shard: Tensor, states: Mapping[str, Tensor], steps: int) -> None:
        """Set the number of steps; the states are restored by :meth:`factors`."""
        self.taken = steps

    def factors(self, shard: Tensor) -> Iterator[Factor]:
        for weight in self._weights[shard]:
            for kind, tensor in weight.states.items():
                yield Factor(kind, ParameterInfo(weight.info.name, tuple(tensor.shape)), tensor)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter. Gradients are overwritten.
        Collective over the holders and over tied ranks; blocks.

        Bytes on the wire per rank: 2 M (n-1)/n, M = 8 bytes for each row, column and element of a
        vector, and 16 for each weight; with n > 2, M (m-1)/m more of a weight tied over m pipeline
        ranks.
        """
        self.taken += 1
        for holders, parameters in self._together:
            weights = [
                (parameter, weight)
                for parameter in parameters
                for weight in self._weights[parameter]
            ]
            if weights:
                self._step(holders, weights)

    def _step(self, holders: Group, weights: list[tuple[Tensor, _Weight]]) -> None:
        """Step the weights with the same holders."""
        # of each weight: the sum of its squares, then those of its gradient's rows and columns
        sizes = [[1, *(state.numel() for state in weight.states.values())] for _, weight in weights]
        totals = [sum(of_weight) for of_weight in sizes]
        flat = torch.zeros(sum(totals), dtype=torch.float64, device=weights[0][0].device)
        parts = torch.split(flat, totals)
        copies = self._copies(weights) if holders.size > 2 else []  # NOTE [sums of tied weights]
        sums: list[dict[str, Tensor]] = []
        for (_, weight), part, of_weight in zip(weights, parts, sizes, strict=True):
            _, *of_states = torch.split(part, of_weight)
            sums.append(dict(zip(weight.states, of_states, strict=True)))
        for index, (parameter, weight) in enumerate(weights):
            assert parameter.grad is not None
            weight.add_squares(parameter.grad, sums[index])
            parts[index][0] = _square_sum(weight.of(parameter))
        holders.all_reduce(flat).wait()
        _take_first(copies, parts)
        squares = torch.stack([part[0] for part in parts])
        # filled without a host wait
        numels = torch.cat([flat.new_full((1,), weight.numel) for _, weight in weights])
        rms_of_weights = squares.div(numels).sqrt_()
        divided = torch.zeros_like(squares)
        for index, (parameter, weight) in enumerate(weights):
            assert parameter.grad is not None
            weight.average(sums[index], self.taken**self._config.beta2_decay)
            divided[index] = weight.divide(parameter.grad, self._group_of[parameter]["eps"])
        holders.all_reduce(divided).wait()
        _take_first(copies, torch.split(divided, 1))
        clip = divided.div_(numels).sqrt_().div_(self._config.clip_threshold).clamp_(min=1.0)
        factors = rms_of_weights.clamp_(min=SMALLEST_RMS).div_(clip)
        for index, (parameter, weight) in enumerate(weights):
            group = self._group_of[parameter]
            rate = group["lr"]
            assert parameter.grad is not None
            factor = factors[index].to(parameter.dtype) * min(rate, self.taken**-0.5)
            weight.of(parameter).mul_(1 - rate * group["weight_decay"])
            weight.of(parameter).addcmul_(weight.of(parameter.grad), factor, value=-1.0)

    def _copies(self, weights: list[tuple[Tensor, _Weight]]) -> list[tuple[Group, list[int]]]:
        """Return (ranks with copies, indices of this rank's copies) of each tied weight,
        by name.
        """
        copies: dict[str, tuple[Group, list[int]]] = {}
        for index, (parameter, _) in enumerate(weights):
            tie = self._holders[parameter].tied
            if tie is not None:
                copies.setdefault(tie.name, (tie.ranks, []))[1].append(index)
        return [copies[name] for name in sorted(copies)]


# NOTE [sums of tied weights] An all-reduce adds three and more addends in an order that depends on
# their place in the message. A tied weight has another place on each stage, so its copies would
# drift apart by one bit. All take the sums of the first copy. The sum of two does not depend on
# their order: no message.


def _take_first(copies: list[tuple[Group, list[int]]], sums: Sequence[Tensor]) -> None:
    """Replace the sums of each copy of a tied weight by those of the first.
    Collective over the tied ranks; blocks.

    ``sums``: of each weight, contiguous. The order is by name, the same on all ranks. See NOTE
        [sums of tied weights].
    """
    for ranks, (first, *others) in copies:
        ranks.broadcast(sums[first]).wait()
        for other in others:
            sums[other].copy_(sums[first])


def _square_sum(elements: Tensor) -> Tensor:
    """Return the sum of squares of (numel,) elements, () float64."""
    size = StateCodec.together.get(device_kind(elements), StateCodec.together["cpu"])
    pieces = torch.split(elements, size)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
