"""Regions that bring activations into and out of the tensor-parallel part of a model:
megatron-core's, batch first.

    replicated (B, S, D)  --copy_in-->                   column ... row  --reduce_out-->               (B, S, D)
    sharded (B, S/tp, D)  --gather_sequence--> (B, S, D) column ... row  --reduce_scatter_sequence-->  (B, S/tp, D)

                              forward           backward
    copy_in                   -                 all-reduce
    reduce_out                all-reduce        -
    gather_sequence           all-gather        reduce-scatter
    reduce_scatter_sequence   reduce-scatter    all-gather

All ranks of the tp group must call them in the same order. They block (on CUDA: the stream). Each
counts its collective in the group, in forward and in backward. With one rank, and on meta tensors
(shape inference), nothing is sent. Column linears do not call copy_in or gather_sequence: their own
autograd function does the same, overlapped with the GEMMs (column.py). Those two serve modules of
kind ``gather`` and a user's own sharding rules.

Bytes on the wire per rank, M = bytes of the full activation: all-reduce 2 M (tp-1)/tp, all-gather
and reduce-scatter M (tp-1)/tp. Shapes: B micro-batch, S sequence, D and F features; dim 1 is the
sequence. Tokens may be joined with the samples, (B S, D): a gather then has the ranks' rows one
after the other, for modules that compute token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.mesh.comm import Group
from meshwright.tensor_parallel import fake_regions, megatron
from meshwright.tensor_parallel.backward_traffic import count_backward

Region = TypeVar("Region", bound=Callable[..., Tensor])


def outside_graphs(region: Region) -> Region:
    """Exclude a function from torch.compile, which still compiles the code before and after it.

    A traced region would be recompiled for each micro-batch, because its traffic counters change,
    until torch's limit.
    """
    return torch.compiler.disable(region)  # type: ignore[no-any-return, no-untyped-call]


@outside_graphs
def copy_in(x: Tensor, group: Group) -> Tensor:
    """Return ``x`` (any shape, the same on all ranks); backward all-reduces the gradient over tp.
    Blocks in backward.

    Backward sums a copy of the gradient, because other code may read the same tensor.
    """
    if group.size == 1:
        return x
    y = mappings_of(x, group).copy_to(x, group=group.process_group)
    # the all-reduce runs inside megatron-core's backward: a function around it counts its bytes
    return count_backward(y, group, "all_reduce", 1, own=True)


@outside_graphs
def reduce_out(x: Tensor, group: Group, *, fresh: bool = False) -> Tensor:
    """All-reduce (sum) ``x`` over tp, any shape; backward passes the gradient unchanged.
    Blocks in forward.

    Args:
        fresh: no other code reads ``x``, so it may be summed in place. Otherwise a copy is summed,
            because autograd does not detect that a tensor which it saved was overwritten.
    """
    if group.size == 1:
        return x
    x = x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    group.begin_collective("all_reduce", x)
    y = mappings_of(x, group).reduce_from(x, group=group.process_group)
    group.end_collective()
    return y


@outside_graphs
def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """All-gather the sequence over tp: (B, S/tp, D) -> (B, S, D), for a computation split over tp.
    Blocks. Rows of tokens (N/tp, D) -> (N, D), in the order of the ranks.

    Backward reduce-scatters the gradient: (B, S, D) partial sums -> this rank's (B, S/tp, D).
    """
    if group.size == 1:
        return x
    if x.dim() == 2:
        return gather_sequence(x[None], group)[0]
    group.begin_collective("all_gather", x, group.size)
    y = mappings_of(x, group).gather_sequence(x.contiguous(), group=group.process_group)
    group.end_collective()
    # megatron-core gathers along dim 0, and so has the ranks' parts one after the other
    return join_sequence(count_backward(y, group, "reduce_scatter", 1).view(group.size, *x.shape))


@outside_graphs
def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter partial sums over tp: (B, S, D) -> this rank's (B, S/tp, D) of their sum.
    Blocks. Rows of tokens (N, D) -> this rank's (N/tp, D), as :func:`gather_sequence` has them.

    Backward all-gathers the gradient along the sequence.
    """
    if group.size == 1:
        return x
    if x.dim() == 2:
        return reduce_scatter_sequence(x[None], group)[0]
    group.begin_collective("reduce_scatter", x)
    y = mappings_of(x, group).reduce_scatter_sequence(
        split_sequence(x, group.size).flatten(0, 1), group=group.process_group
    )
    group.end_collective()
    return count_backward(y, group, "all_gather", group.size)


def split_sequence(x: Tensor, tp: int) -> Tensor:
    """Return the sequence in tp parts, each in one piece: (B, S, ...) -> (tp, B, S/tp, ...).
    Copies if B > 1.
    """
    return x.reshape(len(x), tp, -1, *x.shape[2:]).transpose(0, 1).contiguous()


def join_sequence(parts: Tensor) -> Tensor:
    """Join the parts of a sequence: (tp, B, S/tp, ...) -> (B, S, ...), contiguous.
    Copies if B > 1.
    """
    return parts.transpose(0, 1).flatten(1, 2)


def cut_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of ``x`` along ``dim``, a view: (.., S, ..) -> (.., S/tp, ..).

    Backward needs no communication either: gradients of the parameters that computed ``x`` stay
    partial sums.
    """
    length = x.shape[dim]
    assert length % group.size == 0, (tuple(x.shape), dim, group.size)
    return x.narrow(dim, group.rank * (length // group.size), length // group.size)


def mappings_of(x: Tensor, group: Group) -> megatron.Mappings:
    """Return the regions for tensors on the device of ``x``: megatron-core's,
    or ours for meta tensors.
    """
    return fake_regions.mappings(group.size) if x.is_meta else megatron.load_mappings(x.device)
