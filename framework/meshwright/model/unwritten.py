"""Uninitialised elements of tensors, found by a mark,
or by a second run of a builder with other bits in them.

A mark is a NaN with a payload that no arithmetic makes, or a large integer, and is compared bit by
bit. NaN and Inf that a user writes (``float("nan")``) are other bits, and are kept. Dtypes of which
all values are common, such as uint8 and bool, have no mark, and a tensor that is computed from
unwritten elements has none either: there the tensor has unwritten elements, or depends on such, if
it is another one as soon as uninitialised memory holds other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operations whose result has no values yet."""
MARKED_UP_TO = 2**22
"""Elements of uninitialised memory that are always marked, where the dtype has a mark."""
RESIZES = {"resize_", "resize_as_", "set_"}
"""Operations that may enlarge a tensor's memory, and write nothing to what is added."""
MARKS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF85A17E5A17E5A),
    torch.float32: (torch.int32, 0x7FC5A17E),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float16: (torch.int16, 0x7E5A),
    torch.int64: (torch.int64, 0x5A17E5A17E5A17E5),
    torch.int32: (torch.int32, 0x5A17E5A1),
}
"""dtype -> integer dtype of the same size, and the mark's bits in it."""


class Pattern(NamedTuple):
    """Bits for uninitialised memory."""

    marks: dict[torch.dtype, tuple[torch.dtype, int]]
    byte: int
    """Byte that is repeated in other dtypes."""
    boolean: int
    has_zeros: bool
    """Zeros in every second element, except of bools: True or False."""

    def bits(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Return an integer dtype and the bits that are written
        with it into a tensor of a dtype.
        """
        if dtype is torch.bool:
            return torch.uint8, self.boolean
        return self.marks.get(
            dtype.to_real() if dtype.is_complex else dtype, (torch.uint8, self.byte)
        )


NUMBERS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x4042A00000000000),
    torch.float32: (torch.int32, 0x42150000),
    torch.bfloat16: (torch.int16, 0x4215),
    torch.float16: (torch.int16, 0x50A8),
    **{dtype: (dtype, 37) for dtype in (torch.int64, torch.int32, torch.int16)},
}
"""37.25 or 37 in each dtype, as MARKS: unlike a NaN, it is above 0,
and another number as an integer.
"""
MARKED = Pattern(MARKS, byte=0x5A, boolean=0, has_zeros=False)
OTHER = Pattern(NUMBERS, byte=0x25, boolean=1, has_zeros=True)
"""Another pattern: no element has the same bits in both. As bools, NaN and 37 are True,
and only zeros differ.
"""


class FreshMemory(NamedTuple):
    """Memory of a tensor on the CPU that an operation has left uninitialised:
    its storage from byte ``start`` on.
    """

    storage: torch.UntypedStorage
    start: int
    dtype: torch.dtype

    def fill(self, pattern: Pattern) -> None:
        """Write a pattern into the memory."""
        dtype, bits = pattern.bits(self.dtype)
        first = -(-self.start // dtype.itemsize)
        count = max(0, self.storage.nbytes() // dtype.itemsize - first)
        # also inside of the user's torch.device("meta")
        elements = torch.empty(0, dtype=dtype, device="cpu")
        elements.set_(self.storage, first, (count,)).fill_(bits)  # type: ignore[call-overload]
        if pattern.has_zeros and self.dtype is not torch.bool:
            elements[1::2].zero_()


def run_operation(func: Any, args: Any, kwargs: Any) -> tuple[Any, FreshMemory | None]:
    """Run an operation of a dispatch mode; return its result,
    and the memory that it leaves uninitialised.
    """
    name = func._schema.name.removeprefix("aten::")
    tensor, storage, start = None, None, 0
    if name in RESIZES and args[0].layout is torch.strided:
        tensor = args[0]
        if len(args) > 1 and isinstance(args[1], torch.UntypedStorage):
            storage = args[1]
        else:
            storage = tensor.untyped_storage()
        start = storage.nbytes()
    found = func(*args, **kwargs)
    if name in EMPTY and isinstance(found, Tensor) and found.layout is torch.strided:
        tensor, storage = found, found.untyped_storage()
    if (
        tensor is None
        or storage is None
        or tensor.device.type != "cpu"
        or start >= storage.nbytes()
    ):
        return found, None
    return found, FreshMemory(storage, start, tensor.dtype)


@torch.no_grad()
def mark(tensor: Tensor) -> Tensor:
    """Write the mark into every element of a strided tensor on the CPU, if its dtype has one;
    return the tensor.
    """
    if tensor.dtype in MARKS and tensor.layout is torch.strided:
        integer, bits = MARKS[tensor.dtype]
        tensor.detach().view(integer).fill_(bits)
    return tensor


def mark_mask(tensor: Tensor) -> Tensor:
    """Return the bool mask of elements that hold the mark."""
    if tensor.dtype not in MARKS or tensor.layout is not torch.strided:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    integer, bits = MARKS[tensor.dtype]
    return tensor.detach().view(integer) == bits


def is_marked(tensor: Tensor) -> bool:
    """Return whether any element holds the mark."""
    return not tensor.is_meta and bool(mark_mask(tensor).any())


def to_float32(tensor: Tensor) -> Tensor:
    """Return a float32 copy of a tensor, in which marked elements stay marked."""
    found = tensor.detach().to(torch.float32, copy=True)
    if tensor.dtype is not torch.float32:
        found[mark_mask(tensor)] = mark(torch.empty(()))
    return found


class MarkEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which uninitialised memory holds a pattern."""

    def __init__(self, pattern: Pattern = MARKED) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pattern = pattern

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, memory = run_operation(func, args, kwargs or {})
        if memory is not None:
            memory.fill(self._pattern)
        return found


OVERWRITES = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "random_", "constant_", "kaiming_uniform_", "kaiming_normal_",
}  # fmt: skip
"""Methods, and functions of torch.nn.init, that write every element and read none."""
UNREAD = {
    *(Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.numel, Tensor.stride, Tensor.__len__),
    *(
        Tensor.is_floating_point,
        Tensor.is_contiguous,
        Tensor.new_empty,
        Tensor.new_zeros,
        torch.empty_like,
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "is_meta", "requires_grad")
    ),
    *(
        Tensor.detach,
        Tensor.view,
        Tensor.t,
        *(getattr(Tensor, name).__get__ for name in ("data", "T")),
    ),
}
"""Functions that read no element: of the outline alone, or views,
through which later functions touch the tensor.
"""


