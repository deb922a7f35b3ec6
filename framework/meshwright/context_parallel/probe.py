"""Probe of one aten operation on the CPU:
does a token of its result depend on another token of its arguments?

Tensors with the shapes and dtypes of the arguments, on meta, are drawn at random; then token p // 2
of each is changed. The operation mixes tokens if its result for any other token changes, or if its
result has no dim of tokens any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

MOST_ELEMENTS = 2**27
"""Elements of all arguments above which an operation is not probed."""
ALONE = ("_to_copy", "_unsafe_view", "copy", "fill", "zero")
"""Frequent aten operations that never mix tokens."""
BY_INDEX = (
    "index",
    "gather",
    "scatter",
    "embedding",
    "take",
    "put",
    "bincount",
    "searchsorted",
    "nonzero",
)
"""Parts of the names of aten operations whose result depends on indices,
which random numbers do not stand for.
"""
FACTORIES = ("empty", "new_", "_like")
"""Parts of the names of aten operations that read a shape alone."""


def holds_tokens(tensor: Tensor, tokens: int) -> bool:
    """Return True if a dim is a multiple of ``tokens``: tokens,
    alone or flattened with what has other sizes.
    """
    return any(size and size % tokens == 0 for size in tensor.shape)


def mixes_tokens(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tokens: int
) -> bool:
    """Return True if the aten operation ``func`` mixes tokens;
    False also where that cannot be found out.

    ``args``, ``kwargs``, ``output``: of a call on meta, in which a dim of ``tokens`` elements holds
    tokens.
    """
    name = func.overloadpacket.__name__.rstrip("_") if func.namespace == "aten" else ""
    by_index = any(part in name for part in BY_INDEX)
    if torch.Tag.pointwise in func.tags or name in ALONE or any(part in name for part in FACTORIES):
        return False
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(holds_tokens(tensor, tokens) for tensor in outputs):
        return bool(outputs) and not by_index
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func.is_view or by_index or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(tuple(tensor.shape).count(tokens) > 1 for tensor in tensors):
        return False
    if sum(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    drawn = tree_map(lambda leaf: _draw(leaf, generator), (args, kwargs))
    changed = tree_map(lambda leaf: _change(leaf, tokens), drawn)
    try:
        first, again, other = (_run(func, *tensor) for tensor in (drawn, drawn, changed))
    except Exception:  # of values that it refuses, or without a kernel for CPU
        return False
    return all(map(_same, first, again)) and not all(
        _same(_without(a, tokens), _without(b, tokens)) for a, b in zip(first, other, strict=True)
    )


def _run(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    outputs = func(*tree_map(_clone, args), **tree_map(_clone, kwargs))  # it may write into them
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _draw(leaf: Any, generator: torch.Generator) -> Any:
    """Return random numbers of the shape and dtype of a tensor; integers: zeros.
    The CPU for the device meta.
    """
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    return torch.randn(leaf.shape, dtype=torch.float32, generator=generator).to(leaf.dtype)


def _change(leaf: Any, tokens: int) -> Any:
    """Return a copy of a tensor with one token changed."""
    if not isinstance(leaf, Tensor) or tokens not in leaf.shape:
        return leaf
    changed = leaf.clone()
    token = changed.select(tuple(leaf.shape).index(tokens), tokens // 2)
    token.copy_(token == 0 if not leaf.dtype.is_floating_point else token.double() * 100 + 1000)
    return changed


def _without(tensor: Tensor, tokens: int) -> Tensor:
    """Return the tensor without the token that was changed."""
    if tokens not in tensor.shape:
        return tensor if not holds_tokens(tensor, tokens) else tensor[:0]
    others = torch.arange(tokens) != tokens // 2
    return tensor[(slice(None),) * tuple(tensor.shape).index(tokens) + (others,)]


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
