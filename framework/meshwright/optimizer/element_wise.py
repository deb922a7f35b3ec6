"""Element-wise optimizers on flat shards, with states of any format.

An optimizer is the formula of one step (:meth:`ElementWise.update`) on numbers. Codecs read them
from its states and write them back, a piece of a shard at a time. Torch's fused kernel, where an
optimizer names one, steps the shards whose states are plain numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.config.optimizers import StateSpec
from meshwright.optimizer.codecs import NUMBERS, Allocate, Piece, StateCodec
from meshwright.optimizer.eight_bit import computed_in
from meshwright.optimizer.layout import Shards
from meshwright.optimizer.shard_states import ShardStates

STEP = "step"
"""Number of steps taken, beside the states of each parameter, as in torch."""


class ElementWise(ShardStates, torch.optim.Optimizer):
    """Optimizer whose update of an element depends on the history of this element alone.

    Each parameter group has "lr", "weight_decay", "eps", "betas", and the "codec" of its states.
    """

    has_kernel: ClassVar[bool] = False
    """True: the next class is an optimizer of torch, whose kernel steps plain numbers."""
    in_torch: ClassVar[Mapping[str, str]] = {}
    """Name of a state in checkpoints -> its name in torch, where they differ."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        states: Sequence[StateSpec],
        allocate: Allocate | None,
        **options: Any,
    ) -> None:
        """Build the optimizer.

        Args:
            allocate: function that allocates the states; None: on the device of the weights.
            options: arguments of the next class.
        """
        super().__init__(groups, **options)
        self._states, self._allocate = tuple(states), allocate
        self._codec_of: dict[Tensor, StateCodec] = {
            parameter: group["codec"]
            for group in self.param_groups
            for parameter in group["params"]
        }

    @classmethod
    def build(cls, groups: list[dict[str, Any]], keys: Optimizer, shards: Shards) -> Self:
        """Build the optimizer of the configuration, without a kernel of torch."""
        return cls(groups, keys.states, shards.allocate, defaults={})

    @abstractmethod
    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        """Update some elements of weights, and their states, in place. Gradients may be overwritten.

        Args:
            step: from 0.
        """

    def update_in_kernel(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], step: int
    ) -> bool:
        """Step a parameter in one kernel of its codec, if there is one; return whether it did."""
        return False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. Gradients may be overwritten."""
        for group in self.param_groups:
            if self.has_kernel and group["codec"] is NUMBERS:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
                    parameter.grad = None
        if self.has_kernel:
            super().step()

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, codec = self._state_of(parameter), group["codec"]
        step = state[STEP]
        state[STEP] = step + 1
        weights, gradient = parameter.view(-1), gradient.flatten()
        if self.update_in_kernel(parameter, gradient, group, step):
            return
        dtype = computed_in(parameter)
        for piece in codec.pieces(parameter, step):
            numbers = {
                each.name: codec.of(each).decode(state[self._key(each)], piece, each.form, dtype)
                for each in self._states
            }
            self.update(piece.of(weights), piece.of(gradient).to(dtype), numbers, group, step)
            for index, each in enumerate(self._states):
                stored = state[self._key(each)]
                codec.of(each).encode(numbers[each.name], stored, piece, each.form, index)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the states of a parameter in memory, and the number of its steps."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state[STEP] = 0
            codec = self._codec_of[parameter]
            for each in self._states:
                state[self._key(each)] = codec.of(each).allocate(parameter, self._allocate)
        return state

    def _key(self, state: StateSpec) -> str:
        """Return the name of a state in memory."""
        return self.in_torch.get(state.name, state.name)

    # states by shard; see the base class

    def states_of(self, shard: Tensor) -> tuple[StateSpec, ...]:
        """Return the states of a shard."""
        return self._states

    def names_of(self, shard: Tensor) -> tuple[str, ...]:
        return tuple(each.name for each in self.states_of(shard))

    def read(self, shard: Tensor) -> dict[str, Tensor]:
        state = self.state.get(shard, {})
        whole, dtype = Piece(0, shard.numel()), computed_in(shard)
        states: dict[str, Tensor] = {}
        missing = []
        for each in self.states_of(shard):
            stored = state.get(self._key(each))
            if stored is None:
                missing.append(each.name)
                states[each.name] = torch.zeros_like(shard)
            else:
                codec = self._codec_of[shard].of(each)
                states[each.name] = codec.decode(stored, whole, each.form, dtype).to(shard.dtype)
        if state and missing:  # without any state no step was taken
            raise KeyError(
                f"{type(self).__name__} has states {sorted(state)}, and none for {missing}"
                " (in_torch)"
            )
        return states

    def restore(self, shard: Tensor, states: Mapping[str, Tensor], steps: int) -> None:
        present = self.state.get(shard, {})
        restored = self.count(shard, steps)
        for each in self.states_of(shard):
            key = self._key(each)
            codec, numbers = self._codec_of[shard].of(each), states[each.name].to(shard.dtype)
            if codec is NUMBERS and self._allocate is None:
                restored[key] = numbers
                continue
            # allocated once: host memory may be pinned, or mapped from a file
            stored = present.get(key)
            if stored is None:
                stored = codec.allocate(shard, self._allocate)
            codec.load(numbers, stored, each.form)
            restored[key] = stored
        self.state[shard] = restored

    def count(self, shard: Tensor, steps: int) -> dict[str, Any]:
        """Return the number of steps as the state of a shard holds it."""
        return {STEP: steps}
