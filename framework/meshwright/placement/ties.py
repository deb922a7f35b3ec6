"""Check that a tied weight is split alike at all of its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.errors import ModelError
from meshwright.parameters import Slice


class Held(NamedTuple):
    """State of one copy of a weight on a rank."""

    slice: Slice | None
    is_partial: bool
    """True if the gradient of a whole copy is a part of the sum over ranks."""
    kind: str
    """Kind of its module, for the message."""

    def __str__(self) -> str:
        how = "whole"
        if self.slice is not None:
            ranges = ", ".join(f"{start}:{stop}" for start, stop in self.slice.ranges)
            how = f"{ranges} of dim {self.slice.dim}"
        return f"{self.kind} ({how}{', with a part of the gradient' if self.is_partial else ''})"


def check_ties(held: Mapping[str, Held], tied: Sequence[tuple[str, ...]], key: str) -> None:
    """Check that the copies of each tied weight have one slice and one kind of gradient.

    Args:
        held: parameter name -> how this rank holds it.
        tied: names of each tied weight.
        key: the configuration key that splits, for the message.

    Raises:
        ModelError: names the copies, and how each is held.
    """
    for names in tied:
        if len({held[name][:2] for name in names}) > 1:
            ways = ", ".join(f"{name} is {held[name]}" for name in names)
            raise ModelError(
                "MW-PLACEMENT-002",
                f"tied weights are one weight, which {key} must split alike at all places, but"
                f" {ways}: give their modules the same kind in the sharding_plan, or untie them",
            )
