"""Activation checkpointing (recompute) by operation: pointwise operations and norms are recomputed,
GEMMs never.

    forward      x --norm--> n --linear--> h --silu--> a --linear--> y         autograd saves x, n, h, a
    saved        x, (n = norm of x), h, (a = silu of h)                        a recipe in place of n and a
    backward     unpack a: run silu on h; unpack n: run norm on x; products and attention are not run again

A dispatch mode around a layer's forward records how each cheap operation made its output. When the
forward ends, each saved tensor whose recipe starts from tensors that are saved anyway, or from
parameters, is replaced by that recipe. So no additional tensor is saved, no Python of the layer
runs again, no collective is repeated, and no dropout mask is drawn again. The operation is the same
on the same numbers: gradients are bitwise equal.

Korthikanti et al. 2022, section 5, choose by hand what is cheap. torch's selective checkpointing
(``create_selective_checkpoint_contexts``) chooses by operation as well, but runs the whole layer
again around the saved products, and saves products that backward does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.model.meter import StorageRegistry

aten = torch.ops.aten
CHEAP = {
    *(
        aten.add,
        aten.sub,
        aten.rsub,
        aten.mul,
        aten.div,
        aten.neg,
        aten.abs,
        aten.addcmul,
        aten.where,
        aten.masked_fill,
    ),
    *(
        aten.pow,
        aten.exp,
        aten.sqrt,
        aten.rsqrt,
        aten.reciprocal,
        aten.erf,
        aten.clamp,
        aten.minimum,
        aten.maximum,
    ),
    *(
        aten.silu,
        aten.gelu,
        aten.relu,
        aten.sigmoid,
        aten.tanh,
        aten.leaky_relu,
        aten.elu,
        aten.softplus,
        aten.mish,
    ),
    *(
        aten.hardtanh,
        aten.hardswish,
        aten.hardsigmoid,
        aten.log_sigmoid_forward,
        aten._to_copy,
        aten.clone,
        aten.cat,
    ),
    *(aten.native_layer_norm, aten._fused_rms_norm),
}
"""Operators that are recomputed: limited by memory bandwidth,
and functions of their arguments alone.
"""
ALL_GATHERS = (
    "c10d::_allgather_base_",
    "c10d::allgather_",
    "c10d::allgather_into_tensor_coalesced_",
)
"""Collectives that write into their first argument, the output, alone."""
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""(pack, unpack) of ``torch.autograd.graph.saved_tensors_hooks``."""
OuterHooks = Callable[[], Hooks | None]
"""Function called when a layer's forward begins; it returns the hooks for tensors that stay saved,
or None.
"""


