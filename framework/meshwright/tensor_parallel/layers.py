"""Linears and embeddings split over tp: the plain modules' parameter names,
this rank's slice of each weight.

    column   weight (O/tp, I)   y = x W^T + b        input whole, output split along the features
    row      weight (O, I/tp)   y = sum(x W^T) + b   input split along the features, output whole; b once, after the sum
    vocab    weight (V/tp, D)   embedding: looks up this rank's rows, then sums over tp; head: a column linear whose
                                logits stay split

:mod:`whole_layers` has variants for models that compute on whole features between a column and a
row.

Under sequence parallelism "whole" is (B, S/tp, D): a column gathers its input along the sequence, a
row and an embedding reduce-scatter their output. A vocabulary that tp does not divide gets
ceil(V/tp) rows per rank, the last of them padding:

    V=9 tp=4:   0 1 2 | 3 4 5 | 6 7 8 | - - -      V=9 tp=8:   0 1 | 2 3 | 4 5 | 6 7 | 8 - | - - | - - | - -

Padding rows are zero. No id selects them, and cross_entropy.py excludes their logits, so their
gradient is exactly zero.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.fp8.linear import Fp8Linear
from meshwright.mesh.comm import Group
from meshwright.parameters import Slice
from meshwright.placement.rewrite import local_parameter
from meshwright.tensor_parallel.column import column_linear
from meshwright.tensor_parallel.fp8_layers import fp8_column, fp8_row
from meshwright.tensor_parallel.ranges import check_range
from meshwright.tensor_parallel.regions import reduce_out, reduce_scatter_sequence


def even_slice(dim: int, length: int, rank: int, tp: int) -> Slice:
    """Return part ``rank`` of ``length`` rows or columns; tp must divide ``length``."""
    assert length % tp == 0, (length, tp)
    part = length // tp
    return Slice(dim, rank * part, (rank + 1) * part, part)


def vocab_slice(vocab_size: int, rank: int, tp: int) -> Slice:
    """Return the vocabulary rows of part ``rank``: ceil(V/tp) in memory,
    of which some or all may be padding.
    """
    padded = -(-vocab_size // tp)
    start = min(rank * padded, vocab_size)
    return Slice(0, start, min(start + padded, vocab_size), padded)


class ColumnLinear(nn.Module):
    """nn.Linear with this rank's contiguous block of output rows.

    x (B, S, I), under sequence parallelism (B, S/tp, I) -> (B, S, O/tp). Forward: no communication,
    or an all-gather over tp, which blocks. Backward: all-reduce, or all-gather and reduce-scatter,
    overlapped with GEMMs (column.py). ``in_features`` and ``out_features`` are those of the local
    weight. ``gathered``: an enclosing module gathers the sequence and reduces the gradient, so this
    module does not communicate.
    """

    def __init__(
        self, plain: nn.Linear, group: Group, sequence: bool, gathered: bool = False
    ) -> None:
        super().__init__()
        self.group = group
        self.sequence = sequence
        self.gathered = gathered
        self.is_fp8 = isinstance(plain, Fp8Linear)
        part = self.slice_of(plain, group)
        self.weight = local_parameter(plain.weight, part)
        self.bias: nn.Parameter | None = None
        self.slices: dict[str, Slice | None] = {
            name: part for name, _ in plain.named_parameters(recurse=False)
        }
        for name, vector in plain.named_parameters(recurse=False):
            if name != "weight":  # the bias, an adapter's magnitudes
                setattr(self, name, local_parameter(vector, part))
        self.out_features, self.in_features = self.weight.shape

    def slice_of(self, plain: nn.Linear, group: Group) -> Slice:
        """Return the output rows that this rank holds."""
        return even_slice(0, plain.out_features, group.rank, group.size)

    def forward(self, input: Tensor) -> Tensor:
        if self.is_fp8:
            return fp8_column(
                input, self.weight, self.bias, self.group, self.sequence, self.gathered
            )
        if self.gathered:
            return F.linear(input, self.weight, self.bias)
        return column_linear(input, self.weight, self.bias, self.group, self.sequence)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} -> {self.out_features} here, {self.slices['weight']},"
            f" sequence={self.sequence}"
        )


class VocabHead(ColumnLinear):
    """Column linear whose output rows are the vocabulary: logits (B, S, ceil(V/tp)),
    padding columns at the end.
    """

    def slice_of(self, plain: nn.Linear, group: Group) -> Slice:
        """Return the rows of the vocabulary that this rank holds."""
        return vocab_slice(plain.out_features, group.rank, group.size)


class RowLinear(nn.Module):
    """nn.Linear with this rank's contiguous block of input columns.

    x (B, S, I/tp) -> (B, S, O), under sequence parallelism (B, S/tp, O). Forward: all-reduce over
    tp, or reduce-scatter. Backward: no communication, or an all-gather. All block. The bias is
    whole on each rank, the same Parameter as in the plain module. Under sequence parallelism its
    gradient is a partial sum.
    """

    def __init__(self, plain: nn.Linear, group: Group, sequence: bool) -> None:
        super().__init__()
        self.group = group
        self.sequence = sequence
        self.is_fp8 = isinstance(plain, Fp8Linear)
        part = even_slice(1, plain.in_features, group.rank, group.size)
        self.weight = local_parameter(plain.weight, part)
        self.bias: nn.Parameter | None = None
        self.slices: dict[str, Slice | None] = {"weight": part}
        for name, vector in plain.named_parameters(recurse=False):
            if name != "weight":
                self.slices[name] = None
                setattr(self, name, vector)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, input: Tensor) -> Tensor:
        if self.is_fp8:
            partial = fp8_row(input, self.weight, self.group)
        else:
            partial = F.linear(input, self.weight)
        if self.sequence:
            y = reduce_scatter_sequence(partial, self.group)
        else:
            y = reduce_out(partial, self.group, fresh=True)
        # after the sum, which would count it tp times
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def whole_sums(self, sums: Tensor) -> Tensor:
        """All-reduce this rank's partial sums (any shape) over tp, in place. Blocks.
        Adapters call it.
        """
        return reduce_out(sums, self.group, fresh=True)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} -> {self.out_features} here, {self.slices['weight']},"
            f" sequence={self.sequence}"
        )


class VocabEmbedding(nn.Module):
    """nn.Embedding with this rank's contiguous block of rows.

    ids (B, S) int64 -> (B, S, D), under sequence parallelism (B, S/tp, D). An id of another rank's
    row gives zeros here, so the sum over tp is the row. Forward: all-reduce over tp, or
    reduce-scatter. Backward: no communication, or an all-gather. All block.
    """

    def __init__(self, plain: nn.Embedding, group: Group, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence, self.vocab_size = group, sequence, plain.num_embeddings
        self.rows = vocab_slice(plain.num_embeddings, group.rank, group.size)
        self.slices: dict[str, Slice | None] = {"weight": self.rows}
        self.weight = local_parameter(plain.weight, self.rows)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx = None
        if plain.padding_idx is not None and self.rows.start <= plain.padding_idx < self.rows.stop:
            self.padding_idx = plain.padding_idx - self.rows.start

    def forward(self, input: Tensor) -> Tensor:
        check_range(input, self.vocab_size)
        is_elsewhere = (input < self.rows.start) | (input >= self.rows.stop)
        local_ids = (input - self.rows.start).masked_fill_(is_elsewhere, 0)
        y = F.embedding(local_ids, self.weight, self.padding_idx)
        y = y.masked_fill_(is_elsewhere.unsqueeze(-1), 0)
        if self.sequence:
            return reduce_scatter_sequence(y, self.group)
        return reduce_out(y, self.group, fresh=True)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings} x {self.embedding_dim} here, {self.rows},"
            f" sequence={self.sequence}"
        )
