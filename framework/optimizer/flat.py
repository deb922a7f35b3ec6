"""Optimizers over flat shards, most of them torch's fused ones, and gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.mesh.comm import Group
from meshwright.optimizer.choice import IN_TORCH, build_optimizer, state_dtype
from meshwright.optimizer.choice import saved_states_of as saved_states_of
from meshwright.optimizer.choice import states_of as states_of
from meshwright.optimizer.eight_bit import AdamW8bit
from meshwright.optimizer.factored import Factor, ShardedAdafactor
from meshwright.optimizer.factored import factor_elements as factor_elements
from meshwright.optimizer.factored import factor_infos as factor_infos
from meshwright.optimizer.factored import step_bytes as step_bytes
from meshwright.optimizer.matrix_plan import MatrixShard as MatrixShard
from meshwright.optimizer.matrix_plan import MatrixSlot as MatrixSlot
from meshwright.optimizer.matrix_plan import find_homes as find_homes
from meshwright.optimizer.matrix_plan import iteration_flops as iteration_flops
from meshwright.optimizer.matrix_plan import matrices_of as matrices_of
from meshwright.optimizer.matrix_plan import with_matrices as with_matrices
from meshwright.optimizer.own import ElementStates, element_states, is_state_name
from meshwright.optimizer.rounded import RoundedAdamW
from meshwright.optimizer.rounded import ShardPlace as ShardPlace
from meshwright.optimizer.schedule_free import GRADIENT_POINT as GRADIENT_POINT
from meshwright.optimizer.schedule_free import Gathered, ShardedScheduleFree, evaluating
from meshwright.parameters import GroupSettings

NORM_PIECE = 2**16
"""Elements per piece of the norm: squares are summed in float32 within a piece, and in float64 over pieces.

torch's CPU kernel loses 1e-3 of the norm of a flat tensor of 4 million elements. The norm, and clipping, would then
depend on the layout. CUDA sums pairwise: there full shards are as exact, and a billion elements would be 15,000 pieces.
"""


class OptimizerShard(NamedTuple):
    """One flat shard to step, its gradient, and the properties that its parameters share."""

    weights: Tensor
    gradient: Tensor
    decays: bool
    in_blocks: bool
    """True when the optimizer state is kept in 8 bits."""
    is_counted: bool
    """True on the one rank that counts these elements in the gradient norm."""
    fetch_gradient: Callable[[], Tensor]
    """Function that returns the gradient on the weights' device, which may be the host; blocks until complete."""
    after_step: Callable[[], None]
    """Function called after the step, to post the all-gather of the weights. Does not block."""
    settings: GroupSettings = GroupSettings()
    """Settings of the parameters' group; its weight decay is the configuration's if None and ``decays``."""
    matrices: MatrixShard | None = None
    """Matrices of the shard, if it is stepped by matrices."""
    place: ShardPlace | None = None
    """Place of the shard in its bucket."""
    wait: Callable[[], None] = lambda: None
    """Function that blocks until the all-gather is done."""
    holders: Group | None = None
    """Ranks with parts of the shard's weights, for an optimizer that needs whole ones."""