class _Place(NamedTuple):
    """A tensor argument of a recipe: the number of its storage, and its view of it."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, number: int, tensor: Tensor) -> _Place:
        """Return a tensor's place in its storage."""
        return cls(
            number, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def within(self, tensor: Tensor) -> Tensor:
        """Return the tensor at this place of another tensor's storage."""
        return tensor.as_strided(self.size, self.stride, self.offset)


class _Recipe(NamedTuple):
    """The operation that made a tensor. Tensor arguments are parameters and places."""

    function: Any
    args: Any
    kwargs: Any
    dtype: torch.dtype
    """Dtype of the tensor, the first of the operation's outputs."""
    source: Tensor | None
    """Argument of a cast to a wider dtype: it has fewer bytes, and is saved instead of the tensor.
    Else None.
    """


class _Made:
    """A tensor that is recomputed when backward needs it: its recipe,
    with kept or recomputed tensors as arguments.
    """

    def __init__(self, recipe: _Recipe, arguments: dict[int, _SavedTensor | _Made]) -> None:
        self.recipe, self.arguments = recipe, arguments
        self.dtype = recipe.dtype
        self.num_needed = 0
        """Number of saved tensors not unpacked yet that are this one, a view of it,
        or made from it.
        """
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        """Return the tensor; keep it until all that need it have taken it."""
        value = self.value
        if value is None:
            inputs = {number: argument.take() for number, argument in self.arguments.items()}
            at = partial(
                tree_map_only,
                _Place,
                lambda place: place.within(inputs[place.number]),
                is_leaf=_is_place,
            )
            result = self.recipe.function(*at(self.recipe.args), **at(self.recipe.kwargs))
            value = result if isinstance(result, Tensor) else result[0]
        self.num_needed -= 1
        self.value = value if self.num_needed > 0 else None
        return value


class _SavedTensor:
    """A tensor that stays saved, with its version when it was saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.dtype = tensor, tensor._version, tensor.dtype
        self._packed: Any = None
        self._unpack: Callable[[Any], Tensor] | None = None

    def move(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Save the tensor through the hooks of an outer context (offload) instead."""
        if self._unpack is None:
            self._packed, self._unpack = pack(self.tensor), unpack
            self.tensor = torch.empty(0)

    def take(self) -> Tensor:
        """Return the tensor, unless it was overwritten since."""
        if self._unpack is not None:
            return self._unpack(self._packed)
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: {tuple(self.tensor.shape)} is at version"
                f" {self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


class _Slot:
    """A saved tensor in autograd's graph: kept, or a view of a recomputed one."""

    def __init__(self, tensor: Tensor) -> None:
        self.source: _SavedTensor | _Made = _SavedTensor(tensor)
        self.place: _Place | None = None

    def replace(self, number: int, made: _Made) -> None:
        """Replace the saved tensor, which is a view of ``made``, by its place there."""
        assert isinstance(self.source, _SavedTensor)
        self.place, self.source = _Place.of(number, self.source.tensor), made
        _need(made)

    def unpack(self) -> Tensor:
        """Return the saved tensor."""
        if self.place is None:
            return self.source.take()
        with torch.no_grad():
            return self.place.within(self.source.take())


class PointwiseRecompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode around one forward of a layer; afterwards cheap tensors are no longer saved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipes: dict[int, _Recipe] = {}
        self._storages = StorageRegistry(lambda number: None)
        self._slots: list[tuple[int, _Slot]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _overwritten(func, args, kwargs):
            self._forget(self._number(tensor))
        result = func(*args, **kwargs)
        if func._overloadpacket in CHEAP and not func._schema.is_mutable:
            self._note(func, args, kwargs, result)
        return result

    @contextmanager
    def around_forward(self, hooks: Hooks | None = None) -> Iterator[None]:
        """Enter the mode for a forward; at its end replace saved tensors by recipes,
        save the rest by ``hooks``.
        """
        with self, saved_tensors_hooks(self._pack, _Slot.unpack):
            yield
        kept = self._replace()
        if hooks is not None:
            for tensor in kept:
                tensor.move(*hooks)
        self._recipes, self._slots = {}, []

    def _number(self, tensor: Tensor) -> int:
        number = self._storages.find(tensor)
        return self._storages.add(tensor) if number is None else number

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the recipe of a floating-point output with its own storage;
        a norm's statistics stay saved.
        """
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numbers = {self._number(tensor) for tensor in inputs}
        at = partial(tree_map_only, Tensor, self._place)
        is_cast = func._overloadpacket is aten._to_copy
        output = result if isinstance(result, Tensor) else result[0]
        number = self._number(output)
        if output.is_floating_point() and number not in numbers:
            source = inputs[0] if is_cast and inputs[0].itemsize < output.itemsize else None
            self._recipes[number] = _Recipe(func, at(args), at(kwargs), output.dtype, source)

    def _place(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor  # its storage may be another one in backward (ZeRO-3)
        return _Place.of(self._number(tensor), tensor)

    def _forget(self, number: int) -> None:
        """Drop the recipes that an in-place write invalidates: of the storage,
        and of tensors made from it.
        """
        self._recipes.pop(number, None)
        for made in [made for made, recipe in self._recipes.items() if number in _needed(recipe)]:
            del self._recipes[made]

    def _pack(self, tensor: Tensor) -> _Slot:
        # an output refers to its own node: detached, so that no reference cycle keeps the graph
        # alive
        slot = _Slot(tensor if tensor.is_leaf else tensor.detach())
        if not isinstance(tensor, nn.Parameter):
            self._slots.append((self._number(tensor), slot))
        return slot

    def _replace(self) -> list[_SavedTensor]:
        """Replace each saved tensor that can be made from kept ones, first to last;
        return the kept ones.
        """
        available: dict[int, _SavedTensor | _Made] = {}
        for number, slot in self._slots:
            if number not in self._recipes:
                available[number] = slot.source
        for number, slot in self._slots:
            recomputed = self._make(number, available)
            if recomputed is None:
                available[number] = slot.source
            elif isinstance(recomputed, _Made) and slot.source.dtype == recomputed.dtype:
                slot.replace(number, recomputed)
        sources = [*(slot.source for _, slot in self._slots), *available.values()]
        return [source for source in sources if isinstance(source, _SavedTensor)]

    def _make(
        self, number: int, available: dict[int, _SavedTensor | _Made]
    ) -> _SavedTensor | _Made | None:
        """Return the kept tensor with this storage, or how to make it from available ones; None:
        it cannot be made.
        """
        if number in available or number not in self._recipes:
            return available.get(number)
        recipe, arguments = self._recipes[number], {}
        for each, dtype in _needed(recipe).items():
            made = self._make(each, available)
            if made is None and recipe.source is not None:
                made = available[each] = _SavedTensor(recipe.source)
            if made is None or made.dtype != dtype:
                return None
            arguments[each] = made
        available[number] = _Made(recipe, arguments)
        return available[number]


def _is_place(value: object) -> bool:
    return isinstance(value, _Place)


def _needed(recipe: _Recipe) -> dict[int, torch.dtype]:
    """Return the storages that a recipe takes, each with its dtype."""
    leaves = tree_leaves((recipe.args, recipe.kwargs), is_leaf=_is_place)
    return {leaf.number: leaf.dtype for leaf in leaves if isinstance(leaf, _Place)}


def _need(made: _SavedTensor | _Made) -> None:
    """Count one more use of a recomputed tensor;
    the first use also counts one of each of its arguments.
    """
    if isinstance(made, _Made):
        made.num_needed += 1
        if made.num_needed == 1:
            for argument in made.arguments.values():
                _need(argument)


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation may write into;
    for a collective all of its arguments, of an all-gather the first alone.
    """
    schema = func._schema
    if func.namespace == "c10d":  # no schema of these says what is written
        # with sequence parallelism each norm's output is gathered: it can still be recomputed
        written = args[:1] if schema.name in ALL_GATHERS else (args, kwargs)
        return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
    if not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def recompute_pointwise(
    hooks: OuterHooks, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a layer's forward; save no output of a pointwise operation or norm
    that backward can recompute.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with PointwiseRecompute().around_forward(hooks()):
        return function(*args, **kwargs)


def no_hooks() -> Hooks | None:
    """Return None: tensors stay saved in autograd's graph."""
    return None


pointwise_recomputed = partial(recompute_pointwise, no_hooks)
