"""A linear over a gathered input that keeps only this rank's part of it for backward.

    forward    x (B, S/tp, I) --keep--> --all-gather--> (B, S, I) --linear--> y (B, S, O/tp)
                     |                        x kept by the linear: a note where the part is
    backward   dW = dy^T x:  x <--all-gather again--.

Without it each column linear would hold its whole input until backward, and sequence parallelism would save nothing
there (Korthikanti et al. 2022, section 4.2.2). The part is kept by an autograd node of its own, so that whoever hooks
saved tensors (activation recomputation, offloading) sees it as any other.
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
    """Identity that keeps its input for whoever holds its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Part(NamedTuple):
    """Instead of a gathered tensor: the node that keeps this rank's part, and the shape in which it was saved."""

    node: Any
    shape: torch.Size


@outside_graphs
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """``F.linear(gather_sequence(x), weight, bias)``: (B, S/tp, I) -> (B, S, O). Backward gathers x once more."""
    if group.size == 1 or (x.is_meta and not group.on_paper) or not (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(gather_sequence(x, group), weight, bias)
    kept = _Keep.apply(x)  # type: ignore[no-untyped-call]
    whole = gather_sequence(kept, group)
    node, place, numel = kept.grad_fn, place_of(whole), whole.numel()  # not the tensors: the hooks would hold them

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
