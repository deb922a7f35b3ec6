"""Optimizers as users write them: element-wise,
and one for each way to depend on more than an element's history.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Base(torch.optim.Optimizer):
    """Sign of an average of the gradients; ``late`` is the number of steps after which a rule
    of others begins.
    """

    def __init__(self, groups: Any, late: int = 0, **options: Any) -> None:
        self.late = late
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self.update(p, p.grad, group, state, state["step"] > self.late)

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        average.lerp_(gradient, 0.1)
        p.add_(average.sign(), alpha=-group["lr"])


class Momentum(Base):
    """Plain gradient steps, then momentum: a state that begins after ``late`` steps."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if is_late:
            gradient = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(gradient)
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(gradient, alpha=-group["lr"])


class Averaged(Base):
    """Stochastic weight averaging after ``late`` steps,
    with a counter of its own that begins there.
    """

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        p.add_(gradient, alpha=-group["lr"])
        if is_late:
            state["averaged"] = state.get("averaged", torch.tensor(0)) + 1
            state.setdefault("mean", p.clone()).lerp_(p, 1 / state["averaged"].item())
            p.lerp_(state["mean"], 0.01)


class Lookahead(Base):
    """Slow weights, which the fast ones return to half-way every ``late`` steps."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if "slow" not in state and state["step"] == self.late:
            state["slow"] = p.clone()
        p.add_(gradient.sign(), alpha=-group["lr"])
        if state["step"] % self.late == 0:
            p.copy_(state["slow"].lerp_(p, 0.5))


class Cached(Base):
    """RAdam's habit: a table in the group that holds what the step number alone decides."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        cache = group.setdefault("buffer", [[None, None] for _ in range(10)])[state["step"] % 10]
        if cache[0] != state["step"]:
            cache[0], cache[1] = state["step"], 1 - 0.9 ** state["step"]
        p.add_(gradient.sign(), alpha=-group["lr"] * cache[1])


class OwnTable(Base):
    """A group needs its table from the start, or it would be a new value of the group."""

    def __init__(self, groups: Any) -> None:
        super().__init__(
            [{**group, "buffer": [[None, None] for _ in range(10)]} for group in groups]
        )

    update = Cached.update


class Normed(Base):
    """LAMB's: later, the step is scaled by the norm of the whole tensor."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        p.add_(gradient / gradient.norm() if is_late else gradient.sign(), alpha=-group["lr"])


class TopHalf(Base):
    """Later, only the half of a tensor with the larger gradients moves."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        kept = gradient.abs() >= gradient.abs().median() if is_late else torch.ones_like(p)
        p.add_(gradient.sign() * kept, alpha=-group["lr"])


class Noisy(Base):
    """Langevin noise, after ``late`` steps."""

    def draw(self, p: Tensor) -> Tensor:
        return torch.randn_like(p)

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        p.add_(gradient.sign() + (self.draw(p) if is_late else 0.0), alpha=-group["lr"])


class NoisyByNumpy(Noisy):
    """The same from NumPy's global generator."""

    def draw(self, p: Tensor) -> Tensor:
        return torch.from_numpy(np.random.standard_normal(p.shape)).to(p)


class NoisyByPython(Noisy):
    """The same from Python's."""

    def draw(self, p: Tensor) -> Tensor:
        return torch.full_like(p, random.random())


class CountsBeside(Base):
    """Steps counted in a table of the optimizer, which a resumed run begins anew;
    read after ``late`` steps.
    """

    def __init__(self, groups: Any, late: int = 0) -> None:
        super().__init__(groups, late)
        self.seen: dict[Tensor, int] = {}

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        self.seen[p] = self.seen.get(p, 0) + 1
        p.add_(gradient.sign(), alpha=-group["lr"] / (self.seen[p] if is_late else 1))


class CountsInAttribute(Base):
    """The number of steps in an attribute, which nothing reads yet."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.k = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.k += 1
        super().step()


class Clock:
    """A helper object with a number."""

    def __init__(self) -> None:
        self.ticks = 0.0


class CountsInHelper(Base):
    """The same in an object that the optimizer holds."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.clock = Clock()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.clock.ticks += 0.5
        super().step()


STEPS = [0]


class CountsInModule(Base):
    """The same in a variable of its module, which two runs in one process share."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        STEPS[0] += 1
        p.add_(gradient.sign(), alpha=-group["lr"] / STEPS[0])


class DecaysMatrices(Base):
    """Decay by the dims of a parameter, where the group's weight decay says it."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if p.dim() >= 2 and is_late:
            p.mul_(1 - group["lr"] * 0.1)
        p.add_(gradient.sign(), alpha=-group["lr"])


class Centralised(Base):
    """Gradients of matrices less the mean of each row."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if gradient.ndim > 1:
            gradient = gradient - gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True)
        p.add_(gradient, alpha=-group["lr"])


class LargeMatrices(Base):
    """Normed rows where a matrix has at least 128."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if len(p.shape) == 2 and min(p.shape) >= 128:
            gradient = gradient / gradient.norm(dim=1, keepdim=True)
        p.add_(gradient.sign() if len(p.shape) != 2 else gradient, alpha=-group["lr"])


class Convolutions(Base):
    """Another rate for weights of four dims."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        p.add_(gradient.sign(), alpha=-group["lr"] * (2 if p.dim() == 4 else 1))


class BySize(Base):
    """Another rate for large tensors."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        p.add_(gradient.sign(), alpha=-group["lr"] * (2 if p.numel() > self.late else 1))


class FirstGroup(Base):
    """Another rule for the first parameter group."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        is_first = group is self.param_groups[0]
        p.add_(gradient.sign(), alpha=-group["lr"] * (2 if is_first else 1))


class Clipped(Base):
    """Gradients of all parameters clipped together, by the optimizer."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], 1.0
        )
        super().step()


class OnlyDecayed(Base):
    """A state of the parameters that decay, and of no others."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if group["weight_decay"]:
            state["last"] = gradient.clone()
        p.add_(gradient.sign(), alpha=-group["lr"])


class Sizes(Base):
    """A late state of another shape."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if is_late:
            state["mean"] = gradient.mean().view(1, 1)
        p.add_(gradient.sign(), alpha=-group["lr"])


class LateGroupCounter(Base):
    """Schedule-free's sums in the groups, from a later step on."""

    def update(
        self,
        p: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        is_late: bool,
    ) -> None:
        if is_late:
            self.count(group)
        p.add_(gradient.sign(), alpha=-group["lr"])

    def count(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1


class LateGroupTensor(LateGroupCounter):
    """A tensor in the groups that counts in place."""

    def __init__(self, groups: Any, late: int = 0) -> None:
        super().__init__(groups, late, k=torch.zeros(()))

    def count(self, group: dict[str, Any]) -> None:
        group["k"].add_(1)


class LateGroupArray(LateGroupCounter):
    """An array in the groups that counts in place."""

    def __init__(self, groups: Any, late: int = 0) -> None:
        super().__init__(groups, late, k=np.zeros(2))

    def count(self, group: dict[str, Any]) -> None:
        group["k"] += 1


def with_values(groups: Any, lr: float = 0.25, weight_decay: float = 0.5) -> torch.optim.Optimizer:
    """Return an AdamW whose values stand among the default arguments."""
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)


def in_code(groups: Any) -> torch.optim.Optimizer:
    """Return an AdamW whose values stand in the code."""
    return torch.optim.AdamW(groups, lr=torch.tensor(0.125), weight_decay=0.75, foreach=False)
