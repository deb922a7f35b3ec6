"""Placeholders for the planned modules of a transformers model, and the state of a run through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class TargetReached(BaseException):
    """Signal that ends a run at its target mark; a BaseException, so that no ``except Exception`` catches it.

    ``calls``: arguments of each mark called in this run, in order.
    """

    def __init__(self, calls: list[Arguments]) -> None:
        super().__init__()
        self.calls = calls


class RunState:
    """Shared state of the marks of one frame during a run of the model's forward.

    Each mark records its arguments and returns its input. The mark before ``target`` returns ``handed`` instead, and
    the target ends the run by raising :class:`TargetReached`.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.positions: dict[str, int] = {}
        """Mark name -> its index in the order of the forward; empty until ``ModelSkeleton.find_order`` has run."""
        self.direct: set[int] = set()
        """Indices of the marks whose input is the output of the mark before, without a computation between."""
        self.met: list[str] = []
        self.last: Any = None
        self.target = -1
        self.handed: Any = None
        self.calls: list[Arguments] = []
        """Arguments of each mark called in this run, in order."""

    def begin(self, target: int, handed: Any) -> None:
        """Reset the state before a run."""
        self.target, self.handed, self.calls = target, handed, []

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a mark, and return the mark's output.

        While the order is unknown, the output is a new tensor, so that its identity shows whether the next mark
        receives it unchanged.

        Raises:
            TargetReached: the mark is the target of this run.
        """
        given = first_argument(args, kwargs)
        if not self.positions:
            if given is self.last:
                self.direct.add(len(self.met))
            self.met.append(name)
            self.last = given.clone() if given.is_floating_point() else torch.zeros(*given.shape, self.width)
            return self.last
        position = self.positions[name]
        self.calls.append((args, kwargs))
        if position == self.target:
            raise TargetReached(self.calls)
        return self.handed if position == self.target - 1 and self.handed is not None else given


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, positional or keyword: the module's input."""
    return args[0] if args else next(iter(kwargs.values()))


def with_first_argument(arguments: Arguments, value: Any) -> Arguments:
    """Return the arguments with the first one replaced by ``value``."""
    args, kwargs = arguments
    if args:
        return (value, *args[1:]), dict(kwargs)
    return (), {**kwargs, next(iter(kwargs)): value}


class ModulePlaceholder(nn.Module):
    """Placeholder for a planned module. It keeps the plain attributes that a model may read, such as attention type."""

    def __init__(self, name: str, module: nn.Module, play: RunState) -> None:
        super().__init__()
        own = vars(self).keys()
        for attribute, value in vars(module).items():
            if attribute not in own and not isinstance(value, Tensor | nn.Module):
                setattr(self, attribute, value)
        self.mark_name = name
        self.play = play

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.play.enter(self.mark_name, args, kwargs)
