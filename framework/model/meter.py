"""Counters of FLOPs, bytes and estimated time for each operation, measured on tensors alone.

time of an operation = max(FLOPs / F, bytes / B)        F, B of a Reference; after Williams et al. 2009, "Roofline"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class ReferenceDevice(NamedTuple):
    """Reference device for time estimates: achieved rates, not those of its data sheet."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    fused: bool
    """True if its attention kernel supports dropout and a mask that needs a gradient (torch's CPU kernel does not)."""


MATMUL_SHARE, MEMORY_SHARE = 0.65, 0.85
"""Shares of an H100's peaks that large matrix products and elementwise kernels commonly reach; not measured here."""
H100_FLOPS = {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}
"""Dense peak FLOP/s without TF32, torch's default (H100 SXM data sheet; float64 on tensor cores)."""
H100_BYTES_PER_S = 3.35e12
CPU_FLOPS = {"bfloat16": 180e9, "float32": 80e9, "float64": 38e9}
CPU_BYTES_PER_S = 20e9
"""Rates of one thread on one server core, as measured: docs/balance.md."""


def reference(device: str, dtype: str) -> ReferenceDevice:
    """Return the reference device for balancing a run's layers, from ``train.device`` and ``train.dtype`` alone.

    It never depends on the machine: a planning laptop, a launcher and a rank must find the same partition. ``auto``
    therefore follows the dtype: a GPU for bfloat16, otherwise a CPU.
    """
    if device == "cuda" or (device == "auto" and dtype == "bfloat16"):
        return ReferenceDevice(
            f"an H100 in {dtype}", MATMUL_SHARE * H100_FLOPS[dtype], MEMORY_SHARE * H100_BYTES_PER_S, True
        )
    return ReferenceDevice(f"a CPU core in {dtype}", CPU_FLOPS[dtype], CPU_BYTES_PER_S, False)


class OperationCost(NamedTuple):
    """Cost of a set of operations."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention (full, not causal); a multiply-add counts two."""
    bytes: float = 0.0
    """Bytes read and written, summed over operations; no caching between them."""
    time_s: float = 0.0
    """Estimated seconds on the reference device."""

    def plus(self, flops: float, num_bytes: float, time_s: float) -> OperationCost:
        """Return the count with one more operation added."""
        return OperationCost(self.flops + flops, self.bytes + num_bytes, self.time_s + time_s)


PICKS = {aten.embedding: 0, aten.index_select: 0, aten.gather: 0, aten.index: 0, aten.nll_loss_forward: 0}
"""Gather operations -> position of the argument gathered from. Its bytes read equal the bytes written."""
NOT_READ = {aten.nll_loss_backward: 1, aten.copy_: 0, aten.fill_: 0, aten.zero_: 0}
"""Operations -> position of an argument that is not read: it is overwritten, or only its shape is used."""
SCATTERS = {aten.index_put_, aten.index_add_, aten.scatter_, aten.scatter_add_}
"""In-place operations that touch as many bytes of the changed tensor as they are given."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts operations as they run. FLOPs follow the formulas of torch's FlopCounterMode."""

    def __init__(self, by: ReferenceDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by = by
        self.count = OperationCost()

    def add(self, flops: float, num_bytes: float, done_share: float = 1.0) -> None:
        """Count one operation. ``done_share``: share of the FLOPs really computed (half, in causal attention)."""
        time_s = max(flops * done_share / self.by.flops_per_s, num_bytes / self.by.bytes_per_s)
        self.count = self.count.plus(flops, num_bytes, time_s)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
        self.add(flops, op_bytes(func, args, kwargs, result))
        return result


def op_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return the bytes that one operation reads and writes; 0 for views and for allocations."""
    packet = func._overloadpacket
    name = packet.__name__
    read: dict[int, float] = {}
    changed: dict[int, float] = {}
    storages = set()
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(given):
            if not isinstance(tensor, Tensor):
                continue
            storages.add(tensor.untyped_storage()._cdata)
            if NOT_READ.get(packet) != position:
                read[id(tensor)] = stored_bytes(tensor)
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed[id(tensor)] = stored_bytes(tensor)
    results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
    written = sum(stored_bytes(t) for t in results if t.untyped_storage()._cdata not in storages)
    if name.removeprefix("new_").startswith("empty") or not (written or changed):
        return 0.0
    if name.startswith("new_") or name.endswith("_like"):
        return written
    if packet in PICKS:
        read[id(args[PICKS[packet]])] = min(written, stored_bytes(args[PICKS[packet]]))
    if packet in SCATTERS:
        return 3.0 * sum(size for tensor, size in read.items() if tensor not in changed)
    return sum(read.values()) + written + sum(changed.values())


def stored_bytes(tensor: Tensor) -> float:
    """Return the bytes of the distinct elements in memory: an expanded dim counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return float(math.prod(size for size, stride in sizes if stride != 0 or size == 0) * tensor.itemsize)


class FusedAttentionMode(TorchFunctionMode):
    """Function mode that treats ``F.scaled_dot_product_attention`` as one operation, as on a real device.

    On meta torch would decompose it into products and a softmax over S x S scores that no fused kernel ever writes.
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
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        return _Fused.apply(self.forward, self.backward, is_causal, query, key, value, attn_mask)  # type: ignore[no-untyped-call,no-any-return]


class _Fused(torch.autograd.Function):
    """Cost of fused attention without its computation. Forward has two products; backward has five, as it recomputes.

    FLOPs (B, H, Sq, Skv, d): 2 B H Sq Skv (d_qk + d_v), times 5/2 in backward, as in torch's own formulas.
    """

    @staticmethod
    def forward(ctx: Any, forward: Meter, backward: Meter, is_causal: bool, *tensors: Tensor | None) -> Tensor:
        query, key, value, _ = tensors
        assert query is not None and key is not None and value is not None
        given = [t for t in tensors if t is not None]
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        flops = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        num_bytes = sum(map(stored_bytes, given)) + stored_bytes(output)
        done_share = 0.5 if is_causal else 1.0
        forward.add(flops, num_bytes, done_share)
        ctx.save_for_backward(*tensors, output)  # as the kernel does, so that recompute unpacks the same
        ctx.count = lambda: backward.add(2.5 * flops, 2 * num_bytes, done_share)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.count()
        given = ctx.saved_tensors[:-1]
        found = (
            torch.empty_like(t) if wanted else None for t, wanted in zip(given, ctx.needs_input_grad[3:], strict=True)
        )
        return (None, None, None, *found)