class FilledAtFirstTouch(TorchFunctionMode):
    """Function mode that gives a tensor values when a function first reads it, writes a part of it,
    or hands it on.

    A function that overwrites the whole tensor at once needs none: nothing is drawn that would be
    lost.
    """

    def __init__(self, tensor: Tensor, values: Callable[[], Tensor]) -> None:
        super().__init__()
        self._tensor, self._values = mark(tensor), values
        self._storage = tensor.untyped_storage()._cdata
        self._is_touched = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_touched and func not in UNREAD:
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            mine = [leaf for leaf in leaves if leaf.untyped_storage()._cdata == self._storage]
            if mine and not self._is_overwritten(func, mine, args, kwargs):
                self.fill()
            self._is_touched = self._is_touched or bool(mine)
        return func(*args, **kwargs)

    def _is_overwritten(self, func: Any, mine: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Return whether a call writes all elements before it reads any."""
        target = args[0] if args else kwargs.get("tensor")
        is_whole = len(mine) == 1 and mine[0] is target and target.numel() == self._tensor.numel()
        return is_whole and getattr(func, "__name__", "") in OVERWRITES

    def fill(self) -> None:
        """Give the tensor its values, unless something has touched it."""
        if not self._is_touched:
            self._is_touched = True
            if is_marked(self._tensor):  # or an extension of Python has written to its memory
                with torch.no_grad():
                    self._tensor.copy_(self._values())
