"""Bytes that a rank puts on the wire, by group and operation.

Ring formulas for n ranks and a message of M bytes (the whole tensor):

    all-reduce 2 M (n-1)/n     all-gather, reduce-scatter, all-to-all, broadcast M (n-1)/n     send M
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

WIRE_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


class OperationCount(NamedTuple):
    """Number of calls of one operation, and the bytes that this rank put on the wire in them."""

    calls: int = 0
    wire_bytes: float = 0.0


@dataclass
class Traffic:
    """Traffic of this rank up to now: ``counts[(group name, operation)]``."""

    counts: dict[tuple[str, str], OperationCount] = field(
        default_factory=lambda: defaultdict(OperationCount)
    )

    def add(self, group: str, operation: str, size: int, message_bytes: int) -> None:
        """Count one call with a message of ``message_bytes`` (the whole tensor)
        among ``size`` ranks.
        """
        calls, wire_bytes = self.counts[group, operation]
        self.counts[group, operation] = OperationCount(
            calls + 1, wire_bytes + WIRE_FACTORS[operation](size) * message_bytes
        )

    def reset(self) -> None:
        """Start counting anew."""
        self.counts.clear()
