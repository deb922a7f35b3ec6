"""States in 8 bits, quantised in blocks with one scale each (Dettmers et al. 2021,
arXiv:2110.02861).

    state      | 256 elements ..... | 256 elements ..... |     one byte each: the number of a level in [-1, 1]
    scales     | largest            | largest            |     factor of the levels of a block

The levels are the paper's dynamic tree: seven decades, with most levels in the largest. Unlike the
paper's they contain both 1 and -1, so that saving and loading gives the same bytes. Squares, as a
second moment has them, are kept as their roots, which span half as many decades. Only an exact zero
of them is stored as zero, so that no step divides by a second moment that was rounded to zero.

A block lies inside one row of a matrix, wherever the matrix is cut, so all layouts round alike.
The states of vectors, and of matrices whose rows are no multiple of the block size, keep their
dtype. See :func:`with_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.config.optimizers import Form
from meshwright.errors import ConfigError
from meshwright.optimizer.codecs import Allocate, Piece, StateCodec, memory_beside
from meshwright.parameters import ParameterInfo

DECADES = 7
SMALLEST = 8
"""Block sizes, in elements, are multiples of this."""


def signed_levels() -> Tensor:
    """Return the signed levels: (255,) float64, rising from -1 to 1.

    Each sign has 2^(6-d) levels in decade d; zero is a level too.
    """
    positive = _decades(lambda d: 2 ** (DECADES - 1 - d))
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])


def unsigned_levels() -> Tensor:
    """Return the unsigned levels: (255,) float64, rising from 0 to 1.

    Decade d has 2^(7-d) levels; zero is a level too.
    """
    return torch.cat([torch.zeros(1, dtype=torch.float64), _decades(lambda d: 2 ** (DECADES - d))])


def _decades(levels_of: Callable[[int], int]) -> Tensor:
    found = [
        10.0**-d * torch.linspace(0.1, 1.0, levels_of(d) + 1, dtype=torch.float64)[1:]
        for d in reversed(range(DECADES))
    ]
    return torch.cat(found)


class QuantisedState(NamedTuple):
    """One quantised state of a flat tensor of n elements."""

    codes: Tensor
    """(n,) uint8, the number of each element's level."""
    scales: Tensor
    """(blocks,) largest absolute value of each block,
    in float32 or the wider dtype of the weights.
    """

    def part(self, start: int, stop: int, block: int) -> QuantisedState:
        """Return views of elements [start, stop);
        ``start`` must be the first element of a block.
        """
        return QuantisedState(
            self.codes[start:stop], self.scales[start // block : -(-stop // block)]
        )


class Quantiser:
    """Quantiser for one set of levels, on one device, in one dtype.

    The level of a number is looked up by the upper 16 bits of its float32. Numbers that share them
    have at most one border between two levels among them, so that one comparison remains. With a
    binary search a step took twice as long.
    """

    def __init__(
        self, levels: Tensor, device: torch.device, dtype: torch.dtype, *, is_signed: bool
    ) -> None:
        self.levels = levels.to(device, dtype)
        borders = ((levels[1:] + levels[:-1]) / 2).to(dtype)
        if not is_signed:
            borders[0] = 0.0  # only zero is rounded to zero
        upper = torch.arange(2**16, dtype=torch.int32)
        first = (upper << 16).view(torch.float32)
        last = (upper << 16 | 0xFFFF).view(torch.float32)
        least = torch.minimum(first, last).to(dtype)
        most = torch.maximum(first, last).to(dtype)
        code = torch.bucketize(least.nan_to_num(0.0), borders)
        there = torch.cat([borders, torch.full((1,), torch.inf, dtype=dtype)])[code]
        self._code = code.to(device, torch.uint8)
        """(65536,) uint8, level of the smallest number with these upper 16 bits."""
        self._border = torch.where(there <= most, there, torch.inf).to(device)
        """(65536,) border above which a number with these upper bits has the next level;
        Inf if there is none.
        """

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Levels (255,), codes (65536,) and borders (65536,)."""
        return self.levels, self._code, self._border

    def widen(self, state: QuantisedState, block: int) -> Tensor:
        """Decode (dequantise) a state to (n,) numbers."""
        numbers = self.levels.index_select(0, state.codes.int())
        whole = len(numbers) // block * block
        numbers[:whole].view(-1, block).mul_(state.scales[: whole // block, None])
        numbers[whole:].mul_(state.scales[whole // block :])
        return numbers

    def narrow(self, numbers: Tensor, into: QuantisedState, block: int) -> None:
        """Quantise (n,) numbers into ``into``: each to its nearest level,
        relative to the largest of its block.
        """
        blocks = pad(numbers, (0, -len(numbers) % block)).view(-1, block)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        into.scales.copy_(largest)
        divisor = largest.clamp_min(torch.finfo(largest.dtype).tiny)
        shares = (blocks / divisor[:, None]).flatten()[: len(numbers)]
        upper = (shares.float().view(torch.int32) >> 16) & 0xFFFF
        above = shares > self._border.index_select(0, upper)
        torch.add(self._code.index_select(0, upper), above, out=into.codes)


class BlockCodec(StateCodec):
    """States in 8 bits, in blocks of the shard with one scale each."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # whole blocks
        self.together = {
            device: max(size // block_size, 1) * block_size
            for device, size in StateCodec.together.items()
        }
        self._quantisers: dict[tuple[Form, torch.device, torch.dtype], Quantiser] = {}

    def quantiser(self, form: Form, device: torch.device, dtype: torch.dtype) -> Quantiser:
        """Return the quantiser of a form, for numbers of this dtype."""
        key = form, device, dtype
        if key not in self._quantisers:
            is_signed = form == "signed"
            levels = signed_levels() if is_signed else unsigned_levels()
            self._quantisers[key] = Quantiser(levels, device, dtype, is_signed=is_signed)
        return self._quantisers[key]

    def allocate(self, shard: Tensor, allocate: Allocate | None) -> QuantisedState:
        """Return codes and scales of zeros."""
        memory = memory_beside(shard, allocate)
        num_blocks = -(-shard.numel() // self.block_size)
        codes = memory(shard.numel(), torch.uint8)
        return QuantisedState(codes, memory(num_blocks, computed_in(shard)))

    def decode(
        self, stored: QuantisedState, piece: Piece, form: Form, dtype: torch.dtype
    ) -> Tensor:
        """Decode a piece."""
        part = stored.part(piece.start, piece.stop, self.block_size)
        quantiser = self.quantiser(form, part.codes.device, dtype)
        numbers = quantiser.widen(part, self.block_size)
        return numbers.square_() if form == "square" else numbers

    def encode(
        self, numbers: Tensor, stored: QuantisedState, piece: Piece, form: Form, index: int
    ) -> None:
        """Quantise a piece; of squares their roots."""
        part = stored.part(piece.start, piece.stop, self.block_size)
        if form == "square":
            numbers = numbers.sqrt()
        quantiser = self.quantiser(form, numbers.device, numbers.dtype)
        quantiser.narrow(numbers, part, self.block_size)

    def load(self, numbers: Tensor, stored: QuantisedState, form: Form) -> None:
        """Quantise all numbers: the same bits where blocks begin at the same elements."""
        self.encode(numbers, stored, Piece(0, numbers.numel()), form, 0)

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of a code, and an element's share of its scale."""
        return 1 + itemsize / self.block_size


@cache
def table_bytes(forms: frozenset[Form], wide: bool) -> int:
    """Return the bytes of the quantisers' lookup tables, which all parameters of a process share.

    Args:
        forms: those of the states that are stored in blocks.
        wide: for float64 weights; otherwise float32.
    """
    dtype = torch.float64 if wide else torch.float32
    codec = BlockCodec(SMALLEST)
    quantisers = [codec.quantiser(form, torch.device("cpu"), dtype) for form in forms]
    return sum(table.nbytes for quantiser in quantisers for table in quantiser.tables)


def computed_in(shard: Tensor) -> torch.dtype:
    """Return the dtype of decoded numbers and of scales."""
    return torch.promote_types(shard.dtype, torch.float32)


def is_in_blocks(shape: Sequence[int], block_size: int) -> bool:
    """Return whether a parameter of this global shape has 8-bit state:
    a matrix with rows of whole blocks.
    """
    return len(shape) >= 2 and math.prod(shape[1:]) % block_size == 0


def with_blocks(infos: Mapping[str, ParameterInfo], block_size: int) -> dict[str, ParameterInfo]:
    """Return ``infos`` with ``is_eight_bit`` set for the parameters that have 8-bit state.

    A cut along dim 0 keeps blocks intact.

    Raises:
        ConfigError: tp cuts the rows of a parameter in the middle of a block, so that this layout
            would round differently from others. Names the parameter, and the largest block size
            that fits.
    """
    found = {
        name: info._replace(is_eight_bit=is_in_blocks(info.global_shape, block_size))
        for name, info in infos.items()
    }
    rows = {
        name: math.prod(info.local_shape[1:]) for name, info in found.items() if info.is_eight_bit
    }
    bad = next((name for name, row in rows.items() if row % block_size), None)
    if bad is not None:
        fits = next(
            (size for size in range(block_size - SMALLEST, 0, -SMALLEST) if _fits(infos, size)),
            None,
        )
        advice = "Choose another layout" if fits is None else f"Set optimizer.block_size = {fits}"
        raise ConfigError(
            "MW-OPTIM-001",
            f"optimizer.block_size = {block_size} does not divide a row of {bad}, of which tp"
            f" leaves {rows[bad]} elements on a rank: blocks would be others than in other layouts,"
            f" and so would the numbers. {advice}, or leave 8-bit states out",
        )
    return found


def _fits(infos: Mapping[str, ParameterInfo], block_size: int) -> bool:
    """Return whether some parameters have 8-bit state with blocks of this size,
    and tp cuts no block.
    """
    kept = [info for info in infos.values() if is_in_blocks(info.global_shape, block_size)]
    return bool(kept) and not any(math.prod(info.local_shape[1:]) % block_size for info in kept)
