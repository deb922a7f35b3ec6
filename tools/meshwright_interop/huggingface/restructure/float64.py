"""Float64 runs of transformers models: casts to float32 in their code (norms, softmaxes)
leave float64 as it is.

transformers treats float32 as the widest dtype. A float64 run, whose purpose is to compare layouts,
would be rounded to float32 in the middle of each layer. The relative error of 1e-7 in a gradient
would hide real defects of that size. Runs in the training dtypes, float32 and bfloat16, are not
affected.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = (Tensor.to, Tensor.type)
CONSTANTS = (torch.full, torch.tensor)
"""Functions of one number, in the default dtype. ``finfo(x.dtype).min``, used in masks,
needs float64 if x does.
"""


class KeepFloat64Mode(TorchFunctionMode):
    """Function mode in which a float64 tensor remains float64 when it is cast to float32
    or reduced in float32.

    A constant that float32 cannot hold is made in float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CONSTANTS and args and isinstance(args[-1], float) and "dtype" not in kwargs:
            is_large = torch.finfo(torch.float32).max < abs(args[-1]) < math.inf
            kwargs = kwargs | {"dtype": torch.float64} if is_large else kwargs
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
            if func in CASTS:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


def keep_float64(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context of a layer's forward in ``dtype``: :class:`KeepFloat64Mode` for float64,
    else none.
    """
    return KeepFloat64Mode() if dtype == torch.float64 else nullcontext()
