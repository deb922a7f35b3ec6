"""Layers for models that compute on whole features between a column and a row,
and embeddings split by features.

    column_whole   a column linear that all-gathers its output
    row_whole      a row linear that takes its slice of a whole input
    column         of an embedding: weight (N, F/tp), a slice of each row; output split along the features

The first two enclose a computation that is not split, such as a norm over all heads. It runs on
every rank.

    forward            on the wire     backward         on the wire
    gather_features    all-gather      take own slice   -
    split_features     -               concatenate      all-gather
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.comm import Group
from meshwright.parameters import Slice
from meshwright.placement.rewrite import local_parameter
from meshwright.tensor_parallel.backward_traffic import count_backward
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear, even_slice
from meshwright.tensor_parallel.regions import mappings_of, outside_graphs


@outside_graphs
def gather_features(x: Tensor, group: Group) -> Tensor:
    """All-gather the features over tp: (..., F/tp) -> (..., F),
    for a computation that all ranks repeat. Blocks.

    M (tp-1)/tp bytes on the wire, M = bytes of (..., F). Backward takes a slice of the gradient,
    without communication.
    """
    if group.size == 1:
        return x
    group.begin_collective("all_gather", x, group.size)
    y = mappings_of(x, group).gather_features(x, group=group.process_group)
    group.end_collective()
    return y


@outside_graphs
def split_features(x: Tensor, group: Group) -> Tensor:
    """Return this rank's slice of the features: (..., F), the same on all ranks -> (..., F/tp).
    No communication.

    Backward all-gathers the gradient over tp and blocks: M (tp-1)/tp bytes on the wire per rank, M
    = bytes of (..., F).
    """
    if group.size == 1:
        return x
    y = mappings_of(x, group).scatter_features(x, group=group.process_group)
    return count_backward(y, group, "all_gather", group.size)


class WholeColumnLinear(ColumnLinear):
    """Column linear that all-gathers its output over tp in forward as well: (B, S, I) -> (B, S, O)
    on every rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self.of_outputs(super().forward(input))

    def of_outputs(self, x: Tensor) -> Tensor:
        """All-gather features of this rank's rows over tp: (..., O/tp) -> (..., O). Blocks."""
        return gather_features(x, self.group)


class WholeRowLinear(RowLinear):
    """Row linear of a whole input, the same on every rank: (B, S, I) -> (B, S, O).

    Backward all-gathers the input's gradient over tp as well.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(split_features(input, self.group))


class ColumnEmbedding(nn.Module):
    """nn.Embedding with this rank's contiguous block of features, such as one number per head.

    ids int64 of any shape, the same on all ranks (also under sequence parallelism) -> (..., F/tp).
    No communication, and the gradient is complete. ``embedding_dim`` is that of the local weight.
    """

    def __init__(self, plain: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.slices: dict[str, Slice | None] = {
            "weight": even_slice(1, plain.embedding_dim, group.rank, group.size)
        }
        self.weight = local_parameter(plain.weight, self.slices["weight"])
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx = plain.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim} here, {self.slices['weight']}"
