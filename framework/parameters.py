"""Names, global shapes and local slices of parameters: the vocabulary shared by the axes, checkpoints and verify.

A parameter has one name and one global shape in every layout. Tensor parallelism may keep only a slice of one dim of it
on this rank. Rows beyond the global size (of a vocabulary that tp does not divide) are padding: present in memory,
always zero, never counted, never written to a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slice(NamedTuple):
    """Part ``[start, stop)`` of ``dim`` that this rank holds. ``padded``: its length in memory, >= stop - start."""

    dim: int
    start: int
    stop: int
    padded: int


class GroupSettings(NamedTuple):
    """Optimizer settings of the parameters of one group of ``model.parameter_groups``."""

    rate_factor: float = 1.0
    """Factor on the learning rate."""
    eps_factor: float = 1.0
    """Factor on AdamW's eps."""
    weight_decay: float | None = None
    """None: the optimizer's for matrices, otherwise 0."""


class ParameterInfo(NamedTuple):
    """Metadata of one parameter of the whole model, as seen from one rank."""

    name: str
    global_shape: tuple[int, ...]
    slice: Slice | None = None
    """Shard of this rank; None: it holds the whole parameter (replicated over tp)."""
    sum_over_tp: bool = False
    """True: each tp rank's gradient is a partial sum (it saw a part of the tokens, or of the heads)."""
    in_blocks: bool = False
    """True: its optimizer state is block-quantized, 8 bits per element."""
    settings: GroupSettings = GroupSettings()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape in memory on this rank, padding included."""
        if self.slice is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.slice.dim] = self.slice.padded
        return tuple(shape)

    @property
    def decays(self) -> bool:
        """True if weight decay applies: to matrices, not to biases and norms (one dim), in every layout."""
        return len(self.global_shape) >= 2

    def take(self, full: Tensor) -> Tensor:
        """Return a copy of this rank's slice of a full tensor: ``global_shape`` -> ``local_shape``, padding zero."""
        assert tuple(full.shape) == self.global_shape, (self.name, tuple(full.shape), self.global_shape)
        if self.slice is None:
            return full.clone()
        local = torch.zeros(self.local_shape, dtype=full.dtype, device=full.device)
        part = full.narrow(self.slice.dim, self.slice.start, self.slice.stop - self.slice.start)
        local.narrow(self.slice.dim, 0, part.shape[self.slice.dim]).copy_(part)
        return local

    def unpadded(self, local: Tensor) -> Tensor:
        """Return the view of a local tensor without its padding."""
        if self.slice is None:
            return local
        return local.narrow(self.slice.dim, 0, self.slice.stop - self.slice.start)
