"""Initial values of parameters: the reset function that draws each, and a check that the builder sets no other value.

Each process draws its parameters again, by name. The source is the model's ``initialise``, or ``reset_parameters()`` of
the module that owns them (``_reset_parameters()`` of torch's attention, for the biases of its projections too). Any
other value that a builder writes would be lost. So the operations that a builder applies to each parameter are
recorded, and must end with those of the reset. They are compared by name and arguments: parameters are on meta.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import ModelError

GIVEN = "_given_value"
"""Attribute of a parameter that had values when registered: the number that all elements equal, or DRAWN."""
DRAWN = "drawn"
EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
MAX_EMPTY = 2**31
"""Elements of an uninitialised tensor that a builder may get in memory: more could not be allocated on a small host."""
Write = tuple[Any, ...]
"""Name of an operation and its plain arguments."""


class ParameterOwner(NamedTuple):
    """Module whose reset sets the first value of a parameter."""

    module: nn.Module
    path: str
    """Name of the parameter inside the module."""


class WriteRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records writes to storages on meta, through any alias: the tensor, a view, its ``.data``.

    Also records which CPU tensors are uninitialised.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[Write]] = {}
        self._alive: list[Any] = []  # keeps storages alive: a freed one's address could be reused
        self._empty: set[int] = set()
        self._patched: list[tuple[dict[str, Any], str]] = []

    def of(self, tensor: Tensor) -> list[Write]:
        """Return the writes to a tensor's storage, in order."""
        return self._writes.get(tensor.untyped_storage()._cdata, [])

    def value_of(self, tensor: Tensor) -> float | str | None:
        """Return the value that fills a tensor, DRAWN if its elements differ, None if it has no values yet."""
        if tensor.is_meta or tensor.untyped_storage()._cdata in self._empty or not tensor.numel():
            return None
        flat = tensor.detach().flatten()
        return float(flat[0]) if flat.is_floating_point() and bool((flat == flat[0]).all()) else DRAWN

    def __enter__(self) -> WriteRecord:
        """Replace ``orthogonal_`` by a recorded version. On meta it does nothing that a dispatch mode could see."""
        original = nn.init.orthogonal_

        def orthogonal_(tensor: Tensor, gain: float = 1, generator: torch.Generator | None = None) -> Tensor:
            if tensor.is_meta:
                self._note(tensor, ("orthogonal_", gain))
                return tensor
            return original(tensor, gain, generator)

        for module in list(sys.modules.values()):
            names = vars(module) if hasattr(module, "__dict__") else {}
            if names.get("orthogonal_") is original:
                names["orthogonal_"] = orthogonal_
                self._patched.append((names, "orthogonal_"))
        self._original = original
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for names, name in self._patched:
            names[name] = self._original
        self._patched.clear()

    def _note(self, tensor: Tensor, write: Write) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._writes.setdefault(storage._cdata, []).append(write)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            if args[0].is_meta:
                self._note(args[0], (name, *filter(_is_plain, tree_leaves((args[1:], kwargs)))))
            else:
                self._empty.discard(args[0].untyped_storage()._cdata)
        if name == "empty" and math.prod(args[0]) > MAX_EMPTY:
            kwargs = kwargs | {"device": torch.device("meta")}
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and not found.is_meta and not func._schema.is_mutable:
            key = found.untyped_storage()._cdata
            if name in EMPTY:
                self._empty.add(key)
            elif not func.is_view:
                self._empty.discard(key)
        return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple)


