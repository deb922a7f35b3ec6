"""Linear on a gathered sequence that saves only this rank's part of its input for backward.

    forward    x (B, S/tp, I) --keep--> --all-gather--> (B, S, I) --linear--> y (B, S, O/tp)
                     |                        x saved by the linear: a reference to the part
    backward   dW = dy^T x:  x <--all-gather again--.

Otherwise each column linear would save its full input until backward, and sequence parallelism would save no memory
there (Korthikanti et al. 2022, section 4.2.2). An autograd node of its own saves the part, so that hooks on saved
tensors (activation checkpointing, offloading) see it as any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.mesh.comm import Group, place_of
from meshwright.tensor_parallel.regions import gather_sequence, outside_graphs


class _Keep(torch.autograd.Function):
    """Identity that saves its input in its autograd node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Part(NamedTuple):
    """Stand-in for a saved gathered tensor: the node that saves this rank's part, and the shape of the saved tensor."""

    node: Any
    shape: torch.Size


@outside_graphs
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """Compute ``F.linear(gather_sequence(x), weight, bias)``: x (B, S/tp, I), this rank's shard -> (B, S, O/tp).

    All-gathers x over tp in forward, and once more in backward, which also reduce-scatters its gradient. Each blocks
    and sends M (tp-1)/tp bytes per rank, M = bytes of (B, S, I). Weight (O/tp, I) and bias (O/tp,) are this rank's
    rows.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(gather_sequence(x, group), weight, bias)
    kept = _Keep.apply(x)  # type: ignore[no-untyped-call]
    whole = gather_sequence(kept, group)
    node, place, numel = kept.grad_fn, place_of(whole), whole.numel()  # no tensors: the hooks would keep them alive

    def pack(saved: Tensor) -> Tensor | _Part:
        if saved.numel() == numel and place_of(saved) == place and saved.is_contiguous():
            return _Part(node, saved.shape)
        return saved

    def unpack(saved: Tensor | _Part) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        (part,) = saved.node.saved_tensors
        with torch.no_grad():
            return gather_sequence(part, group).view(saved.shape)

    with saved_tensors_hooks(pack, unpack):
        return F.linear(whole, weight, bias)
