"""Placeholders for the planned modules of a transformers model,
and the state of a run through them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class TargetReached(BaseException):
    """Signal that ends a run at its target mark; a BaseException,
    so that no ``except Exception`` catches it.

    ``calls``: arguments of each mark called in this run, in order.
    """

    def __init__(self, calls: list[Arguments]) -> None:
        super().__init__()
        self.calls = calls


class RunState:
    """Shared state of the marks of one frame during a run of the model's forward.

    Each mark records its arguments and returns its input. The mark before ``target`` returns
    ``substitute`` instead, and the target ends the run by raising :class:`TargetReached`.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.positions: dict[str, int] = {}
        """Mark name -> its index in the order of the forward;
        empty until ``ModelSkeleton.find_order`` has run.
        """
        self.direct: set[int] = set()
        """Indices of the marks whose input is the output of the mark before,
        without a computation between.
        """
        self.call_order: list[str] = []
        """Names of the marks in the order of their calls, while the order is being determined."""
        self.last: Any = None
        """Output of the mark called last."""
        self.target = -1
        self.substitute: Any = None
        self.calls: list[Arguments] = []
        """Arguments of each mark called in this run, in order."""

    def reset(self, target: int, substitute: Any) -> None:
        """Reset the state before a run."""
        self.target, self.substitute, self.calls = target, substitute, []

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a mark, and return the mark's output.

        While the order is unknown, the output is a new tensor, so that its identity shows whether
        the next mark receives it unchanged.

        Raises:
            TargetReached: the mark is the target of this run.
        """
        value = first_argument(args, kwargs)
        if not self.positions:
            if value is self.last:
                self.direct.add(len(self.call_order))
            self.call_order.append(name)
            self.last = (
                value.clone()
                if value.is_floating_point()
                else torch.zeros(*value.shape, self.width)
            )
            return self.last
        position = self.positions[name]
        self.calls.append((args, kwargs))
        if position == self.target:
            raise TargetReached(self.calls)
        return (
            self.substitute
            if position == self.target - 1 and self.substitute is not None
            else value
        )


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
    """Placeholder for a planned module. It keeps the plain attributes that a model may read,
    such as attention type.
    """

    def __init__(self, name: str, module: nn.Module, state: RunState) -> None:
        super().__init__()
        own = vars(self).keys()
        for attribute, value in vars(module).items():
            if attribute not in own and not isinstance(value, Tensor | nn.Module):
                setattr(self, attribute, value)
        self.mark_name = name
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.enter(self.mark_name, args, kwargs)