def resetter(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that initialises a module's parameters, or None. Torch's attention has a private one."""
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def find_owners(layers: nn.Sequential) -> dict[str, ParameterOwner]:
    """Return the owner of each parameter's first value, by parameter name."""
    owners: dict[str, ParameterOwner] = {}
    for module_name, module in layers.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        held = copy.deepcopy(module) if own else module
        owners |= {f"{module_name}.{name}".lstrip("."): ParameterOwner(held, name) for name in own}
    for module_name, module in reversed(list(layers.named_modules())):  # the outermost module comes last and wins
        if not callable(getattr(module, "reset_parameters", None)) and resetter(module) is not None:
            held = copy.deepcopy(module)
            for path, writes in reset_writes(module).items():
                if writes:
                    owners[f"{module_name}.{path}".lstrip(".")] = ParameterOwner(held, path)
    return owners


def reset_writes(module: nn.Module) -> dict[str, list[Write]]:
    """Return the writes of a module's reset to each parameter at or below it."""
    again = copy.deepcopy(module)
    reset = resetter(again)
    with WriteRecord() as record:
        if reset is not None:
            reset()
    return {name: record.of(parameter) for name, parameter in again.named_parameters()}


def first_value(owner: ParameterOwner) -> Tensor:
    """Return a parameter as its owner's reset draws it from torch's generator: full tensor, float32, on CPU."""
    real = copy.deepcopy(owner.module).float().to_empty(device="cpu")
    for name, buffer in owner.module.named_buffers():
        real.get_buffer(name).copy_(buffer)
    reset = resetter(real)
    assert reset is not None
    reset()
    return real.get_parameter(owner.path).detach()


def check_first_values(
    path: str, layers: nn.Sequential, owners: dict[str, ParameterOwner], record: WriteRecord, copies: Collection[str]
) -> None:
    """Check that each parameter's initial value is set by its owner's reset, and by nothing else.

    Args:
        path: Name of the builder, for the message.
        layers: The model, with parameters on meta.
        owners: Owner of each parameter's first value.
        record: Writes during the builder's run.
        copies: Names of parameters that are tied to another one; not checked.

    Raises:
        ModelError: A module has no reset, a reset leaves a parameter out, or the builder sets a value itself.
    """
    expected: dict[str, list[Write]] = {}
    for module_name, module in reversed(list(layers.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        is_private = not callable(getattr(module, "reset_parameters", None)) and resetter(module) is not None
        if own and resetter(module) is None:
            raise ModelError(
                "MW-MODEL-008",
                f"{path}: parameter {_joined(module_name, next(iter(own)))}: {type(module).__name__} has no "
                f"reset_parameters(), so its first value is unknown in a process that holds another part of the model. "
                f"Give the module a reset_parameters(), or the model an attribute initialise(name, tensor)",
            )
        if own or is_private:
            for name, writes in reset_writes(module).items():
                if is_private or name in own:
                    expected.setdefault(_joined(module_name, name), []).extend(writes)
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if name in copies:
            continue
        owner, wanted, found = owners[name], expected.get(name, []), record.of(parameter)
        reset = f"{type(owner.module).__name__}.{getattr(resetter(owner.module), '__name__', 'reset_parameters')}()"
        if not wanted:
            raise ModelError(
                "MW-MODEL-009",
                f"{path}: {reset} gives parameter {name} no value, so it would have none in a process that draws it "
                f"anew. Set it there, or give the model an attribute initialise(name, tensor)",
            )
        given = getattr(parameter, GIVEN, None)
        if found[-len(wanted) :] != wanted if found else given is not None and not _is_reset_to(owner, given):
            raise ModelError(
                "MW-MODEL-010",
                f"{path}: the value of parameter {name} is set outside of {reset}, and would be lost: each process "
                f"draws its parameters anew. Set it in reset_parameters(), or give the model an attribute "
                f"initialise(name, tensor)",
            )


def _joined(module_name: str, name: str) -> str:
    return f"{module_name}.{name}".lstrip(".")


def _is_reset_to(owner: ParameterOwner, given: float | str) -> bool:
    """Return True if the reset fills the parameter with one number that equals ``given``."""
    if given == DRAWN:
        return False
    with torch.random.fork_rng(devices=[]):
        return bool(torch.all(first_value(owner) == float(given)))
