"""Execution options of profiled layers, and stand-ins for their kernels: fused attention, norm,
cross-entropy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.model.meter import AttentionKernel, fused_attention, stored_bytes
from meshwright_plan.planner.operations import WorkRecorder


class ExecutionOptions(NamedTuple):
    """Execution choices that the model does not fix: fusion, kernels, saved tensors."""

    fused: bool = False
    """Neighbouring operations other than products are fused,
    by a compiler or by special kernels.
    """
    fused_attention: bool = True
    """Attention never writes its scores."""
    fuses_any_attention: bool = True
    """The fused attention kernel supports dropout, and masks that need a gradient."""
    drops_probabilities: bool = False
    """Unfused attention applies dropout to its probabilities: one more pass, and a mask."""
    context: int = 1
    """Number of ranks over which a sequence is split (context parallelism).

    Inputs are one rank's part, which attends to ``context`` times its own keys.
    """
    any_order: bool = False
    """Copies that only reorder elements are left out: kernels read any memory layout."""
    norm_kernel: bool = False
    """An RMSNorm is one operation that keeps only its input (torch's own kernel on CUDA)."""
    loss_kernel: bool = False
    """Cross-entropy is one operation, which writes its gradient over the logits."""
    saves_inputs: bool = False
    """A gated activation keeps its inputs and recomputes its product in backward."""
    accumulates: bool = False
    """A product accumulates into the gradient itself,
    so a weight's gradient needs no extra memory.
    """
    recomputes_whole: bool = False
    """Recompute runs to its end, even past the last tensor that backward needs."""
    groups_experts: bool = False
    """The products of all experts of a rank are one grouped product (torch's on CUDA
    in bfloat16).
    """


def stand_for(device: str, layers: nn.Module) -> None:
    """Set ``meta_device`` of all modules that have it:
    the device type whose kernels tensors without values take.

    ``device``: type, such as "cuda"; "": that of the tensors.
    """
    for module in layers.modules():
        if hasattr(module, "meta_device"):
            module.meta_device = device  # type: ignore[assignment]


class KernelMode(TorchFunctionMode):
    """Context in which fused ``F.scaled_dot_product_attention`` is recorded as one operation,
    as on a real device.

    Without fused attention it is two products and a softmax of all scores.
    """

    def __init__(self, recorder: WorkRecorder, execution: ExecutionOptions) -> None:
        super().__init__()
        self.recorder, self.execution = recorder, execution
        self._called: Any = None
        self._recomputable: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is F.rms_norm and self.execution.norm_kernel:
            return _rms_norm(*args, **(kwargs or {}))
        if not self.execution.saves_inputs:
            return func(*args, **(kwargs or {}))
        self._called = func
        result = func(*args, **(kwargs or {}))
        if func is F.silu:
            self._recomputable.add(self.recorder.number_of(result))
        return result

    def pack(self, tensor: Tensor) -> Any:
        """Return the saved form of a tensor:
        only shape and dtype if it is a SiLU output in a product.
        """
        is_factor = self._called is Tensor.mul and not tensor.is_leaf
        if is_factor and self.recorder.number_of(tensor) in self._recomputable:
            return tensor.shape, tensor.dtype
        return tensor

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """Restore a saved tensor; one saved as shape and dtype becomes an empty meta tensor."""
        return (
            saved
            if isinstance(saved, Tensor)
            else torch.empty(saved[0], dtype=saved[1], device="meta")
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        needs_more = dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad)
        fused = self.execution.fused_attention
        if fused and (self.execution.fuses_any_attention or not needs_more):
            self.recorder.attended.append(
                (round(stored_bytes(query)), round(stored_bytes(key) + stored_bytes(value)))
            )
            transposed = self.execution.any_order or self.execution.saves_inputs
            new_output = partial(_attention_output, transposed)
            kernel = AttentionKernel(
                self.recorder.add, self.recorder.add, is_causal, self.execution.context, new_output
            )
            return fused_attention(kernel, query, key, value, attn_mask)
        if fused:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **rest
            )
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        probabilities = scores.softmax(-1)
        if self.execution.drops_probabilities:
            probabilities = torch.native_dropout(probabilities, 0.1, True)[0]
        output: Tensor = probabilities @ value
        return output


def _attention_output(transposed: bool, query: Tensor, value: Tensor) -> Tensor:
    """Return an empty output (B, H, S, d_v); ``transposed``: it lies as (B, S, H, d_v)
    in memory.
    """
    # even where it is replaced: the published peaks of memory include it
    output = torch.empty_like(query)
    if transposed:
        *batch, heads, length, _ = query.shape
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
    elif value.shape[-1] != query.shape[-1]:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output


class FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA's kernel: one operation, which keeps its input and one number per row.

    x (..., normalised), weight (normalised) or None; values are not those of a norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        rows = (*x.shape[: x.dim() - num_dims], *[1] * num_dims)
        dtype = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=dtype))
        return x + 1  # an operation that reads x and writes as much

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return gradient + x, None, None if weight is None else torch.empty_like(weight)


def _rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    output: Tensor = FusedNorm.apply(x, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return output


class FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy as one kernel, which writes the gradient over its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        largest = logits.amax(-1)
        gradient = logits.detach().mul_(1)
        ctx.gradient = gradient
        return largest.float()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        gradient: Tensor = ctx.gradient
        del ctx.gradient
        return gradient
