"""Access to the states of an optimizer by shard, for checkpoints, evaluation and callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from meshwright.parameters import ParameterInfo


class Factor(NamedTuple):
    """State of a weight with less than one number per element: whole, on every rank that holds a
    part of the weight.
    """

    kind: str
    info: ParameterInfo
    tensor: Tensor


class ShardStates(ABC):
    """States of an optimizer whose parameters are flat shards: a built-in one, or the user's."""

    @abstractmethod
    def names_of(self, shard: Tensor) -> tuple[str, ...]:
        """Return the names, as in checkpoints, of the states with one number per element."""

    @abstractmethod
    def read(self, shard: Tensor) -> dict[str, Tensor]:
        """Return these states, (numel,) each in the dtype of the shard, and other weights that a
        checkpoint holds. Before the first step they are zero.

        Raises:
            KeyError: after a step the optimizer has no such state, and a checkpoint would hold
                zeros in its place.
        """

    @abstractmethod
    def restore(self, shard: Tensor, states: Mapping[str, Tensor], steps: int) -> None:
        """Set the states after ``steps`` steps; inverse of :meth:`read`. May keep the tensors
        without a copy.
        """

    def factors(self, shard: Tensor) -> Iterator[Factor]:
        """Yield the states of the shard's weights with less than one number per element; to restore
        them, copy into their tensors.
        """
        yield from ()

    def averaged(self, shard: Tensor) -> Tensor | None:
        """Return the weights of evaluation, a new tensor; None: they are the shard."""
        return None
