"""Initial value of a parameter: loaded from the directory's files,
or drawn by the model's own ``_init_weights``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError
from meshwright_interop.huggingface.source import SafetensorsDirectory

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.FakeTensor": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


class _SkipMeta(TorchFunctionMode):
    """Function mode in which in-place methods of meta tensors, which have no values to change,
    return at once.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # that of torch.nn.init
        name, target = getattr(func, "__name__", ""), args[0] if args else kwargs.get("tensor")
        if (
            name.endswith("_")
            and not name.endswith("__")
            and isinstance(target, Tensor)
            and target.is_meta
        ):
            return target
        return func(*args, **kwargs)


class ParameterInitialiser:
    """The ``initialise`` callable of a restructured model: fills a whole (unsharded)
    parameter in place, by its name.

    A value is drawn with the planned module that holds the parameter. The module is on the meta
    device; only this one parameter is materialised. The model's rules are then applied to all
    submodules, inner ones first, as transformers does. Parameters on meta draw no random numbers.
    The value therefore depends only on the generator's seed, the parameter's name and the model.
    """

    def __init__(
        self,
        model: Any,
        names: Mapping[str, str],
        planned: Mapping[str, nn.Module],
        weights: SafetensorsDirectory | None,
        constants: Mapping[str, Tensor],
    ) -> None:
        self._rules = model._init_weights
        self._names = names
        """Name of a parameter in the Sequential -> its name in transformers."""
        self._planned = {name: copy.deepcopy(module).to("meta") for name, module in planned.items()}
        self._weights = weights
        self._constants = constants
        """Name in transformers -> value of a frozen parameter as the model is built,
        which the rules may replace.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterInitialiser:
        return self

    def __call__(self, name: str, tensor: Tensor) -> None:
        theirs = self._names[name]
        if isinstance(tensor, FakeTensor):  # a dry run: it has a size and no values
            tensor.zero_()
        elif self._weights is not None:
            tensor.zero_()  # all of it at once: experts come one by one
            self._weights.copy_to(theirs, tensor)
        else:
            self.draw(theirs, tensor)

    def copy_rows(self, name: str, target: Tensor, first: int) -> None:
        """Fill a tensor with rows of a parameter of the files, from ``first`` on; the files' other
        experts stay unread.
        """
        if not isinstance(target, FakeTensor):
            assert self._weights is not None
            self._weights.copy_to(self._names[name], target, first)

    def draw(self, theirs: str, tensor: Tensor) -> None:
        """Fill one parameter by the model's rules. ``theirs``: its name in transformers.

        Raises:
            ModelError: the rules do not initialise this parameter.
        """
        place = next(place for place in self._planned if theirs.startswith(place + "."))
        module = copy.deepcopy(self._planned[place])
        owner, _, attribute = theirs.removeprefix(place + ".").rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        module.get_submodule(owner)._parameters[attribute] = parameter
        if theirs in self._constants:
            parameter.data.copy_(self._constants[theirs])
        before = tensor._version
        try:
            with torch.no_grad(), _SkipMeta():
                module.apply(self._rules)
        except Exception as error:
            raise ModelError(
                "MW-INTEROP-110",
                f"the rules of {type(module).__name__} cannot initialise {theirs} in a module of"
                f" its own ({type(error).__name__}: {error}): save a model with its weights into"
                " the directory (save_pretrained), and train from those",
            ) from error
        is_written = tensor._version != before or theirs in self._constants
        if module.get_submodule(owner)._parameters[attribute] is not parameter or not is_written:
            raise ModelError(
                "MW-INTEROP-065",
                f"{type(module.get_submodule(owner)).__name__} initialises {theirs} in __init__,"
                " and not in _init_weights: it cannot be drawn by name. Save a model with its"
                " weights into the directory (save_pretrained), and train from those",
            )