class FlatOptimizer:
    """Torch optimizer with one parameter per shard, in groups of the same learning rate and weight decay."""

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        config: Optimizer,
        *,
        order: Sequence[int] | None = None,
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
    ) -> None:
        """Build the torch optimizer over the shards.

        Args:
            order: indices of the shards, in the order in which they are stepped and sent; None: as given.
            allocate: function (numel, dtype) that allocates zeros for 8-bit state; None: on the device of the weights.
        """
        self.shards = list(shards)
        self.parameters = [nn.Parameter(shard.weights) for shard in self.shards]
        self.state_names = [states_of(config, is_matrix=shard.matrices is not None) for shard in self.shards]
        """Names of the state of each shard."""
        self._config = config
        self.saved_names = saved_states_of(config)
        """Names of all states in a checkpoint."""
        self._own: ElementStates | None = None if config.builder is None else element_states(config)
        self.added: dict[str, list[Tensor]] = {}
        """States of callbacks by name, one flat tensor per shard; see :meth:`add_state`."""
        self._order = list(range(len(self.shards)) if order is None else order)
        self._num_steps = 0
        decay = config.weight_decay
        groups: dict[tuple[bool, GroupSettings], list[nn.Parameter]] = {
            (True, GroupSettings(weight_decay=decay)): [],  # torch accepts empty groups, but no empty list
            (False, GroupSettings(weight_decay=decay)): [],
            (False, GroupSettings(weight_decay=0.0)): [],
        }
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            own_decay = shard.settings.weight_decay
            own_decay = decay * shard.decays if own_decay is None else own_decay
            settings = shard.settings._replace(weight_decay=own_decay)
            groups.setdefault((shard.in_blocks, settings), []).append(parameter)
        self.inner = build_optimizer(
            [
                {"params": group, "lr": config.learning_rate, "eight_bit": in_blocks, **settings._asdict()}
                for (in_blocks, settings), group in groups.items()
            ],
            config,
            allocate,
            {p: s.matrices for p, s in zip(self.parameters, self.shards, strict=True) if s.matrices is not None},
            {p: s.place for p, s in zip(self.parameters, self.shards, strict=True) if s.place is not None},
            {p: s.holders for p, s in zip(self.parameters, self.shards, strict=True) if s.holders is not None},
        )

    def square_norm(self) -> Tensor:
        """Return the sum of squares of the gradient elements that this rank counts; float64 scalar on their device."""
        return self._square_norm(counted=True)

    def spare_square_norm(self) -> Tensor:
        """Return the sum of squares of this rank's gradient elements that another rank counts.

        It only serves to detect NaN/Inf that this rank's copy alone contains.
        """
        return self._square_norm(counted=False)

    def _square_norm(self, *, counted: bool) -> Tensor:
        pieces = [
            piece
            for shard in self.shards
            if shard.is_counted is counted and shard.gradient.numel()
            for piece in (torch.split(shard.gradient, NORM_PIECE) if shard.gradient.is_cpu else (shard.gradient,))
        ]
        if not pieces:
            device = self.shards[0].gradient.device if self.shards else torch.device("cpu")
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch._foreach_norm(pieces, 2.0)
        return torch.stack(list(norms)).double().square().sum()

    def step(self, learning_rate: float, gradient_factor: float) -> None:
        """Step all shards once, with every gradient multiplied by ``gradient_factor`` first."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate * group["rate_factor"]
        self._step(self._order, gradient_factor)
        self._num_steps += 1

    def _step(self, indices: Sequence[int], gradient_factor: float) -> None:
        """Step these shards together, then post the all-gather of each one's weights, in this order."""
        gradients = [self.shards[index].fetch_gradient() for index in indices]
        if gradients and gradient_factor != 1.0:
            torch._foreach_mul_(gradients, gradient_factor)
        for index, gradient in zip(indices, gradients, strict=True):
            self.parameters[index].grad = gradient
        self.inner.step()
        for index in indices:
            self.parameters[index].grad = None  # torch skips parameters without a gradient
            self.shards[index].after_step()

    def states(self, index: int) -> tuple[dict[str, Tensor], int]:
        """Return (optimizer state of shard ``index`` by name, steps taken). The state is zero before the first step."""
        parameter, weights = self.parameters[index], self.shards[index].weights
        if isinstance(self.inner, AdamW8bit) and self.shards[index].in_blocks:
            return self.inner.moments(parameter), self._num_steps
        kept = self.inner.state.get(parameter, {})
        found = {name: kept.get(self._key(name)) for name in self.state_names[index]}
        states = {n: torch.zeros_like(weights) if t is None else t.to(weights.dtype) for n, t in found.items()}
        if isinstance(self.inner, ShardedScheduleFree):
            states[GRADIENT_POINT] = weights
        return states, self._num_steps

    def factors(self, index: int) -> Iterator[Factor]:
        """Yield the states of a shard's weights that are no tensors per element; a restore copies into them."""
        if isinstance(self.inner, ShardedAdafactor):
            yield from self.inner.factors(self.parameters[index])

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are those of evaluation. Collective over the shard groups."""
        shards = zip(self.parameters, self.shards, strict=True)
        every = [Gathered(parameter, shard.wait, shard.after_step) for parameter, shard in shards]
        return evaluating(self.inner, [every[index] for index in self._order])

    def evaluated(self, index: int) -> Tensor:
        """Return the weights of evaluation of shard ``index``: its own, but for schedule-free optimizers."""
        parameter, inner = self.parameters[index], self.inner
        return inner.averaged(parameter) if isinstance(inner, ShardedScheduleFree) else self.shards[index].weights

    def restore(self, index: int, states: Mapping[str, Tensor], steps: int) -> None:
        """Set the optimizer state of a shard; inverse of :meth:`states`. The tensors may be kept, not copied."""
        self._num_steps = steps
        parameter, weights = self.parameters[index], self.shards[index].weights
        if isinstance(self.inner, ShardedAdafactor):
            self.inner.taken = steps
            return
        if isinstance(self.inner, AdamW8bit) and self.shards[index].in_blocks:
            self.inner.set_moments(parameter, states, steps)
            return
        if self._own is not None and steps == 0:
            return  # its own initial state
        kept: dict[str, Tensor | int] = {}
        for name in self.state_names[index]:
            key = self._key(name)
            state = states[name].to(state_dtype(self._config, weights.dtype))
            kept[key] = self._place(state, weights, self.inner.state.get(parameter, {}).get(key))
        if self._own is not None:
            kept |= self._own.counters_at(steps, weights.device)
        elif isinstance(self.inner, ShardedScheduleFree | RoundedAdamW):
            kept["step"] = steps
        elif "exp_avg_sq" in kept:
            kept["step"] = torch.tensor(float(steps), dtype=torch.float32, device=weights.device)
        self.inner.state[parameter] = kept

    def _key(self, name: str) -> str:
        """Return torch's name of a state."""
        return name if self._own is not None else IN_TORCH.get(name, name)

    def add_state(self, name: str) -> list[Tensor]:
        """Add a state with one number per weight, which checkpoints hold under ``name``; for callbacks.

        Returns:
            one flat tensor per shard of :attr:`shards`, now a copy of its weights. A resume fills it from the
            checkpoint; where the checkpoint has none, with the weights.

        Raises:
            ValueError: the name is taken, or none that a checkpoint can hold.
        """
        if not is_state_name(name) or name in (*self.saved_names, *self.added):
            raise ValueError(f"state {name!r}: choose another name, of at most 64 letters, digits and underscores")
        self.added[name] = [shard.weights.clone() for shard in self.shards]
        return self.added[name]

    def _place(self, state: Tensor, weights: Tensor, present: Tensor | None) -> Tensor:
        """Return the tensor that holds ``state`` from now on; ``present`` holds the shard's earlier state."""
        return state


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor that clips gradients of this norm, as ``clip_grad_norm_``: clip / (norm + 1e-6), at most 1."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
