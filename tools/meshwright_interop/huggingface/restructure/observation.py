"""Observation of one traced forward of an unmodified model: the calls of its units,
and the form of their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright_interop.huggingface.restructure.constants import constants_on
from meshwright_interop.huggingface.restructure.library import whole_rows

BATCH, LENGTH = 2, 4
"""Size of the token ids of traced runs."""


class OutputForm(NamedTuple):
    """Form of a module's output: a tensor, or a tuple of ``length`` values that begins
    with the hidden states.
    """

    length: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def wrap(self, value: Any) -> Any:
        """Return the output of the module with these hidden states."""
        return value if self.length is None else (value, *[None] * (self.length - 1))


class Observation(NamedTuple):
    """Observations of one traced forward: the order of the units' calls,
    and the form of each output.
    """

    order: list[str]
    forms: dict[str, OutputForm]


def hidden_states(output: Any) -> Any:
    """Return the hidden states of a module's output: the output itself,
    or the first element of a tuple.
    """
    return output[0] if isinstance(output, tuple | list) and output else output


def observe(model: nn.Module, units: Mapping[str, nn.Module], ids: Tensor) -> Observation:
    """Run the whole model on ``ids`` (B, S), and return the observation of its units."""
    seen = Observation([], {})

    def record(name: str, output: Any) -> None:
        hidden = hidden_states(output)
        if not isinstance(hidden, Tensor) or not isinstance(output, Tensor | tuple | list):
            raise TypeError(
                f"{name} returns a {type(output).__name__} without hidden states at its head"
            )
        seen.order.append(name)
        length = None if isinstance(output, Tensor) else len(output)
        seen.forms[name] = OutputForm(length, tuple(hidden.shape), hidden.dtype)

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: record(name, output))
        for name, module in units.items()
    ]
    try:
        with torch.no_grad(), whole_rows(), constants_on(ids.device):
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
