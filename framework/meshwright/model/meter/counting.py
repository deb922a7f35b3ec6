"""Counters of FLOPs, bytes and estimated time for each operation, measured on tensors alone.

time of an operation = max(FLOPs / F, bytes / B)        F, B of a ReferenceDevice; Williams et al. 2009, "Roofline"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.config import is_meant_for_gpu
from meshwright.model.meter.recorder import Operation, OperationRecorder, stored_bytes


class ReferenceDevice(NamedTuple):
    """Reference device for time estimates, with achieved rates instead of the data sheet's."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    fused: bool
    """True if its attention kernel supports dropout and a mask
    that needs a gradient (torch's CPU kernel does not).
    """


MATMUL_SHARE, MEMORY_SHARE = 0.65, 0.85
"""Shares of an H100's peaks that large matrix products and elementwise kernels commonly reach;
not measured here.
"""
H100_FLOPS = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}
"""Dense peak FLOP/s without TF32, torch's default (H100 SXM data sheet;
float64 on tensor cores).
"""
H100_BYTES_PER_S = 3.35e12
CPU_FLOPS = {"bfloat16": 180e9, "float16": 180e9, "float32": 80e9, "float64": 38e9}
CPU_BYTES_PER_S = 20e9
"""Rates of one thread on one server core, as measured: docs/balance.md."""


def reference(device: str, dtype: str) -> ReferenceDevice:
    """Return the reference device for balancing a run's layers,
    from ``train.device`` and ``train.dtype`` alone.
    """
    if is_meant_for_gpu(device, dtype):
        return ReferenceDevice(
            f"an H100 in {dtype}",
            MATMUL_SHARE * H100_FLOPS[dtype],
            MEMORY_SHARE * H100_BYTES_PER_S,
            True,
        )
    return ReferenceDevice(f"a CPU core in {dtype}", CPU_FLOPS[dtype], CPU_BYTES_PER_S, False)


class OperationCost(NamedTuple):
    """Cost of a set of operations."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention (full, not causal);
    a multiply-add counts two.
    """
    bytes: float = 0.0
    """Bytes read and written, summed over operations; no caching between them."""
    time_s: float = 0.0
    """Estimated seconds on the reference device."""
    masked_flops: float = 0.0
    """Part of ``flops`` that causal attention does not compute: half of it."""


def causal_share(costs: Sequence[OperationCost]) -> float:
    """Return the share of the FLOPs, 0..1, that is left if causal attention counts half."""
    return 1.0 - sum(cost.masked_flops for cost in costs) / max(
        1.0, sum(cost.flops for cost in costs)
    )


class Meter(OperationRecorder):  # type: ignore[no-untyped-call]
    """Counter of the cost of operations as they run."""

    def __init__(self, by: ReferenceDevice) -> None:
        super().__init__()
        self.by = by
        self.count = OperationCost()

    def add(
        self, flops: float, num_bytes: float, done_share: float = 1.0, shape: object = None
    ) -> None:
        """Count one operation.

        Args:
            done_share: share of the FLOPs really computed (half, in causal attention).
            shape: shape of an attention; not used here.
        """
        time_s = max(flops * done_share / self.by.flops_per_s, num_bytes / self.by.bytes_per_s)
        count, masked_flops = self.count, flops * (1.0 - done_share)
        self.count = OperationCost(
            count.flops + flops,
            count.bytes + num_bytes,
            count.time_s + time_s,
            count.masked_flops + masked_flops,
        )

    def record(self, operation: Operation) -> None:
        """Count one operation that has run."""
        self.add(operation.flops, operation.num_bytes)


class FusedAttentionMode(TorchFunctionMode):
    """Function mode that treats ``F.scaled_dot_product_attention`` as one operation,
    as on a real device.

    On meta torch would decompose it into products and a softmax over S x S scores that no fused
    kernel ever writes.
    """

    def __init__(self, by: ReferenceDevice, forward: Meter, backward: Meter) -> None:
        super().__init__()
        self.by, self.forward, self.backward = by, forward, backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

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
        if needs_more and not self.by.fused:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **rest
            )
        kernel = AttentionKernel(self.forward.add, self.backward.add, is_causal)
        return fused_attention(kernel, query, key, value, attn_mask)


AddAttention = Callable[[float, float, float, tuple[int, int, int, int]], None]
"""(FLOPs, bytes, share of FLOPs computed, shape) of one attention -> None."""


def _new_output(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


class AttentionKernel(NamedTuple):
    """Fused attention kernel to count, and the functions that its costs are passed to."""

    add_forward: AddAttention
    add_backward: AddAttention
    is_causal: bool
    context: int = 1
    """Ratio of the keys attended to and the keys given (context parallelism)."""
    new_output: Callable[[Tensor, Tensor], Tensor] = _new_output
    """(query, value) -> an empty output."""


def fused_attention(
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Count fused attention without computing it: two products in forward, five in backward,
    which recomputes.

    query (B, H, Sq, d_qk), key (B, H, Skv, d_qk), value (B, H, Skv, d_v) -> empty (B, H, Sq, d_v).
    FLOPs: 2 B H Sq Skv (d_qk + d_v), times 5/2 in backward, as in torch's own formulas. It keeps
    its inputs, its output and one number per row of scores (float32 or wider), as the kernel does.
    """
    return _FusedAttention.apply(kernel, query, key, value, mask)  # type: ignore[no-untyped-call,no-any-return]


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: AttentionKernel, *tensors: Tensor | None) -> Tensor:
        query, key, value, _ = tensors
        assert query is not None and key is not None and value is not None
        output = kernel.new_output(query, value)
        row_sums = query.new_empty(
            query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32)
        )
        num_keys = key.shape[-2] * kernel.context
        flops = 2.0 * math.prod(query.shape[:-1]) * num_keys * (query.shape[-1] + value.shape[-1])
        num_bytes = sum(stored_bytes(t) for t in tensors if t is not None) + stored_bytes(output)
        done_share = 0.5 if kernel.is_causal else 1.0
        shape = (math.prod(query.shape[:-2]), query.shape[-2], num_keys, query.shape[-1])
        kernel.add_forward(flops, num_bytes, done_share, shape)
        ctx.save_for_backward(*tensors, output, row_sums)
        ctx.count = lambda: kernel.add_backward(2.5 * flops, 2 * num_bytes, done_share, shape)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.count()
        given = ctx.saved_tensors[:-2]
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                torch.empty_like(t) if needs else None
                for t, needs in zip(given, wanted, strict=True)
            ),
        )
