"""Results of operations on the meta device by the shapes of their arguments:
an equal operation is not run again.

    func, arguments -> key        operator, shapes, strides, dtypes, numbers, and which arguments are one tensor
    key known       -> result     empty tensors with the shapes of the first result, or the argument changed in place

torch computes most meta shapes in Python, and profiles of layers repeat the same operations
thousands of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_KNOWN = 200_000
PLAIN = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class ResultSpec(NamedTuple):
    """Shape of a new result, in a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def create(self) -> Tensor:
        """Return an empty tensor on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class KnownResult(NamedTuple):
    """Result of an operation without its tensors."""

    specs: tuple[ResultSpec | None, ...] | None
    """Spec of each output; None: the result is the first argument, changed in place."""
    kind: type
    """Tensor, or the type of the sequence of outputs."""
    flops: float
    num_bytes: float

    def create(self, args: tuple[Any, ...]) -> Any:
        """Return the result for equal arguments."""
        if self.specs is None:
            return args[0]
        made = [spec and spec.create() for spec in self.specs]
        return made[0] if self.kind is Tensor else self.kind(made)


class Unknown(Exception):
    """Raised for an argument that is neither a plain value nor a tensor on meta."""


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key of an operation; None if its arguments do not determine its result."""
    seen: dict[int, int] = {}
    try:
        return (
            func,
            _key(args, seen),
            tuple([(name, _key(value, seen)) for name, value in kwargs.items()]),
        )
    except Unknown:
        return None


def _key(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
            raise Unknown
        return value.shape, value.stride(), value.dtype, seen.setdefault(id(value), len(seen))
    if isinstance(value, (list, tuple)):
        return tuple([_key(each, seen) for each in value])
    if isinstance(value, PLAIN):
        return type(value), value
    raise Unknown


def describe_result(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> KnownResult | None:
    """Describe a result that is new, or the first argument changed in place; None for any other,
    such as a view.
    """
    arguments = func._schema.arguments
    written = [
        at
        for at, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    if written:
        if written == [0] and args and result is args[0]:
            return KnownResult(None, Tensor, 0.0, 0.0)
        return None
    outputs = [result] if isinstance(result, Tensor) else result
    if not isinstance(outputs, (list, tuple)) or not all(
        each is None or type(each) is Tensor for each in outputs
    ):
        return None
    used = {storage for value in (*args, *kwargs.values()) for storage in _storages(value)}
    specs: list[ResultSpec | None] = []
    for each in outputs:
        if each is None:
            specs.append(None)
            continue
        storage = each.untyped_storage()
        spec = ResultSpec(each.shape, each.stride(), each.dtype)
        is_new = storage._cdata not in used and each.is_meta and each.storage_offset() == 0
        if not is_new or spec.create().untyped_storage().nbytes() != storage.nbytes():
            return None
        used.add(storage._cdata)
        specs.append(spec)
    return KnownResult(
        tuple(specs), Tensor if isinstance(result, Tensor) else type(result), 0.0, 0.0
    )


def _storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, (list, tuple)):
        return {storage for each in value for storage in _storages(each)}
    return set()
