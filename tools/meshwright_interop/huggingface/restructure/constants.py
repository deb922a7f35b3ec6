"""Values of constants on the meta device, where tensors have none:
a model may branch on a mask that is all ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

LARGEST = 1 << 20
"""Elements of a constant at most: larger ones get no value."""
UNFILLED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)
"""Operations whose result has no defined value."""
OF_SHAPES = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
"""Operations that use only the shape of their operand."""


class MetaConstants(TorchDispatchMode):
    """Dispatch mode that computes each meta tensor that depends on no token and no weight
    on the CPU as well.

    ``item()`` and ``bool()`` of such a tensor return its value. Of any other meta tensor they
    raise, as without the
    mode: the branches of the forward would depend on data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, torch.UntypedStorage] = {}
        """Storage of a constant -> its bytes on the CPU."""
        self._alive: list[Tensor] = []
        """Tensors whose storages have values, so that no address is used twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        name = func._schema.name.partition("::")[2]
        is_known = all(map(self._has_value, operands)) or name in OF_SHAPES
        if func is torch.ops.aten._local_scalar_dense.default and is_known:
            with _disable_current_modes():
                return self._value(args[0]).item()
        result = func(*args, **kwargs)
        results = [
            each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta
        ]
        if results:
            # another mode would hash each value on the CPU, element by element
            with _disable_current_modes():
                self._follow(func, args, kwargs, results, is_known and name not in UNFILLED)
        return result

    def _follow(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], results: list[Tensor], is_known: bool
    ) -> None:
        """Compute the values of an operation's results on the CPU; without known operands,
        remove those it writes.
        """
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        values = None
        if is_known and not is_random and all(each.numel() <= LARGEST for each in results):
            values = self._computed(func, args, kwargs)
        if values is None:
            self._forget(func, args, kwargs)
        else:
            for each, value in zip(results, values, strict=True):
                self._store(each, value)

    def _has_value(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor.untyped_storage()._cdata in self._values

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the value of a constant on the CPU, in the same place of its storage; without one:
        zeros.
        """
        if not tensor.is_meta:
            return tensor
        storage = self._values.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        whole = torch.empty(0, dtype=tensor.dtype)
        return whole.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _computed(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the results of the operation on the CPU, or None if it fails there."""

        def on_cpu(each: Any) -> Any:
            if isinstance(each, Tensor):
                return self._value(each)
            return torch.device("cpu") if isinstance(each, torch.device) else each

        try:
            result = func(*tree_map(on_cpu, args), **tree_map(on_cpu, dict(kwargs)))
        except (RuntimeError, NotImplementedError):
            return None
        return [each for each in tree_leaves(result) if isinstance(each, Tensor)]

    def _store(self, tensor: Tensor, value: Tensor) -> None:
        """Store the value of a result, unless it lies in a storage that has one: a view,
        or written in place.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self._values:
            self._alive.append(tensor)
            self._values[key] = torch.empty(
                tensor.untyped_storage().nbytes(), dtype=torch.uint8
            ).untyped_storage()
            self._value(tensor).copy_(value)

    def _forget(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Remove the values of the tensors that the operation writes."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = kwargs.get(argument.name, args[index] if index < len(args) else None)
                for each in tree_leaves(written):
                    if isinstance(each, Tensor):
                        self._values.pop(each.untyped_storage()._cdata, None)


def constants_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context manager of a forward on ``device``: :class:`MetaConstants` on meta,
    else none.
    """
    return MetaConstants() if device.type == "meta" else nullcontext()
