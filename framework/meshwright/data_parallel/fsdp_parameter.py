"""One parameter under torch's FSDP2: shard, gathered form and gradient,
through FSDP's private attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FSDP = "torch.distributed.fsdp._fully_shard"
"""Package of FSDP2, whose objects :mod:`.fsdp` uses too."""
PRIVATE_TORCH = {
    f"{FSDP}._fsdp_param.FSDPParam.sharded_param": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam.unsharded_param": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam.reduce_dtype": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam.to_sharded_dtensor": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam.grad_offload_event": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam._unsharded_param": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam._orig_size": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam._module_info": "2.11-2.15",
    f"{FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad": "2.11-2.14",
    f"{FSDP}._fsdp_param.FSDPParam.to_accumulated_grad_if_needed": "2.11-2.14",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


class FsdpParameter:
    """One parameter under FSDP: this rank's rows, and the full parameter while it is gathered."""

    def __init__(self, of_torch: Any) -> None:
        """Wrap torch's private ``FSDPParam``."""
        self._of_torch = of_torch
        place = of_torch._module_info
        self.key = (id(place.module), place.param_name)
        """Identity of the parameter's module, and the parameter's name in it."""
        self._is_summed = False
        """True once :meth:`sum_deferred` was called."""
        self._sums_in_leaf = not hasattr(of_torch, "to_accumulated_grad_if_needed")
        """True from torch 2.15 on: autograd sums the gradients of several backwards in the full
        parameter's ``grad``, in the reduction dtype (its ``grad_dtype``). Before, FSDP moved them
        to ``unsharded_accumulated_grad``.
        """

    @property
    def sharded(self) -> nn.Parameter:
        """Parameter that holds this rank's rows, a DTensor."""
        parameter: nn.Parameter = self._of_torch.sharded_param
        return parameter

    @property
    def padded_rows(self) -> Tensor:
        """Whole storage of this rank's rows as a flat tensor,
        zero-padded to the size of the largest shard.
        """
        rows = self._of_torch.sharded_param.to_local()
        return torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())

    @property
    def unsharded(self) -> Tensor:
        """Full parameter; it is the same object from the first forward on."""
        gathered: Tensor = self._of_torch.unsharded_param
        return gathered

    @property
    def was_gathered(self) -> bool:
        """True once a forward has gathered the parameter."""
        return hasattr(self._of_torch, "_unsharded_param")

    @property
    def has_accumulated(self) -> bool:
        """True when earlier backwards left a gradient of the full parameter
        in the reduction dtype.
        """
        if not self._sums_in_leaf:
            return self._of_torch.unsharded_accumulated_grad is not None
        gradient = self._of_torch._unsharded_param.grad
        return gradient is not None and gradient.dtype == self._of_torch.reduce_dtype

    def set_gradient(self, padded: Tensor) -> None:
        """Set the flat, zero-padded tensor to which FSDP adds this rank's gradient;
        it may be in host memory.
        """
        rows = self._of_torch.sharded_param.to_local()
        gradient = padded[: rows.numel()].view(rows.shape)
        # DTensor.from_local would move it
        self.sharded.grad = self._of_torch.to_sharded_dtensor(gradient)

    def take_gradient(self, padded: Tensor) -> None:
        """Add this rank's gradient, in host memory, to the flat tensor ``padded``, and free it."""
        gradient = self.sharded.grad
        if gradient is not None:
            rows = gradient.to_local()  # type: ignore[attr-defined]
            padded[: rows.numel()].view(rows.shape).add_(rows)
            self.sharded.grad = None
        self._of_torch.grad_offload_event = None

    def discard_full_gradient(self) -> None:
        """Discard the gradient of the full parameter, the accumulated one included."""
        if not self._sums_in_leaf:
            self._of_torch.unsharded_accumulated_grad = None
        if self.was_gathered:
            self._of_torch._unsharded_param.grad = None

    @property
    def has_gradient(self) -> bool:
        """True when the full parameter has a gradient in either dtype."""
        return self.has_accumulated or self._of_torch._unsharded_param.grad is not None

    def sum_deferred(self, is_reduction_due: Callable[[], bool]) -> None:
        """Add each gradient to the sum in the reduction dtype as autograd computes it,
        unless it is reduced next.

        NOTE [16-bit sums]: FSDP does so at the end of a backward. It does not see the W of a split
        backward, so the gradients of several Ws in a row would be summed in 16 bits. From torch
        2.15 on autograd does it in each.
        """
        reduce_dtype = self._of_torch.reduce_dtype
        sums_in_it = reduce_dtype in (None, self._of_torch._unsharded_param.dtype)
        if self._sums_in_leaf or self._is_summed or sums_in_it:
            return
        self._is_summed = True
        reference = weakref.ref(self)  # see NOTE [weak hooks] in replica.py

        def add(_: Tensor) -> None:
            parameter = reference()
            if parameter is not None and not is_reduction_due():
                parameter._add_to_accumulated()

        self._of_torch._unsharded_param.register_post_accumulate_grad_hook(add)

    def _add_to_accumulated(self) -> None:
        """Move the gradient to the accumulated one, which has the reduction dtype."""
        parameter = self._of_torch._unsharded_param
        if self._sums_in_leaf:
            wide = parameter.grad.to(self._of_torch.reduce_dtype or parameter.grad.dtype)
            parameter.grad_dtype = wide.dtype
            parameter.grad = wide
            return
        if self.has_accumulated and parameter.grad is not None:
            self._of_torch.unsharded_accumulated_grad += parameter.grad
            parameter.grad = None
        self._of_torch.to_accumulated_grad_if_needed()

    def prepare_reduction(self, *, accumulated: bool) -> None:
        """Prepare the full gradient for a reduction: one tensor, of zeros if there was no gradient.

        All gradients of a unit must have one dtype.

        Args:
            accumulated: convert it to the reduction dtype, because another parameter of the unit
                has accumulated in it.
        """
        of_torch = self._of_torch
        parameter = of_torch._unsharded_param
        if not self.has_gradient:
            dtype = (parameter.grad_dtype if self._sums_in_leaf else None) or parameter.dtype
            parameter.grad = torch.zeros(of_torch._orig_size, dtype=dtype, device=parameter.device)
        if accumulated:
            self._add_to_accumulated()
