"""Interface of data parallelism to the executor."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from torch import Tensor


class GradientReducer(Protocol):
    """Reduction of one stage's gradients over its replicas: ``Replica`` of data_parallel/replica.py."""

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Reduce during the next backward. ``awaited``: parameters that get gradients in it; None: all."""

    def end_reducing(self) -> None:
        """Post the remaining reductions of a backward. Does not block."""

    def finish_reduce(self) -> None:
        """Block until every shard holds the sum over the global batch. Copies of tied weights are summed in STEP."""
