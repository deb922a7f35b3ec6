"""Cut of samples over context-parallel ranks: the tokens of one rank, their positions, and the way back.

Shapes: B samples, S tokens of a sample, S/cp tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.context_parallel.order import ORDERS, draw, imbalance, keys_seen
from meshwright.errors import ModelError
from meshwright.mesh.comm import Group


class TokenCut:
    """This rank's tokens of every sample of one length."""

    def __init__(self, group: Group, order: str, labels: Tensor) -> None:
        """Create the cut over ``group`` of samples whose labels are (B, S)."""
        self.group = group
        self.order = order
        self._set_length(labels.shape[1] if labels.dim() > 1 else 1)

    def _set_length(self, length: int) -> None:
        group, self.length = self.group, length
        """Tokens of a sample."""
        ranks = ORDERS[self.order](length, group.size) if group.size > 1 else [()]  # a rank alone cuts nothing
        self.share = length // group.size
        """Tokens of this rank."""
        self._places = {torch.device("cpu"): torch.tensor([ranks[group.rank]])}
        joined = torch.tensor([place for places in ranks for place in places])
        self._joined = {torch.device("cpu"): joined.argsort()}

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCut:
        return self  # a copy of a layer has the same tokens

    def places(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the sample, (1, S/cp) int64, ascending."""
        return _on(self._places, device)

    def from_ranks(self, device: torch.device) -> Tensor:
        """Return for each position of the sample its index among the tokens of rank 0, rank 1, ..: (S,) int64."""
        return _on(self._joined, device)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a whole tensor, S along ``dim``; the tensor itself without the axis."""
        if self.group.size == 1:
            return whole
        return whole.index_select(dim, self.places(whole.device)[0])

    def shape_of(self, whole: Sequence[int]) -> Sequence[int]:
        """Return the shape of this rank's part of an output (B, S, ...)."""
        return (whole[0], self.share, *whole[2:]) if self.group.size > 1 else whole

    @contextmanager
    def of_length(self, length: int) -> Iterator[None]:
        """Cut samples of another length within the block."""
        own = dict(vars(self))
        self._set_length(length)
        try:
            yield
        finally:
            vars(self).update(own)

    def take_labels(self, labels: Tensor) -> Tensor:
        """Return this rank's labels: (B, S) -> (B, S/cp). They were made from the whole sample before.

        Raises:
            ModelError: the labels are not one for each token.
        """
        if self.group.size > 1 and (labels.dim() < 2 or labels.shape[1] != self.length):
            raise ModelError(
                "MW-CP-001",
                f"parallel.cp = {self.group.size} cuts samples of {self.length} tokens, and the labels of a "
                f"micro-batch have the shape {tuple(labels.shape)}, not one for each token: use parallel.cp = 1",
            )
        return self.take(labels, 1)

    def check(self, builder: str, *, parts: int, heads: int) -> None:
        """Check that all ranks get equally many tokens. ``parts``: by which sequence parallelism cuts them again.

        Raises:
            ModelError: the length cannot be divided, or labels are shifted along the sample (``heads`` of multi-token
                prediction).
        """
        cp = self.group.size
        if cp == 1:
            return
        if self.length % (cp * parts):
            step, again = cp * parts, f" x tp {parts} (parallel.sequence)" if parts > 1 else ""
            nearest = " or ".join(str(near) for near in (self.length // step * step, (self.length // step + 1) * step))
            raise ModelError(
                "MW-CP-006",
                f"samples of {self.length} tokens cannot be cut into parallel.cp = {cp}{again} equal parts: make them "
                f"{nearest.removeprefix('0 or ')}, or use another parallel.cp",
            )
        if heads:
            raise ModelError(
                "MW-CP-007",
                f"{builder}: multi-token prediction (loss_heads) shifts labels along the sample, of which each of "
                f"parallel.cp = {cp} ranks has a part: use parallel.cp = 1, or mtp_layers = 0",
            )

    def lines(self) -> list[str]:
        """Return a picture of the order, with its imbalance for one document over the whole sample; none without cp."""
        if self.group.size == 1:
            return []
        ranks = ORDERS[self.order](self.length, self.group.size)
        uneven = imbalance(ranks, keys_seen(self.length))
        last = f"{self.share:,} tokens a rank, {self.order}: of one document the busiest sees {uneven:.1%} more keys"
        drawn = [*draw(ranks).splitlines(), last]
        return [f"{'' if at else 'context':<10} {line}" for at, line in enumerate(drawn)]


def _on(found: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    if device in found:
        return found[device]
    moved = found[torch.device("cpu")].to(device)
    if type(moved) is Tensor:  # a fake tensor ends with its mode
        found[device] = moved
    return moved
