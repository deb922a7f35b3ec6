"""A Llama whose attention refuses, on CUDA, to make a tensor as large as the mask of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright_models import flex, llama

LENGTH = 1024


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the largest tensor that an operation returns, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def checked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the forward of an attention core that raises where it makes S x S elements on CUDA."""

    @wraps(forward)
    def attend(q: Tensor, *others: Any) -> Tensor:
        if q.device.type != "cuda":
            return forward(q, *others)
        with Largest() as largest:
            mixed = forward(q, *others)
        if largest.elements >= LENGTH * LENGTH:
            raise RuntimeError(f"attention makes a tensor of {largest.elements:,} elements")
        return mixed

    return attend


def build(masks: bool, window: int | None = None) -> nn.Sequential:
    """Build a block. ``masks``: attend with masks, as where FlexAttention cannot be compiled."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 32,
    }
    model = llama.build(**sizes, max_sequence_length=LENGTH, sliding_window=window)
    if masks:
        flex.HEAD_DIMS = range(0)
    core = model[1].attention.core
    core.forward = checked(core.forward)
    return model
