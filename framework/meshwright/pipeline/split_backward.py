"""Backward in two halves: input gradients at once (I),
weight gradients when the schedule has time for them (W).

    forward     y = x W^T                               under :class:`SplitBackward`, a torch function mode
    I           gx = gy W        defers gy^T x           one pass of autograd over the stage, without weight GEMMs
    W           W.grad += gy^T x                         the deferred gradients, in the order of I

Every call of ``F.linear`` or ``F.embedding`` with a parameter (of two dims) as its weight is split:
nn.Linear and nn.Embedding, their tensor-parallel versions, and a user's module. Calls inside
``torch.func`` or ``torch.autocast`` are not. All other parameters (a norm's, a convolution's, one
that is multiplied directly) get their gradient in I already, which is correct, but leaves less work
to W. Between I and W, x and gy of the deferred gradients are kept.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.overrides import TorchFunctionMode

from meshwright.parameters import WeightProduct, add_gradient, autocast_dtype, sum_for

PRIVATE_TORCH = {
    "torch._C._are_functorch_transforms_active": "2.11-2.15",
    "torch._dynamo.eval_frame.skip_code": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


class DeferredGradient(NamedTuple):
    """Weight gradient that is not computed yet: the parameter and a function that computes it."""

    parameter: Tensor
    gradient: Callable[[], Tensor]


class SplitBackward(TorchFunctionMode):
    """Torch function mode around a stage's forward: backward can then defer weight gradients.

    It defers them only inside ``deferring``; otherwise backward computes them at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deferred: list[DeferredGradient] | None = None

    @contextmanager
    def deferring(self) -> Iterator[list[DeferredGradient]]:
        """Enter a context in which backward defers the weight gradients of linears
        and embeddings.
        """
        assert self._deferred is None, "one backward at a time"
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def defer(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient; within ``deferring`` store it for W and return None."""
        if self._deferred is None:
            return add_gradient(parameter, gradient)
        self._deferred.append(DeferredGradient(parameter, gradient))
        return None

    def released(self, x: Tensor) -> Tensor:
        """Return ``x``, detached while deferring.

        Its history would keep the graph until W, and with it the stage's received input and that
        input's gradient.
        """
        return x if self._deferred is None else x.detach()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func is F.linear:
                return self._linear(*args, **kwargs)
            if func is F.embedding:
                return self._embedding(*args, **kwargs)
            if kwargs and getattr(func, "defers_gradients", False):
                kwargs["defer"] = self.defer
        return func(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        whole = autocast_dtype(input) is not None or torch._C._are_functorch_transforms_active()
        if not _is_trained(weight) or weight.dim() != 2 or whole:
            return F.linear(input, weight, bias)
        if bias is not None and not _is_trained(bias):
            return _Linear.apply(input, weight, None, self) + bias  # type: ignore[no-untyped-call,no-any-return]
        return _Linear.apply(input, weight, bias, self)  # type: ignore[no-untyped-call,no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        whole = max_norm is not None or sparse or torch._C._are_functorch_transforms_active()
        if whole or not _is_trained(weight):
            return F.embedding(
                input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
            )
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        return _Embedding.apply(input, weight, padding_idx, scale_grad_by_freq, self)  # type: ignore[no-untyped-call,no-any-return]


skip_code(
    SplitBackward.__torch_function__.__code__
)  # still traced within a layer; not compiled as a function of its own


def _is_trained(tensor: Tensor) -> bool:
    """Return whether a tensor is itself a trained parameter.

    For a tensor computed from a parameter, autograd needs the gradient in I.
    """
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def accumulate_deferred(deferred: list[DeferredGradient]) -> None:
    """Compute the deferred gradients and accumulate each in its parameter by autograd, hooks
    included. Empties the list.

    A parameter that was used several times gets the sum in one accumulation. Hooks that count
    finished parameters therefore count correctly.
    """
    remaining: dict[int, int] = {}
    for use in deferred:
        remaining[id(use.parameter)] = remaining.get(id(use.parameter), 0) + 1
    sums: dict[int, Tensor] = {}
    while deferred:
        parameter, gradient = deferred.pop(0)
        key = id(parameter)
        total = sums.pop(key, None)
        value = None
        bucket_sum = sum_for(parameter, gradient)
        if bucket_sum is not None and isinstance(gradient, WeightProduct):
            bucket_sum.add(parameter, gradient)
        else:
            value = gradient()
            total = value if total is None else total.add_(value)
        remaining[key] -= 1
        if remaining[key]:
            if total is not None:
                sums[key] = total
        elif total is not None:
            # a leaf: AccumulateGrad and its hooks, nothing else
            torch.autograd.backward([parameter], [total])
        elif bucket_sum is not None:
            bucket_sum.finish(parameter)
        del gradient, value, total  # frees x and gy


def _own(output: Tensor) -> Tensor:
    """Return the output without autograd's mark that it is a view.

    ``F.linear`` and ``F.embedding`` return views of their kernels' results. Autograd forbids
    in-place writes to a view that a custom function returns. ``ReLU(inplace=True)`` after a linear
    makes such a write.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


class _Linear(torch.autograd.Function):
    """Linear with deferrable weight gradients: x (..., I), weight (O, I), bias (O) or None -> (...,
    O), all local.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: SplitBackward
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.mode = weight, bias, mode
        return _own(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # differentiable, for gradients in forward
        gx = gy.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        x = ctx.mode.released(x)
        gw = ctx.mode.defer(ctx.weight, WeightProduct(gy, x))
        gb = None
        if ctx.bias is not None:
            gb = ctx.mode.defer(ctx.bias, lambda: gy.reshape(-1, gy.shape[-1]).sum(0))
        return gx, gw, gb, None


class _Embedding(torch.autograd.Function):
    """Embedding with a deferrable weight gradient: ids (...) int, weight (V, D) -> (..., D),
    all local.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        by_frequency: bool,
        mode: SplitBackward,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.padding_idx = padding_idx
        ctx.by_frequency = by_frequency
        ctx.mode = mode
        return _own(F.embedding(ids, weight, padding_idx, scale_grad_by_freq=by_frequency))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows, padding = ctx.weight.shape[0], -1 if ctx.padding_idx is None else ctx.padding_idx

        def gradient() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(gy, ids, rows, padding, ctx.by_frequency)  # type: ignore[no-any-return]

        return None, ctx.mode.defer(ctx.weight, gradient), None, None, None
