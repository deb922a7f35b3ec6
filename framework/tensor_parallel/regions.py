"""Where activations enter and leave the tensor-parallel part of a model: megatron-core's regions, batch first.

    plain (B, S, D)   --copy_in-->                 column ... row   --reduce_out-->                 (B, S, D)
    cut (B, S/tp, D)  --gather_sequence--> (B, S, D) column ... row --reduce_scatter_sequence-->    (B, S/tp, D)

    forward                   on the wire       backward         on the wire
    copy_in                   -                 sum              all-reduce
    reduce_out                all-reduce        -                -
    gather_sequence           all-gather        sum and cut      reduce-scatter
    reduce_scatter_sequence   reduce-scatter    put together     all-gather
    split_sequence            -                 put together     all-gather
    gather_features           all-gather        my part          -
    split_features            -                 put together     all-gather

All ranks of the tp group call them, in the same order; they block (on CUDA: the stream). Each counts its message in the
group, in forward and in backward. With one rank, and on meta tensors (shape inference), nothing is said to anyone.

Shapes: B micro-batch, S sequence, D features; dim 1 is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.mesh.comm import Group, tensor_bytes
from meshwright.tensor_parallel import fake_regions, megatron

SEQUENCE_DIM = 1

Region = TypeVar("Region", bound=Callable[..., Tensor])


def outside_graphs(region: Region) -> Region:
    """Let torch.compile leave this function alone and compile what lies before and after it.

    Traced, it would be compiled anew for each micro-batch, since it counts its traffic, until torch gives up.
    """
    return torch.compiler.disable(region)  # type: ignore[no-any-return, no-untyped-call]


@outside_graphs
def copy_in(x: Tensor, group: Group, *, fresh: bool = False) -> Tensor:
    """Identity; its gradient is summed over the group. ``fresh``: the gradient that arrives is nobody else's (a matrix
    product has just made it), so it may be summed in place; otherwise the sum is made in a copy.
    """
    if group.size == 1 or _only_shapes(x, group):
        return x
    y = _mappings(x, group).copy_to(x, group=group.process_group)
    return _watch_gradient(y, group, "all_reduce", 1, own=not fresh)


@outside_graphs
def reduce_out(x: Tensor, group: Group, *, fresh: bool = False) -> Tensor:
    """Sum over the group; the gradient passes as it is. ``fresh``: nobody else reads ``x``, so it may be summed in
    place (autograd would not notice that a tensor it has kept was overwritten); otherwise the sum is made in a copy.
    """
    if group.size == 1 or _only_shapes(x, group):
        return x
    x = x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    group.begin_collective("all_reduce", tensor_bytes(x))
    y = _mappings(x, group).reduce_from(x, group=group.process_group)
    group.end_collective()
    return y


@outside_graphs
def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """(B, S/tp, D) -> (B, S, D) for a computation that is split over the group; the gradient is summed, then cut."""
    if group.size == 1:
        return x
    if _only_shapes(x, group):
        return torch.cat([x] * group.size, SEQUENCE_DIM)
    x_first = x.transpose(0, 1).contiguous()
    group.begin_collective("all_gather", tensor_bytes(x) * group.size)
    y_first = _mappings(x, group).gather_sequence(x_first, group=group.process_group)
    group.end_collective()
    return _watch_gradient(y_first, group, "reduce_scatter", 1).transpose(0, 1).contiguous()


@outside_graphs
def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """(B, S, D) partial sums -> my (B, S/tp, D) of their sum; the gradients are put together."""
    if group.size == 1:
        return x
    if _only_shapes(x, group):
        return _my_part(x, group)
    x_first = x.transpose(0, 1).contiguous()
    group.begin_collective("reduce_scatter", tensor_bytes(x))
    y_first = _mappings(x, group).reduce_scatter_sequence(x_first, group=group.process_group)
    group.end_collective()
    return _watch_gradient(y_first, group, "all_gather", group.size).transpose(0, 1).contiguous()


@outside_graphs
def split_sequence(x: Tensor, group: Group) -> Tensor:
    """(B, S, D), the same on all ranks -> my (B, S/tp, D); the gradients are put together, so that all ranks have the
    whole one again.
    """
    if group.size == 1:
        return x
    if _only_shapes(x, group):
        return _my_part(x, group)
    y_first = _mappings(x, group).scatter_sequence(x.transpose(0, 1), group=group.process_group)
    return _watch_gradient(y_first, group, "all_gather", group.size).transpose(0, 1).contiguous()


@outside_graphs
def gather_features(x: Tensor, group: Group) -> Tensor:
    """(..., F/tp) -> (..., F) for a computation that all ranks make alike: of its gradient, the same on all of them,
    mine is a part.
    """
    if group.size == 1:
        return x
    if _only_shapes(x, group):
        return torch.cat([x] * group.size, -1)
    group.begin_collective("all_gather", tensor_bytes(x) * group.size)
    y = _mappings(x, group).gather_features(x, group=group.process_group)
    group.end_collective()
    return y


@outside_graphs
def split_features(x: Tensor, group: Group) -> Tensor:
    """(..., F), the same on all ranks -> my (..., F/tp); the gradients are put together, so that all ranks have the
    whole one again.
    """
    if group.size == 1:
        return x
    if _only_shapes(x, group):
        return x.narrow(-1, group.rank * (x.shape[-1] // group.size), x.shape[-1] // group.size).contiguous()
    y = _mappings(x, group).scatter_features(x, group=group.process_group)
    return _watch_gradient(y, group, "all_gather", group.size)


def cut_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """My part of ``x`` along ``dim``, without any communication: the gradient of what made ``x`` stays partial."""
    length = x.shape[dim]
    assert length % group.size == 0, (tuple(x.shape), dim, group.size)
    return x.narrow(dim, group.rank * (length // group.size), length // group.size)


def _only_shapes(x: Tensor, group: Group) -> bool:
    """On meta nobody is told anything, unless the group itself is on paper and wants to count."""
    return x.is_meta and not group.on_paper


def _mappings(x: Tensor, group: Group) -> megatron.Mappings:
    return fake_regions.mappings(group.size) if group.on_paper else megatron.mappings(x.device)


def _my_part(x: Tensor, group: Group) -> Tensor:
    return cut_sequence(x, group, SEQUENCE_DIM).contiguous()


class _WatchGradient(torch.autograd.Function):
    """Identity that looks at the gradient before a mapping does: tells of its collective, makes it contiguous.

    megatron-core sums ``gradient.contiguous()`` and returns ``gradient``: a non-contiguous one comes back unsummed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, operation: str, parts: int, own: bool) -> Tensor:
        ctx.group, ctx.operation, ctx.parts, ctx.own = group, operation, parts, own
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.group.begin_collective(ctx.operation, tensor_bytes(gradient) * ctx.parts)
        if ctx.own or not gradient.is_contiguous():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        return gradient, None, None, None, None


def _watch_gradient(y: Tensor, group: Group, operation: str, parts: int, *, own: bool = False) -> Tensor:
    """``y``: what a mapping has made. ``parts``: how many gradients like y's make up the message. ``own``: hand on a
    copy, which may be written."""
    if not y.requires_grad:
        return y
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda *_: group.end_collective())
    return _WatchGradient.apply(y, group, operation, parts, own)  # type: ignore[no-any-return, no-untyped-call]
