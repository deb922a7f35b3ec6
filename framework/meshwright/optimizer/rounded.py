"""States in bfloat16, rounded stochastically: 2 instead of 4 bytes per number.

    widen     state.to(float32)           the optimizer's update, in float32
    round     bits of float32 + r, r uniform in 0 .. 2^16 - 1, then the lower 16 bits are dropped

Rounded to nearest, a second moment would stop changing: with beta2 = 0.999 a step changes it by
about a thousandth, and neighbouring bfloat16 numbers differ by 1/256 to 1/128. Stochastic rounding
is unbiased.

NOTE [random bits of an element]: r is a pure function of (seed, step, parameter name, index of the
element in the whole parameter), as dropout masks are. Every layout draws the same bits, wherever it
cuts, and so does a resumed run.

    key  = BLAKE2b-64(seed, "rounding", name, step)[63 bits]        step counts from 0
    bits = mix(index * GOLDEN + key)                                mix: splitmix64's finaliser
    r    = bits 0 .. 15 for the optimizer's first state, bits 16 .. 31 for the second, ..
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.optimizers import Form
from meshwright.optimizer.codecs import Allocate, Piece, StateCodec, memory_beside
from meshwright.parameters import ParameterInfo
from meshwright.seeding import derive, drawn_bits


class ShardPlace(NamedTuple):
    """Position of a flat shard in its bucket, and those of the bucket's weights."""

    slots: tuple[tuple[ParameterInfo, int], ...]
    """(weight, index of its first element in the bucket), for all weights of the bucket."""
    offset: int
    """Index of the shard's first element in the bucket."""
    seed: int

    def bits(self, start: int, stop: int, step: int, device: torch.device) -> Tensor:
        """Return random bits of elements [start, stop) of the shard, (stop - start,) int64;
        zero in padding.
        """
        bits = torch.zeros(stop - start, dtype=torch.int64, device=device)
        low, high = self.offset + start, self.offset + stop
        for info, first in self.slots:
            begin, end = max(first, low), min(first + math.prod(info.local_shape), high)
            if begin < end:
                local = torch.arange(begin - first, end - first, device=device)
                key = derive(self.seed, "rounding", info.name, step)
                bits[begin - low : end - low] = drawn_bits(key, whole_positions(info, local))
        return bits


def whole_positions(info: ParameterInfo, positions: Tensor) -> Tensor:
    """Map flat row-major positions in this rank's slice of a parameter to those
    in the whole parameter, int64.
    """
    if info.slice is None:
        return positions
    dim = info.slice.dim
    padded = info.slice.padded
    ranges = info.slice.ranges
    inner = math.prod(info.global_shape[dim + 1 :])
    outer, rest = positions // (padded * inner), positions % (padded * inner)
    shift = torch.full_like(rest, ranges[0][0] * inner)
    at = 0
    for start, stop in ranges:
        if at:
            shift = torch.where(rest >= at * inner, (start - at) * inner, shift)
        at += stop - start
    return outer * (info.global_shape[dim] * inner) + shift + rest


def round_stochastically(wide: Tensor, random: Tensor) -> Tensor:
    """Round (n,) numbers to bfloat16: away from zero with the probability of the dropped bits.

    ``random``: (n,) int64, of which the lower 16 bits are used.
    """
    bits = wide.float().view(torch.int32)
    return ((bits + (random & 0xFFFF).to(torch.int32)) & -65536).view(torch.float32).bfloat16()


class RoundedCodec(StateCodec):
    """States in bfloat16, rounded stochastically; the numbers are in the dtype of the weights."""

    together: Mapping[str, int] = {
        "cpu": 2**18,
        "cuda": 2**24,
    }  # about 40 bytes of temporaries each

    def __init__(self, places: Mapping[Tensor, ShardPlace]) -> None:
        """Build the codec. ``places``: shard -> its place."""
        self._places = places

    def pieces(self, shard: Tensor, step: int) -> Iterator[Piece]:
        """Yield the pieces of a shard with their random bits."""
        place = self._places[shard]
        for piece in super().pieces(shard, step):
            bits = place.bits(piece.start, piece.stop, step, shard.device)
            yield piece._replace(bits=bits)

    def allocate(self, shard: Tensor, allocate: Allocate | None) -> Tensor:
        """Return zeros in bfloat16."""
        return memory_beside(shard, allocate)(shard.numel(), torch.bfloat16)

    def decode(self, stored: Tensor, piece: Piece, form: Form, dtype: torch.dtype) -> Tensor:
        """Return the numbers, widened."""
        return piece.of(stored).to(dtype)

    def encode(self, numbers: Tensor, stored: Tensor, piece: Piece, form: Form, index: int) -> None:
        """Round the numbers, each state with 16 bits of its own."""
        assert piece.bits is not None
        piece.of(stored).copy_(round_stochastically(numbers, piece.bits >> 16 * index))

    def load(self, numbers: Tensor, stored: Tensor, form: Form) -> None:
        """Round the numbers to nearest."""
        stored.copy_(numbers)

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of a bfloat16."""
        return torch.bfloat16.itemsize
