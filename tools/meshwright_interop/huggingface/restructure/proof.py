"""Proof that a restructured model computes the logits of the unmodified one:
both graphs of operations are compared.

Both forwards run on the meta device, where they cost no memory and almost no time, at the model's
full size. Each value gets a number: a hash of the operation, its constants and the numbers of its
operands. Leaves are the token ids, the parameters and buffers by their name, and constants by their
content. Equal numbers mean the same operations, in the same order, on the same values: such logits
agree bit for bit on every device.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from meshwright_interop.huggingface.restructure.constants import constants_on
from meshwright_interop.huggingface.restructure.derived import DerivedSkeleton, positions_like
from meshwright_interop.huggingface.restructure.library import whole_rows
from meshwright_interop.huggingface.restructure.observation import BATCH, LENGTH, observe


class ValueNumbering(TorchDispatchMode):
    """Dispatch mode that numbers the content of each storage;
    a view is its storage's number with its geometry.
    """

    def __init__(self, leaves: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[int, str] = {}
        self._alive: list[Tensor] = []
        """Tensors whose storages have numbers, so that no address is used twice."""
        for name, tensor in leaves:
            self.name(tensor, name)

    def number(self, tensor: Tensor) -> str:
        """Return the number of a tensor's values: of its storage, and of its place in it."""
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self.name(tensor, self._constant(tensor))
        geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return f"{self._numbers[key]} {geometry}"

    def name(self, tensor: Tensor, number: str) -> None:
        """Set the number of a tensor's storage."""
        self._alive.append(tensor)
        self._numbers[tensor.untyped_storage()._cdata] = number

    def _constant(self, tensor: Tensor) -> str:
        """Return the number of a leaf without a name; on meta it is a value of its own,
        equal to no other.
        """
        if tensor.is_meta:
            return f"unnamed {len(self._alive)} {id(self)}"
        return _hash(repr(bytes(tensor.untyped_storage().cpu().tolist())))  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = tree_map_only(Tensor, self.number, (args, kwargs))
        call = _hash(str(func), repr(tree_flatten(operands)))
        result = func(*args, **kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name, args[index] if index < len(args) else None)
            for tensor in (each for each in tree_flatten(written)[0] if isinstance(each, Tensor)):
                self.name(tensor, _hash(call, f"written {index}"))
        for index, tensor in enumerate(tree_flatten(result)[0]):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._numbers:
                self.name(tensor, _hash(call, str(index)))
        return result


class ConstantNumbering(TorchFunctionMode):
    """Function mode that numbers constants of Python data, whose content is lost on meta:
    tensors and list indices.
    """

    def __init__(self, numbering: ValueNumbering) -> None:
        super().__init__()
        self.numbering = numbering

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], tuple | list):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (
                args[0],
                tuple(torch.tensor(each) if isinstance(each, list) else each for each in index),
            )
        result = func(*args, **kwargs)
        if func is torch.tensor and result.is_meta:
            self.numbering.name(result, _hash("constant", repr(args[0])))
        return result


@contextmanager
def _numbered(leaves: Iterable[tuple[str, Tensor]]) -> Iterator[ValueNumbering]:
    """Number the values of the block, without gradients."""
    with torch.no_grad(), ValueNumbering(leaves) as numbering, ConstantNumbering(numbering):
        yield numbering


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class ForwardProof:
    """Comparison of an unmodified model with its layers,
    and the observations of a run of the former.

    Args:
        model: the model, before any module is replaced by a mark.
        units: names of the modules that the cut keeps whole.

    Raises:
        Exception: any that the model's forward raises on meta.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.whole = copy.deepcopy(model).to("meta")
        self.leaves = _leaves([("", model, self.whole)])
        self.observation = observe(
            self.whole, {name: self.whole.get_submodule(name) for name in units}, _token_ids()
        )

    def holds_for(
        self, layers: nn.Sequential, skeleton: DerivedSkeleton, names: Mapping[str, str]
    ) -> bool:
        """Return True if the layers compute the same logits,
        each as a copy that shares no object with the others.

        Args:
            layers: the restructured model. ``skeleton``: the model with marks, which its layers
                share.
            names: name of each unit in the Sequential -> its name in the model.
        """
        ids = _token_ids()
        with (
            _numbered([*self.leaves, ("input_ids", ids)]) as numbering,
            whole_rows(),
            constants_on(ids.device),
        ):
            logits = self.whole(
                input_ids=ids, use_cache=False, **skeleton.positions_for(positions_like(ids))
            ).logits
            expected = numbering.number(logits)
        ours = nn.Sequential(
            OrderedDict(
                (name, copy.deepcopy(layer).to("meta")) for name, layer in layers.named_children()
            )
        )
        constants = skeleton.copy_on(ids.device)
        parts = [("", constants, constants)]
        parts += [
            (theirs, layers.get_submodule(name), ours.get_submodule(name))
            for name, theirs in names.items()
        ]
        with _numbered([*_leaves(parts), ("input_ids", ids)]) as numbering:
            return numbering.number(ours(ids)) == expected


def _token_ids() -> Tensor:
    return torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")


def _leaves(parts: Sequence[tuple[str, nn.Module, nn.Module]]) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of copies of modules,
    each with the first of its names in alphabetical order.

    ``parts``: prefix of names, module, and its copy, in which tensors of several names may no
        longer be one.
    """
    names: dict[int, str] = {}
    copies: list[tuple[int, Tensor]] = []
    for prefix, module, duplicate in parts:
        for (name, tensor), (_, copied) in zip(
            _tensors(module, prefix), _tensors(duplicate, prefix), strict=True
        ):
            names[id(tensor)] = min(name, names.get(id(tensor), name))
            copies.append((id(tensor), copied))
    return [(names[key], copied) for key, copied in copies]


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)
