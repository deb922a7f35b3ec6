"""Cut of samples over context-parallel ranks: the tokens of one rank, their positions,
and the way back.

Shapes: B samples, S tokens of a sample, S/cp tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.context_parallel.balance import imbalance_of, rank_loads
from meshwright.context_parallel.order import BY_DOCUMENTS, ORDERS, documents, draw
from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.mesh.comm import Group

STARTS = "starts"
"""Key of the document starts, (B, S) bool, in the inputs of a micro-batch."""


class SampleTokens(NamedTuple):
    """Index tensors of a micro-batch whose samples are cut differently,
    on the device of its stage.
    """

    positions: Tensor
    """Positions of this rank's tokens, (B, S/cp) int64, ascending."""
    joined: Tensor
    """Index of each position of the sample in the concatenated tokens of rank 0, rank 1, .., (B, S)
    int64.
    """


class TokenCut:
    """Assignment of tokens to context-parallel ranks, for samples of one length.

    NOTE [order by documents]: with "documents" each sample has an order of its own. The feed of
    each stage computes it from the document starts, the same on every rank. The executor stores it
    in the current micro-batch, which recompute restores. If that has no tokens, as on the meta device
    and in a dry run, each sample counts as one document.
    """

    unit = "tokens"

    def __init__(
        self, group: Group, order: str, labels: Tensor, current: CurrentMicrobatch | None = None
    ) -> None:
        """Create the cut over ``group`` of samples with labels (B, S).

        ``current``: state of the current micro-batch.
        """
        self.group = group
        self.order = order
        self.by_sample = order == BY_DOCUMENTS and group.size > 1
        """Samples are cut differently: see NOTE [order by documents]."""
        self._current = current or CurrentMicrobatch()
        self._set_length(labels.shape[1] if labels.dim() > 1 else 1)

    def _set_length(self, length: int) -> None:
        group, self.length = self.group, length
        """Tokens of a sample."""
        # a rank alone cuts nothing
        ranks = ORDERS[self.order](length, group.size) if group.size > 1 else [()]
        self.share = length // group.size
        """Tokens of this rank."""
        self._positions = {torch.device("cpu"): torch.tensor([ranks[group.rank]])}
        joined = torch.tensor([[place for positions in ranks for place in positions]])
        self._joined = {torch.device("cpu"): joined.argsort(-1)}

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCut:
        return self  # a copy of a layer has the same tokens

    def tokens_of(self, inputs: Any, device: torch.device) -> SampleTokens | None:
        """Compute a micro-batch's tokens from its document starts on the CPU;
        None if all samples have one order.
        """
        if not self.by_sample or type(inputs[STARTS]) is not Tensor:  # a fake tensor has no values
            return None
        of_samples = [
            documents(self.length, self.group.size, starts.nonzero().flatten().tolist())
            for starts in inputs[STARTS]
        ]
        positions = torch.tensor([ranks[self.group.rank] for ranks in of_samples])
        joined = torch.tensor(
            [[place for ranks in sample for place in ranks] for sample in of_samples]
        ).argsort(-1)
        return SampleTokens(positions.to(device), joined.to(device))

    def _tokens(self, device: torch.device) -> SampleTokens | None:
        """Return the tokens of the current micro-batch;
        None if all samples have one order.
        """
        tokens: SampleTokens | None = self._current.tokens if self.by_sample else None
        return tokens if tokens is not None and tokens.positions.device == device else None

    def positions(self, device: torch.device, parts: int = 1) -> Tensor:
        """Return the positions of this rank's tokens, (1 or B, S/cp) int64, ascending.

        ``parts``: not used here.
        """
        tokens = self._tokens(device)
        return _on(self._positions, device) if tokens is None else tokens.positions

    def from_ranks(self, device: torch.device) -> Tensor:
        """Return the index of each position in the concatenated tokens of rank 0, rank 1, ..:
        (1 or B, S) int64.
        """
        tokens = self._tokens(device)
        return _on(self._joined, device) if tokens is None else tokens.joined

    def take(self, whole: Tensor, dim: int, tokens: SampleTokens | None = None) -> Tensor:
        """Return this rank's tokens of a whole tensor, S along ``dim``;
        with cp = 1 the tensor itself.

        ``tokens``: of a micro-batch other than the current one. If samples are cut differently, a
            tensor whose dim 0 is
        S, such as a table of positions, gains a first dim: (S, ...) -> (B, S/cp, ...).
        """
        if self.group.size == 1:
            return whole
        positions = self.positions(whole.device) if tokens is None else tokens.positions
        if len(positions) == 1:
            return whole.index_select(dim, positions[0])
        return whole[positions] if dim == 0 else along_samples(whole, dim, positions)

    def shape_of(self, whole: Sequence[int]) -> Sequence[int]:
        """Return the shape of this rank's part of an output (B, S, ...)."""
        return (whole[0], self.share, *whole[2:]) if self.group.size > 1 else whole

    @contextmanager
    def of_length(self, length: int) -> Iterator[None]:
        """Cut samples of another length within the block."""
        state = dict(vars(self))
        self._set_length(length)
        try:
            yield
        finally:
            vars(self).update(state)

    def take_labels(self, labels: Tensor, tokens: SampleTokens | None = None) -> Tensor:
        """Return this rank's part of labels that are already shifted along the sample: (B, S)
        -> (B, S/cp).

        Raises:
            ModelError: the labels are not one for each token.
        """
        if self.group.size == 1:
            return labels
        self._check_labels(labels)
        return self.take(labels, 1, tokens)

    def _check_labels(self, labels: Tensor) -> None:
        """Raise :class:`ModelError` unless there is one label for each token."""
        if labels.dim() < 2 or labels.shape[1] != self.length:
            raise ModelError(
                "MW-CP-001",
                f"parallel.cp = {self.group.size} cuts samples of {self.length} tokens, and the"
                f" labels of a micro-batch have the shape {tuple(labels.shape)}, not one for each"
                " token: use parallel.cp = 1",
            )

    def check(self, builder: str, inputs: Any, labels: Tensor, *, parts: int, heads: int) -> None:
        """Check that all ranks get equally many tokens.

        ``parts``: tp if sequence parallelism splits them again, or 1.

        Raises:
            ModelError: the length cannot be divided, an order by documents has none, or labels are
                shifted along the sample (``heads`` of multi-token prediction).
        """
        cp = self.group.size
        if cp == 1:
            return
        self._check_labels(labels)
        if self.by_sample and not (isinstance(inputs, dict) and STARTS in inputs):
            raise ModelError(
                "MW-CP-010",
                'parallel.cp_order = "documents" deals the tokens by the documents of each sample,'
                " and the samples have no document starts: set data.document_boundaries = true (a"
                f' dataset of your own: inputs with "{STARTS}", (B, S) bool), or parallel.cp_order'
                ' = "zigzag"',
            )
        if self.length % (cp * parts):
            step, again = cp * parts, f" x tp {parts} (parallel.sequence)" if parts > 1 else ""
            nearest = " or ".join(
                str(near) for near in (self.length // step * step, (self.length // step + 1) * step)
            )
            raise ModelError(
                "MW-CP-006",
                f"samples of {self.length} tokens cannot be cut into parallel.cp = {cp}{again}"
                f" equal parts: make them {nearest.removeprefix('0 or ')}, or use another"
                " parallel.cp",
            )
        if heads:
            raise ModelError(
                "MW-CP-007",
                f"{builder}: multi-token prediction (loss_heads) shifts labels along the sample, of"
                f" which each of parallel.cp = {cp} ranks has a part: use parallel.cp = 1, or"
                " mtp_layers = 0",
            )

    def lines(self) -> list[str]:
        """Draw the order in lines, with its imbalance if the sample is one document;
        empty with cp = 1.
        """
        if self.group.size == 1:
            return []
        ranks = ORDERS[self.order](self.length, self.group.size)
        uneven = imbalance_of(
            rank_loads(self.order, self.group.size, np.zeros(self.length, dtype=np.bool_))
        )
        last = (
            f"{self.share:,} tokens per rank, {self.order}: in one document the busiest has"
            f" {uneven:.1%} more keys"
        )
        drawn = [*draw(ranks).splitlines(), last]
        return [f"{'' if at else 'context':<10} {line}" for at, line in enumerate(drawn)]


class HeadCut:
    """This rank's heads in an attention core with cp_exchange = "heads":
    indices for dropout masks of probabilities.
    """

    unit = "heads"

    def __init__(self, group: Group) -> None:
        """Create the cut over ``group`` of the heads of each tp rank."""
        self._group = group
        self._heads = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadCut:
        return self

    def begin(self, heads: int) -> None:
        """Set the number of heads that this rank has in the core that runs next."""
        self._heads = heads

    @property
    def length(self) -> int:
        """Number of heads of a tp rank."""
        return self._heads * self._group.size

    def positions(self, device: torch.device, parts: int = 1) -> Tensor:
        """Return the indices of the heads that this cp rank has in each of ``parts`` tp ranks, (1,
        n) int64.
        """
        numbers = torch.arange(self.length * parts, device=device).view(
            parts, self._group.size, self._heads
        )
        return numbers[:, self._group.rank].reshape(1, -1)


def along_samples(whole: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Gather each sample's own positions along ``dim``: (1 or B, .., S, ..) -> (B, .., n, ..).

    ``positions``: (B, n) int64.
    """
    index = positions.view(
        positions.shape[0], *[1] * (dim - 1), positions.shape[1], *[1] * (whole.dim() - dim - 1)
    )
    shape = list(whole.shape)
    shape[0], shape[dim] = positions.shape
    return whole.expand(len(positions), *whole.shape[1:]).gather(dim, index.expand(shape))


def _on(found: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    if device in found:
        return found[device]
    moved = found[torch.device("cpu")].to(device)
    if type(moved) is Tensor:  # a fake tensor ends with its mode
        found[device] = moved
    return moved
