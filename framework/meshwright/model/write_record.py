"""Record of what a builder writes to its parameters on the meta device,
from which their first values are found.
"""

from __future__ import annotations

import hashlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.unwritten import (
    EMPTY,
    MARKED,
    MARKED_UP_TO,
    MARKS,
    FreshMemory,
    Pattern,
    mark_mask,
    run_operation,
)

DRAWN = "drawn"
"""Value of a parameter whose elements differed when it was registered."""
COPIES = {"clone", "_to_copy", "lift_fresh_copy"}
"""Operations whose result has the values of their argument."""
UNSEEN = ("orthogonal_", "sparse_", "dirac_", "_no_grad_trunc_normal_")
"""Functions of torch.nn.init that, in some versions of torch, return at once on meta:
no dispatch mode sees them.
"""
MAX_EMPTY = 2**31
"""Elements of an uninitialised tensor that a builder may get in memory:
more could not be allocated on a small host.
"""
Write = tuple[Any, ...]
"""Name of an operation and its plain arguments."""


class WriteRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records writes to storages on meta, through any alias: the tensor, a view,
    its ``.data``.

    Also records which CPU tensors are uninitialised, and a digest of all that went into each tensor
    on meta.

    Args:
        pattern: bits that uninitialised memory on the CPU gets.
        sizes: bytes of large storages that get them too. Most large tensors are parameters, which
            move to meta before their memory is touched.
    """

    def __init__(self, pattern: Pattern = MARKED, sizes: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pattern, self._sizes = pattern, sizes
        self._unfilled: dict[int, int] = {}
        """Large storage that has no pattern -> its bytes."""
        self._num_unfilled: Counter[int] = Counter()
        """Number of such storages by their bytes, without those of parameters without values."""
        self._writes: dict[int, list[Write]] = {}
        self._digests: dict[int, bytes] = {}
        self._alive: list[Any] = []  # keeps storages alive: a freed one's address could be reused
        self._empty: set[int] = set()
        # a storage that has died keeps its address, but not its memory: no other is taken for it
        self._addresses: list[StorageWeakRef] = []
        self._left_on_meta: set[int] = set()
        self._registered: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """Storage of a parameter on the CPU -> the parameter,
        and the outline registered in its place.
        """
        self._given: dict[int, float | str] = {}
        self._versions: dict[int, int] = {}  # equal for copies, until one of them is written to
        self._random: set[int] = set()  # versions that depend on random draws
        self._originals: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
        """Recorded version of each function of UNSEEN, while the mode is active -> the function."""
        self._modules_before: frozenset[str] = frozenset()
        self._replaced: list[tuple[dict[str, Any], str]] = []
        """Namespaces and their names that hold a recorded version, while the mode is active."""
        self._num_draws = 0

    def version_of(self, tensor: Tensor) -> int | None:
        """Return a number that two tensors share,
        if one is an unchanged copy of the other and their values are drawn.

        None: the values are not drawn.
        """
        version = self._versions.get(_key(tensor), 0)
        return version if version in self._random else None

    def of(self, tensor: Tensor) -> list[Write]:
        """Return the writes to a tensor's storage, in order."""
        return self._writes.get(_key(tensor), [])

    def digest_of(self, tensor: Tensor) -> bytes:
        """Return a digest of the writes to a tensor: operations, numbers,
        places in the order of random draws.
        """
        return self._digests.get(_key(tensor), b"")

    def is_left_on_meta(self, tensor: Tensor) -> bool:
        """Return whether the builder itself has put a tensor on the meta device."""
        return _key(tensor) in self._left_on_meta

    def is_empty(self, tensor: Tensor) -> bool:
        """Return whether nothing has written to a tensor on the CPU;
        a write through numpy shows in a marked one.
        """
        is_known = (
            tensor.dtype in MARKS
            and tensor.layout is torch.strided
            and tensor.numel() <= MARKED_UP_TO
        )
        return _key(tensor) in self._empty and (not is_known or bool(mark_mask(tensor).all()))

    def given_to(self, tensor: Tensor) -> float | str | None:
        """Return the value that a parameter, or the one it is a copy of,
        had when it was registered; None: no value.
        """
        return self._given.get(_key(tensor))

    def register(self, real: Tensor, outline: Tensor) -> None:
        """Take over a tensor on the CPU as ``outline``, on meta."""
        value = self.value_of(real)
        self._registered[_key(real)] = weakref.ref(real), outline
        unfilled = self._unfilled.pop(_key(real), 0)
        if value is None:
            self._num_unfilled[unfilled] -= 1  # nothing depends on its bits
        else:
            self._given[_key(outline)] = value
            self._add(outline, ("registered", value), [real] if value == DRAWN else [])

    def value_of(self, tensor: Tensor) -> float | str | None:
        """Return the value that fills a tensor, DRAWN if its elements differ,
        None if it has no values yet.
        """
        if tensor.is_meta or self.is_empty(tensor) or not tensor.numel():
            return None
        flat = tensor.detach().flatten()
        if flat.is_floating_point() and bool((flat == flat[0]).all()):
            return float(flat[0])
        return DRAWN

    def __enter__(self) -> WriteRecord:
        """Replace functions of torch.nn.init that do nothing on meta by recorded versions,
        in every module.
        """
        originals = {name: getattr(nn.init, name) for name in UNSEEN}
        recorded = {name: self._recorded(name, original) for name, original in originals.items()}
        self._originals = {recorded[name]: original for name, original in originals.items()}
        self._modules_before = frozenset(sys.modules)
        for names in _namespaces(list(sys.modules)):
            if names.keys().isdisjoint(UNSEEN):
                continue  # nearly all of thousands
            for name, original in originals.items():
                if names.get(name) is original:
                    names[name] = recorded[name]
                    self._replaced.append((names, name))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _recorded(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a version of a function of torch.nn.init that draws a tensor,
        with a note where that is on meta.
        """

        def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # after the record's end, through a name that __exit__ has not found
            if not self._originals:
                return getattr(nn.init, name)(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)
            self._num_draws += 1
            plain = [_plain(value) for value in tree_leaves((args, kwargs))]
            self._note(tensor, (name, *plain), [], is_random=True)
            return tensor

        return draw

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for names, name in self._replaced:
            self._put_back(names, name)
        # a new module may have imported a recorded version, "as" anything
        for names in _namespaces(sys.modules.keys() - self._modules_before):
            for name in list(names):
                self._put_back(names, name)
        self._replaced = []
        self._originals = {}

    def _put_back(self, names: dict[str, Any], name: str) -> None:
        """Replace a recorded version in a module's namespace by the function of torch.nn.init."""
        value = names.get(name)
        if isinstance(value, FunctionType) and value in self._originals:
            names[name] = self._originals[value]

    def _note(
        self, tensor: Tensor, write: Write, sources: list[Tensor], *, is_random: bool
    ) -> None:
        """Record a write to a tensor on meta that also reads ``sources``; ``is_random``:
        it draws.
        """
        # each write keeps a storage alive, so no other has this number
        version = 1 + len(self._alive)
        if is_random or any(
            self._versions.get(_key(each), 0) in self._random for each in (tensor, *sources)
        ):
            self._random.add(version)
        self._versions[_key(tensor)] = version
        self._writes.setdefault(_key(tensor), []).append(write)
        self._add(tensor, write, sources)

    def _add(self, tensor: Tensor, write: Write, sources: list[Tensor]) -> None:
        """Add a write to the digest of a tensor."""
        self._alive.append(tensor.untyped_storage())
        generator = torch.default_generator.initial_seed()
        found = hashlib.blake2b(self._digests.get(_key(tensor), b""), digest_size=16)
        found.update(
            repr(
                (write, tuple(tensor.shape), tensor.storage_offset(), self._num_draws, generator)
            ).encode()
        )
        for source in sources:
            found.update(
                self._digests.get(_key(source), b"") if source.is_meta else bytes_of(source)
            )
        self._digests[_key(tensor)] = found.digest()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self._num_draws += is_random
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        write = (name, *map(_plain, filter(_is_plain, tree_leaves((args[1:], kwargs)))))
        for tensor in _written(func, args, kwargs):
            target = self._outline_of(tensor)
            if target.is_meta:
                self._note(
                    target,
                    write,
                    [each for each in given if each is not tensor],
                    is_random=is_random,
                )
            if not tensor.is_meta:
                self._empty.discard(_key(tensor))
        asked = kwargs.get("device")
        if name == "empty" and math.prod(args[0]) > MAX_EMPTY:
            kwargs = kwargs | {"device": torch.device("meta")}
        found, memory = run_operation(func, args, kwargs)
        if memory is not None:
            self._fill(memory)
        if isinstance(found, Tensor) and not func._schema.is_mutable:
            self._note_result(func, name, write, given, found)
            if (
                found.is_meta
                and not given
                and asked is not None
                and torch.device(asked).type == "meta"
            ):
                self._alive.append(found.untyped_storage())
                self._left_on_meta.add(_key(found))
        return found

    def unfilled_sizes(self) -> frozenset[int]:
        """Return the bytes of large storages without a pattern, but for those that a parameter has
        taken over before anything was written.
        """
        return frozenset(size for size, number in self._num_unfilled.items() if size and number > 0)

    def _fill(self, memory: FreshMemory) -> None:
        """Fill memory that an operation has left uninitialised, unless it is large."""
        size = memory.storage.nbytes()
        is_large = memory.dtype in MARKS and size > MARKED_UP_TO * memory.dtype.itemsize
        if not is_large or size in self._sizes:
            memory.fill(self._pattern)
        else:
            self._addresses.append(StorageWeakRef(memory.storage))  # type: ignore[no-untyped-call]
            self._unfilled[memory.storage._cdata] = size
            self._num_unfilled[size] += 1

    def _outline_of(self, tensor: Tensor) -> Tensor:
        """Return the outline in whose place the builder still holds a tensor on the CPU,
        or else the tensor.
        """
        original, outline = self._registered.get(_key(tensor), (None, tensor))
        return tensor if original is None or original() is None else outline

    def _note_result(
        self, func: Any, name: str, write: Write, given: list[Tensor], found: Tensor
    ) -> None:
        """Record a new tensor: without values, a copy of a recorded one,
        or computed from recorded ones.
        """
        if not found.is_meta:
            if name in EMPTY:
                storage = StorageWeakRef(found.untyped_storage())  # type: ignore[no-untyped-call]
                self._addresses.append(storage)
                self._empty.add(_key(found))
            elif not func.is_view:
                self._empty.discard(_key(found))
        elif any(each.is_meta for each in given) and not func.is_view and name not in EMPTY:
            if name not in COPIES:
                self._note(
                    found, write, given, is_random=torch.Tag.nondeterministic_seeded in func.tags
                )
            elif _key(found) != _key(given[0]):
                self._writes[_key(found)] = list(self.of(given[0]))
                self._versions[_key(found)] = self._versions.get(_key(given[0]), 0)
                if (value := self.given_to(given[0])) is not None:
                    self._given[_key(found)] = value
                self._add(found, write, given)


def _namespaces(modules: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the namespace of each imported module of these names."""
    for name in modules:
        names = getattr(sys.modules.get(name), "__dict__", None)
        if names is not None:
            yield names


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to: its first argument, ``out``,
    or a list of them.
    """
    if not func._schema.is_mutable:
        return []
    written = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return written


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | torch.Generator)


def _plain(value: Any) -> Any:
    return value.initial_seed() if isinstance(value, torch.Generator) else value
