"""Names, global shapes and local slices of parameters: the vocabulary shared by the axes,
checkpoints and verify.

A parameter has one name and one global shape in every layout. Tensor parallelism may keep only a
slice of one dim of it on this rank, in one or several ranges. Rows beyond the global size (of a
vocabulary that tp does not divide) are
padding: present in memory, always zero, never counted, never written to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

PRIVATE_TORCH = {
    "torch._C._will_engine_execute_node": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of the weights in forward and backward, by their name in ``train.dtype``."""


SlicedOver = Literal["tp", "ep"]
"""Axes that cut parameters: ep those of experts, tp all others."""


class Slice(NamedTuple):
    """Part ``[start, stop)`` of ``dim`` that this rank holds. ``padded``: its length in memory,
    >= its elements.
    """

    dim: int
    start: int
    stop: int
    padded: int
    several: tuple[tuple[int, int], ...] = ()
    """Ranges in [start, stop), in order, if the rank holds no more than these:
    they follow each other in memory.
    """
    over: SlicedOver = "tp"
    """Axis whose ranks hold the other slices."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each run of the dim that this rank holds, in the order in memory."""
        return self.several or ((self.start, self.stop),)

    @property
    def length(self) -> int:
        """Length of the dim on this rank, without padding."""
        return sum(stop - start for start, stop in self.ranges)


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
    """Part of this rank; None: it holds the whole parameter (replicated over tp)."""
    is_partial: bool = False
    """True: the gradient of each rank with a copy over tp is a partial sum (it saw a part of the
    tokens, or of the heads).
    """
    is_eight_bit: bool = False
    """True: its optimizer state is block-quantized, 8 bits per element."""
    settings: GroupSettings = GroupSettings()
    matrix: tuple[int, ...] | None = None
    """Rows of the parts of a unit that repeats along dim 0, each part one matrix of a whole-matrix
    optimizer; (): the weight is one matrix; None: it has none. Negative: the columns of the parts
    of a transposed weight.
    """

    @property
    def sliced_over(self) -> SlicedOver | None:
        """Axis whose ranks hold the other slices; None: each holds the whole parameter."""
        return None if self.slice is None else self.slice.over

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
        """True if weight decay applies: to matrices, not to biases and norms (one dim),
        in every layout.
        """
        return len(self.global_shape) >= 2

    def take(self, full: Tensor) -> Tensor:
        """Return a copy of this rank's slice of a full tensor: ``global_shape`` -> ``local_shape``,
        padding zero.
        """
        assert tuple(full.shape) == self.global_shape, (
            self.name,
            tuple(full.shape),
            self.global_shape,
        )
        if self.slice is None:
            return full.clone()
        local = torch.zeros(self.local_shape, dtype=full.dtype, device=full.device)
        for here, there in self.ranges_in(local, full):
            here.copy_(there)
        return local

    def ranges_in(self, local: Tensor, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the views of a local and of a full tensor that hold the same elements,
        range by range.
        """
        dim, at = 0 if self.slice is None else self.slice.dim, 0
        for start, stop in ((0, len(full)),) if self.slice is None else self.slice.ranges:
            yield local.narrow(dim, at, stop - start), full.narrow(dim, start, stop - start)
            at += stop - start

    def unpadded(self, local: Tensor) -> Tensor:
        """Return the view of a local tensor without its padding."""
        if self.slice is None:
            return local
        return local.narrow(self.slice.dim, 0, self.slice.length)


class WeightProduct(NamedTuple):
    """Weight gradient of a linear as its factors: gy (..., O) and x (..., I);
    a call computes it.
    """

    gy: Tensor
    x: Tensor

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return gy as (N, O) and x as (N, I)."""
        return self.gy.reshape(-1, self.gy.shape[-1]), self.x.reshape(-1, self.x.shape[-1])

    def __call__(self) -> Tensor:
        """Return gy^T x (O, I)."""
        gy, x = self.matrices()
        return gy.t().mm(x)


class GradientSum(NamedTuple):
    """Sum of a parameter's gradients to which products can be added directly:
    its attribute ``gradient_sum``.
    """

    add: Callable[[Tensor, WeightProduct], None]
    """Function of the parameter and a product that adds the product."""
    finish: Callable[[Tensor], None]
    """Function of the parameter, to be called where AccumulateGrad's hooks will not run:
    counts the gradient.
    """


def sum_for(parameter: Tensor, gradient: Callable[[], Tensor]) -> GradientSum | None:
    """Return the sum to which this gradient can be added without a tensor of its own, or None."""
    return getattr(parameter, "gradient_sum", None) if isinstance(gradient, WeightProduct) else None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which ``torch.autocast`` casts the operands of a linear of x here,
    or None.
    """
    kind = x.device.type
    if (
        not torch.amp.is_autocast_available(kind)
        or not torch.is_autocast_enabled(kind)
        or x.dtype == torch.float64
    ):
        return None
    return torch.get_autocast_dtype(kind)


def add_gradient(parameter: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Return a gradient for autograd, or None after its product was added to the parameter's sum.

    Call it in backward. There AccumulateGrad's hooks follow, unless another gradient was asked for
    (autograd.grad).
    """
    total: GradientSum | None = getattr(parameter, "gradient_sum", None)
    if total is None or not isinstance(gradient, WeightProduct):
        return gradient()
    if not torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
        return gradient()
    total.add(parameter, gradient)
    return None
