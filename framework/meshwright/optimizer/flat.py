"""Optimizer step over flat shards, by a torch optimizer,
and gradient clipping by the global norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.optimizer.choice import build_optimizer
from meshwright.optimizer.layout import ShardLayout, Shards
from meshwright.optimizer.own_check import OwnCheck
from meshwright.optimizer.own_defaults import default_decay, peak_rate
from meshwright.optimizer.shard_states import ShardStates
from meshwright.parameters import GroupSettings

NORM_PIECE = 2**16
"""Elements per piece of the norm: squares are summed in float32 within a piece,
and in float64 over pieces.

torch's CPU kernel loses 1e-3 of the norm of a flat tensor of 4 million elements. The norm, and
clipping, would then depend on the layout. CUDA sums pairwise, which is accurate for a whole shard;
a billion elements make 15,000 pieces.
"""


class OptimizerShard(NamedTuple):
    """Flat shard of weights (numel/n,), its gradient (numel/n,),
    and the properties that its parameters share.
    """

    weights: Tensor
    gradient: Tensor
    decays: bool
    is_eight_bit: bool
    """True if the optimizer state is in 8 bits, quantised by blocks."""
    fetch_gradient: Callable[[], Tensor]
    """Function that returns the gradient on the weights' device (offload: the host).
    Blocks until it is complete.
    """
    after_step: Callable[[], None]
    """Function called after the step, to post the all-gather of the weights. Does not block."""
    wait: Callable[[], None] = lambda: None
    """Function that blocks until the all-gather is done."""
    settings: GroupSettings = GroupSettings()
    """Settings of the parameters' group. A weight decay of None: the configuration's if ``decays``,
    otherwise 0.
    """
    layout: ShardLayout = ShardLayout()
    """Holders of the weights in the shard, and their layout for optimizers that are not element-wise."""
    name_of: Callable[[int], str] = lambda element: "the shard"
    """Function of an element's index that returns the name of its parameter, for messages."""

    @property
    def is_counted(self) -> bool:
        """True on the one rank that counts these elements in the gradient norm."""
        return self.layout.holders.is_counted


class FlatOptimizer:
    """Torch optimizer with one parameter per shard,
    in groups of the same learning rate and weight decay.
    """

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
            order: indices of the shards in the order of their steps and all-gathers; None: as
                given.
            allocate: function (numel, dtype) that allocates zeros for state; None: on the device of
                the weights.
        """
        self.shards = list(shards)
        self._counted = [shard.is_counted for shard in self.shards]  # asked once, not in each step
        self.parameters = [nn.Parameter(shard.weights) for shard in self.shards]
        self.config, self.allocate = config, allocate
        self.order = list(range(len(self.shards)) if order is None else order)
        self.num_steps = 0
        self.added: dict[str, list[Tensor]] = {}
        """States of callbacks by name, one flat tensor per shard;
        see :func:`~.states.add_state`.
        """
        groups = self._parameter_groups()
        layouts: dict[Tensor, ShardLayout] = {
            parameter: shard.layout
            for parameter, shard in zip(self.parameters, self.shards, strict=True)
        }
        self.inner = build_optimizer(groups, config, Shards(layouts, allocate))
        self.own: OwnCheck | None = None
        """States and checks of an optimizer of the user."""
        if config.builder is not None:
            names = [shard.name_of for shard in self.shards]
            self.own = OwnCheck(
                self.inner, groups, self.parameters, config, lambda index, at: names[index](at)
            )
        states = self.inner if self.own is None else self.own
        assert isinstance(states, ShardStates)
        self.states: ShardStates = states

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Return torch's parameter groups: parameters with the same settings and kind of state."""
        decay = default_decay(self.config)
        groups: dict[tuple[bool, GroupSettings], list[nn.Parameter]] = {
            # on every rank, parameters or not: torch accepts empty groups, but no empty list
            (True, GroupSettings(weight_decay=decay)): [],
            (False, GroupSettings(weight_decay=decay)): [],
            (False, GroupSettings(weight_decay=0.0)): [],
        }
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            settings = shard.settings
            if settings.weight_decay is None:
                settings = settings._replace(weight_decay=decay if shard.decays else 0.0)
            groups.setdefault((shard.is_eight_bit, settings), []).append(parameter)
        rate = peak_rate(self.config)
        return [
            {"params": group, "lr": rate, "in_blocks": is_eight_bit, **settings._asdict()}
            for (is_eight_bit, settings), group in groups.items()
        ]

    def square_norm(self) -> Tensor:
        """Return the sum of squares of the gradient elements that this rank counts;
        float64 scalar on their device.
        """
        return self._square_norm(counted=True)

    def uncounted_square_norm(self) -> Tensor:
        """Return the sum of squares of this rank's gradient elements
        that another rank counts in the norm.

        Only used to detect NaN/Inf in this rank's copy.
        """
        return self._square_norm(counted=False)

    def _square_norm(self, *, counted: bool) -> Tensor:
        pieces: dict[torch.device, list[Tensor]] = {}  # with offload, some are in host memory
        for shard, is_counted in zip(self.shards, self._counted, strict=True):
            if is_counted is counted and shard.gradient.numel():
                pieces.setdefault(shard.gradient.device, []).extend(_norm_pieces(shard.gradient))
        if not pieces:
            device = self.shards[0].gradient.device if self.shards else torch.device("cpu")
            return torch.zeros((), dtype=torch.float64, device=device)
        return reduce(torch.add, [_square_sum(of_device) for of_device in pieces.values()])

    def step(self, learning_rate: float, gradient_factor: float) -> None:
        """Step all shards once, with every gradient multiplied by ``gradient_factor`` first."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate * group["rate_factor"]
        if self.own is not None:
            self.own.begin_step(self.num_steps + 1, learning_rate)
        self._step(self.order, gradient_factor)
        self.num_steps += 1

    def _step(self, indices: Sequence[int], gradient_factor: float) -> None:
        """Step these shards together, then post the all-gather of each one's weights,
        in this order.
        """
        gradients = [self.shards[index].fetch_gradient() for index in indices]
        # in place, in one launch: no second copy of the gradients
        if gradients and gradient_factor != 1.0:
            torch._foreach_mul_(gradients, gradient_factor)
        for index, gradient in zip(indices, gradients, strict=True):
            self.parameters[index].grad = gradient
        copies = [] if self.own is None else self.own.copy(indices)
        self.inner.step()
        if self.own is not None:
            self.own.compare(copies)
        for index in indices:
            # torch skips parameters without a gradient: an offloaded shard is stepped alone
            self.parameters[index].grad = None
            self.shards[index].after_step()  # its all-gather overlaps what follows


def _norm_pieces(gradient: Tensor) -> Sequence[Tensor]:
    """Return the pieces of a gradient whose norms are taken in its own dtype;
    see :data:`NORM_PIECE`.
    """
    return torch.split(gradient, NORM_PIECE) if gradient.is_cpu else (gradient,)


def _square_sum(pieces: list[Tensor]) -> Tensor:
    """Return the sum of squares of the elements of pieces on one device, () float64."""
    norms = torch.stack(list(torch._foreach_norm(pieces, 2.0)))
    return norms.double().square().sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor that clips gradients of this norm, as ``clip_grad_norm_``:
    clip / (norm + 1e-6), at most 1.
    """
    if clip_norm <= 0:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
