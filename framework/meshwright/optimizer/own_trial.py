"""Trials of a user's optimizer before the first step, on a few float64 numbers.

    whole      one flat tensor
    seeded     the same under other seeds: an optimizer that draws random numbers draws others on each rank
    cut        the same numbers in two tensors, stepped together, and one after the other as offloaded shards are
    swapped    the two tensors in parameter groups of their own, in both orders: a rank has not all groups
    shaped     the same numbers as a matrix, and with three dims: rules for matrices alone never see one in a flat shard
    resumed    before every step a new optimizer takes over weights and states, as after a checkpoint

All must give the same weights. Each takes 64 steps, so that most of what begins after a warm-up has
begun; and three steps on larger tensors, so that most rules for large matrices apply. What begins
later is caught by own_check.py. LAMB, Adafactor, Muon and Shampoo, whose updates use whole tensors,
are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.config.functions import error_place
from meshwright.errors import ConfigError, reason_of
from meshwright.optimizer.own import build_own, not_element_wise, not_saved, set_rate, unfit
from meshwright.optimizer.own_defaults import default_decay, peak_rate
from meshwright.optimizer.own_states import OwnStates, UnknownStateError, find_states
from meshwright.seeding import kept_generators, set_generators

_RATE, _DECAY = 1e-2, 0.1
_CLOSE = 1e-8 * _RATE
"""Absolute tolerance of equal weights; the relative one is 1e-11."""


class _Size(NamedTuple):
    """Numbers of a trial: how many, in how many steps, where they are cut, and as which shapes."""

    steps: int
    elements: int
    cut: int
    shapes: tuple[tuple[int, ...], ...]


_LONG = _Size(64, 24, 9, ((4, 6), (2, 3, 4)))
_LARGE = _Size(3, 160 * 144, 300, ((160, 144), (160, 12, 3, 4)))


def element_states(config: Optimizer) -> OwnStates:
    """Return the states of ``optimizer.builder``'s optimizer after its trial,
    which runs once per process.

    Raises:
        ConfigError: it is not element-wise, or a checkpoint could not hold its state.
    """
    assert config.builder is not None
    # cached here: a dry run asks for them among fake tensors
    peak_rate(config), default_decay(config)
    return _element_states(config.builder, json.dumps(config.options, sort_keys=True))


def states_after(config: Optimizer, steps: int) -> OwnStates:
    """Return the states of the trial, with the numbers that counted its steps at ``steps``."""
    found = element_states(config)
    counters = {name: each for name, each in found.numbers.items() if each.value == _LONG.steps}
    return OwnStates(
        found.names, {name: each._replace(value=steps) for name, each in counters.items()}
    )


@cache
def _element_states(builder: str, options: str) -> OwnStates:
    config = Optimizer(builder=builder, options=json.loads(options))
    with kept_generators():
        states = _try(config, _LONG)
        _try(config, _LARGE)
    return states


def _try(config: Optimizer, size: _Size) -> OwnStates:
    """Run all trials of one size.

    Raises:
        ConfigError: for the first trial whose weights differ.
    """
    flat = [(size.elements,)]
    cut = [(size.cut,), (size.elements - size.cut,)]
    first = _Trial(config, size, flat)
    whole = first.run(seed=0)
    if not _are_close(whole, _Trial(config, size, flat).run(seed=1)):
        why = (
            "gives other updates in a second run with the same gradients: it draws random numbers,"
            " or counts elsewhere"
        )
        raise not_element_wise(config, why)
    apart = _Trial(config, size, cut)
    one_by_one = apart.run(one_by_one=True)
    together = _Trial(config, size, cut).run()
    if not _are_close(whole, one_by_one) or not _are_close(whole, together):
        raise not_element_wise(config, "gives other updates when a tensor is cut in two")
    for order in ((0, 1), (1, 0)):
        if not _are_close(whole, _Trial(config, size, cut, order).run()):
            raise not_element_wise(
                config, "gives other updates when parameter groups come in another order"
            )
    for shape in size.shapes:
        if not _are_close(whole, _Trial(config, size, [shape]).run()):
            raise reads_dims(
                config, f"gives other updates for a tensor of {'x'.join(map(str, shape))}"
            )
    if not _are_close(whole, _Trial(config, size, flat).run(resumed=True)):
        raise not_saved(config, "gives other updates after a resume: it keeps state elsewhere")
    numbers, numbers_apart = first.states().numbers, apart.states().numbers
    if numbers != numbers_apart:
        changed = sorted(dict(set(numbers.items()) ^ set(numbers_apart.items())))
        raise not_saved(
            config, f"keeps state[{changed[0]!r}], a number that depends on how a tensor is cut"
        )
    return first.states()


class _Trial:
    """Trial run of the user's optimizer on the numbers of a size, in tensors of given shapes."""

    def __init__(
        self,
        config: Optimizer,
        size: _Size,
        shapes: Sequence[tuple[int, ...]],
        order: Sequence[int] | None = None,
    ) -> None:
        """Build the optimizer. ``order``: the tensors of each parameter group; None:
        one group of all tensors.
        """
        self.config, self.size = config, size
        self.counts = [math.prod(shape) for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(size.steps + 1, size.elements, dtype=torch.float64, generator=generator)
        self.gradients = draw[1:] * torch.logspace(-3, 3, size.elements, dtype=torch.float64)
        parts = zip(torch.split(draw[0], self.counts), shapes, strict=True)
        self.parameters = [nn.Parameter(part.clone().view(shape)) for part, shape in parts]
        self.members = [self.parameters]
        if order is not None:
            self.members = [[self.parameters[index]] for index in order]
        self.inner = self._build()

    def _build(self) -> torch.optim.Optimizer:
        """Return a new optimizer of the parameters."""
        same = {
            "lr": _RATE,
            "weight_decay": _DECAY,
            "rate_factor": 1.0,
            "eps_factor": 1.0,
            "eight_bit": False,
        }
        inner = build_own([{"params": list(each), **same} for each in self.members], self.config)
        self.groups = group_values(inner)
        self.attributes = numbers_beside(inner)
        return inner

    def run(self, *, seed: int = 0, one_by_one: bool = False, resumed: bool = False) -> Tensor:
        """Take all steps and return the weights, flat.

        Args:
            seed: seed of everything that draws random numbers.
            one_by_one: step one tensor after the other.
            resumed: continue with a new optimizer before every step.
        """
        set_generators(seed)
        every = list(range(len(self.counts)))
        turns = [[index] for index in every] if one_by_one else [every]
        for step, gradient in enumerate(self.gradients):
            if resumed and step:
                self._resume()
            set_rate(self.inner, _RATE * (1.0 if step % 2 else 0.5))
            parts = torch.split(gradient, self.counts)
            for turn in turns:
                for index in turn:
                    parameter = self.parameters[index]
                    parameter.grad = parts[index].clone().view_as(parameter)
                self._step(step)
        self._check_beside()
        return torch.cat([parameter.detach().view(-1) for parameter in self.parameters])

    def _step(self, step: int) -> None:
        try:
            self.inner.step()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            shape = tuple(self.parameters[0].shape)
            kind = "flat tensor" if len(shape) == 1 else f"tensor {shape}"
            text = f"failed in step {step + 1} on a {kind}{error_place(error)}: {reason_of(error)}"
            raise unfit(self.config, text) from error
        for parameter in self.parameters:
            parameter.grad = None

    def _check_beside(self) -> None:
        """Refuse numbers in the parameter groups or in the optimizer itself
        that the steps have changed.
        """
        for before, after in zip(self.groups, group_values(self.inner), strict=True):
            changed = sorted(k for k in after if k not in before or is_changed(before[k], after[k]))
            if changed:
                raise not_saved(
                    self.config,
                    f"keeps {', '.join(changed)} in its parameter groups, not per element",
                )
        now = numbers_beside(self.inner)
        changed = sorted(
            n for n in now if n not in self.attributes or is_changed(self.attributes[n], now[n])
        )
        if changed:
            raise not_saved(self.config, f"counts in its attribute {', '.join(changed)}")

    def _resume(self) -> None:
        """Replace the optimizer by a new one with the states that a checkpoint holds."""
        before = self.inner
        self.inner = self._build()
        for parameter in self.parameters:
            states = self._states_of(before, parameter)
            kept = {name: before.state[parameter][name].clone() for name in states.names}
            self.inner.state[parameter] = states.fill(kept, parameter.device)

    def states(self) -> OwnStates:
        """Return the states of the first tensor."""
        return self._states_of(self.inner, self.parameters[0])

    def _states_of(self, inner: torch.optim.Optimizer, parameter: Tensor) -> OwnStates:
        try:
            return find_states(inner.state.get(parameter, {}), parameter)
        except UnknownStateError as error:
            raise not_saved(self.config, str(error)) from error


def group_values(inner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the values of each parameter group but its parameters and learning rate;
    copies of tensors and arrays.
    """
    return [
        {k: _copied(v) for k, v in group.items() if k not in ("params", "lr")}
        for group in inner.param_groups
    ]


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or an array, which a step may change in place;
    anything else unchanged.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def is_changed(before: Any, after: Any) -> bool:
    """Return whether a value is another than before.
    A list or table that was changed in place is not: a cache.
    """
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return not np.array_equal(before, after)
    return before is not after and bool(before != after)


def numbers_beside(inner: Any, prefix: str = "", depth: int = 3) -> dict[str, Any]:
    """Return the numbers in attributes of an optimizer, and of the objects that it holds, by name;
    not torch's own.
    """
    found: dict[str, Any] = {}
    for name, value in vars(inner).items() if hasattr(inner, "__dict__") else ():
        if not prefix and name in _TORCHS:
            continue
        if isinstance(value, Tensor):
            if value.numel() <= _LARGEST:
                found[prefix + name] = value.detach().clone()
        elif isinstance(value, int | float | np.number) and not isinstance(value, bool):
            found[prefix + name] = value
        elif depth and not callable(value) and not type(value).__module__.startswith(_FOREIGN):
            found |= numbers_beside(value, f"{prefix}{name}.", depth - 1)
    return found


_FOREIGN = "torch", "builtins", "collections", "numpy"
"""Modules whose objects in an attribute are not searched."""
_LARGEST = 2**16
"""Most elements of a tensor in an attribute that is compared."""
_TORCHS = frozenset(
    {"defaults", "state", "param_groups", "_warned_capturable_if_run_uncaptured", "_step_count"}
)
"""Attributes of torch's optimizers."""


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-11, atol=_CLOSE, equal_nan=True)


def reads_dims(config: Optimizer, what: str) -> ConfigError:
    """Return the error of an optimizer that treats a parameter by its dims. ``what``: it does so,
    when and where.
    """
    return ConfigError(
        "MW-OPTIM-009",
        f"optimizer.builder = {config.builder!r} {what} than for the same numbers in a flat tensor:"
        " a rule of it reads the dims, the shape or the size of a parameter. Shards are flat, so"
        ' the rule would not apply: decide by the "weight_decay" of the group, which is 0 for'
        " vectors, by groups of model.parameter_groups, or choose optimizer.name ="
        ' "muon" or "adafactor" for rules of whole matrices',
    )
