"""Formats of optimizer states in memory: how a state is stored, read as numbers, and written back.

    float32     the numbers themselves, in the dtype of the master weights     element_wise.py
    bfloat16    rounded stochastically                                         rounded.py
    8bit        codes in blocks with a scale each                              eight_bit.py

An element-wise optimizer computes on numbers, one piece of a shard after the other, whatever their
format. A codec serves every optimizer: it gets the form of a state alone, signed or squares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config.optimizers import Form, StateSpec
from meshwright.kernels import device_kind

Allocate = Callable[[int, torch.dtype], Tensor]
"""Function (numel, dtype) that allocates zeros for a state."""


class Piece(NamedTuple):
    """Elements [start, stop) of a flat shard that are stepped together."""

    start: int
    stop: int
    bits: Tensor | None = None
    """(stop - start,) random bits, int64, for a codec that rounds with them."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of the piece in a flat tensor."""
        return flat[self.start : self.stop]


class StateCodec(ABC):
    """Format of the states of some shards."""

    together: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**26}
    """Elements of a piece, by device: few fit into a CPU's cache; on CUDA each piece costs some
    kernel launches. It bounds the temporary memory of a step.
    """

    @abstractmethod
    def allocate(self, shard: Tensor, allocate: Allocate | None) -> Any:
        """Return memory for one state of a shard, in which all numbers are zero.

        Args:
            allocate: see :data:`Allocate`; None: on the device of the shard.
        """

    @abstractmethod
    def decode(self, stored: Any, piece: Piece, form: Form, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a piece in this dtype: a new tensor, or the memory itself."""

    @abstractmethod
    def encode(self, numbers: Tensor, stored: Any, piece: Piece, form: Form, index: int) -> None:
        """Write the numbers of a piece into the memory.

        Args:
            index: of the state among those of the optimizer; each rounds with other bits.
        """

    @abstractmethod
    def load(self, numbers: Tensor, stored: Any, form: Form) -> None:
        """Write all numbers of a shard, as a checkpoint holds them. What :meth:`decode` has returned
        becomes the same bits.
        """

    @abstractmethod
    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of a state per element. ``itemsize``: of an element of the weights."""

    def of(self, state: StateSpec) -> StateCodec:
        """Return the codec of one state: numbers that are exact keep their dtype."""
        return NUMBERS if state.form == "exact" else self

    def pieces(self, shard: Tensor, step: int) -> Iterator[Piece]:
        """Yield the pieces of a flat shard in a step, which is counted from 0."""
        size = self.together.get(device_kind(shard), self.together["cpu"])
        for start in range(0, shard.numel(), size):
            yield Piece(start, min(start + size, shard.numel()))


class NumberCodec(StateCodec):
    """The numbers themselves, in the dtype of the weights; updated in place."""

    def allocate(self, shard: Tensor, allocate: Allocate | None) -> Tensor:
        """Return zeros like the shard."""
        return memory_beside(shard, allocate)(shard.numel(), shard.dtype)

    def decode(self, stored: Tensor, piece: Piece, form: Form, dtype: torch.dtype) -> Tensor:
        """Return the view of the piece in the memory."""
        return piece.of(stored)

    def encode(self, numbers: Tensor, stored: Tensor, piece: Piece, form: Form, index: int) -> None:
        """Leave the memory: it is the numbers."""

    def load(self, numbers: Tensor, stored: Tensor, form: Form) -> None:
        """Copy the numbers."""
        stored.copy_(numbers)

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of a number."""
        return itemsize


NUMBERS = NumberCodec()


def memory_beside(shard: Tensor, allocate: Allocate | None) -> Allocate:
    """Return ``allocate``, or a function that allocates on the device of a shard."""
    return partial(_zeros_beside, shard) if allocate is None else allocate


def _zeros_beside(shard: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=shard.device)
