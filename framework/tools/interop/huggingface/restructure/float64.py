"""In float64 all of a model is in float64: what its code casts to float32, norms and softmaxes, stays as wide as it is.

transformers takes float32 for the widest there is. A float64 run, which is there to compare layouts by, would be
rounded to float32 in the middle of each layer: 1e-7 of a gradient, as much as many an error. In float32 and bfloat16,
which models are trained in, nothing is touched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = (Tensor.to, Tensor.type)


class Wide(TorchFunctionMode):
    """Within: a float64 tensor that is cast to float32, or reduced in it, remains float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
            if func in CASTS:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


def wide(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Around the forward of a layer whose numbers are of ``dtype``."""
    return Wide() if dtype == torch.float64 else nullcontext()
