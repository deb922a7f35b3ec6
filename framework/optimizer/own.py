"""Optimizers and learning-rate schedules of the user, named by import path.

A flat shard holds parts of many parameters, cut anywhere. So an optimizer must be element-wise: the update of an
element depends on the earlier gradients and updates of this element, the learning rate and the number of steps. Trials
check that before the first step, in float64 on a few numbers (:func:`element_states`):

    whole      one tensor, four steps
    cut        the same numbers in two tensors, stepped one after the other, as offloaded shards are
    resumed    two steps, the state copied to a new optimizer as after a checkpoint, two more steps

All three must give the same weights. LAMB, Adafactor, Muon and Shampoo, whose updates use whole tensors, are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.config.functions import error_place, find_function
from meshwright.errors import ConfigError

_STEPS, _ELEMENTS, _CUT, _RATE, _DECAY = 4, 24, 9, 1e-2, 0.1
_RESERVED = ("weights", "master")
"""Names in a checkpoint that no optimizer state can have: those of the weights."""


class ElementStates(NamedTuple):
    """State of an element-wise optimizer, per parameter tensor."""

    names: tuple[str, ...]
    """Tensors with one number per element."""
    counters: Mapping[str, type]
    """Name of a state that counts the steps taken -> its type: Tensor, int or float."""

    def counters_at(self, steps: int, device: torch.device) -> dict[str, Any]:
        """Return the counters after ``steps`` steps."""
        tensor = torch.tensor(float(steps), dtype=torch.float32, device=device)
        return {name: tensor.clone() if kind is Tensor else kind(steps) for name, kind in self.counters.items()}


def is_state_name(name: str) -> bool:
    """Return whether a checkpoint can hold a state under this name."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) is not None and name not in _RESERVED


def build_own(groups: Sequence[Mapping[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    """Call ``optimizer.builder`` with parameter groups ("params", "lr", "weight_decay") and ``optimizer.options``.

    Each of its parameter groups then has the "rate_factor" of the given group of its parameters.

    Raises:
        ConfigError: the builder fails, or what it returns cannot be stepped with a learning rate per step.
    """
    assert config.builder is not None
    wanted = "a function of (parameter groups, **options) that returns a torch optimizer"
    builder = find_function(config.builder, "optimizer.builder", wanted, ConfigError)
    factor_of = {id(parameter): group["rate_factor"] for group in groups for parameter in group["params"]}
    filled = [dict(group) for group in groups if group["params"]] or [dict(groups[0])]
    try:
        made = builder(filled, **config.options)
    except (Exception, SystemExit) as error:
        raise _unfit(config, f"failed{error_place(error)}: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise _unfit(config, f"returned a {type(made).__name__}: return a torch.optim.Optimizer")
    found = [id(parameter) for group in made.param_groups for parameter in group["params"]]
    if sorted(found) != sorted(factor_of):
        raise _unfit(config, f"took {len(found)} of {len(factor_of)} parameters: step each one once")
    for group in made.param_groups:
        factors = {factor_of[id(parameter)] for parameter in group["params"]} or {1.0}
        if "lr" not in group or len(factors) > 1:
            why = "parameters with other learning rates" if "lr" in group else 'a group without "lr"'
            raise _unfit(config, f"made a group of {why}: keep the groups that it is given")
        group["rate_factor"] = factors.pop()
    return made


def element_states(config: Optimizer) -> ElementStates:
    """Return the states of ``optimizer.builder``'s optimizer, and check once per process that it is element-wise.

    Raises:
        ConfigError: it is not, or a checkpoint could not hold its state.
    """
    assert config.builder is not None
    return _element_states(config.builder, json.dumps(config.options, sort_keys=True))


@cache
def _element_states(builder: str, options: str) -> ElementStates:
    config = Optimizer(builder=builder, options=json.loads(options))
    states, whole = _Trial(config, [_ELEMENTS]).run(_STEPS)
    _, cut = _Trial(config, [_CUT, _ELEMENTS - _CUT]).run(_STEPS)
    if not _are_close(whole, cut):
        raise _not_element_wise(config, "gives other updates when a tensor is cut in two")
    first = _Trial(config, [_ELEMENTS])
    first.run(_STEPS // 2)
    _, resumed = first.resumed(states).run(_STEPS)
    if not _are_close(whole, resumed):
        raise _not_saved(config, "gives other updates after a resume: it keeps state elsewhere")
    return states


class _Trial:
    """Trial run of the user's optimizer on float64 numbers in tensors of given sizes."""

    def __init__(self, config: Optimizer, sizes: Sequence[int]) -> None:
        self.config, self.sizes, self.taken = config, list(sizes), 0
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(_STEPS + 1, _ELEMENTS, dtype=torch.float64, generator=generator)
        self.gradients = draw[1:] * torch.logspace(-3, 3, _ELEMENTS, dtype=torch.float64)
        self.parameters = [nn.Parameter(part.clone()) for part in torch.split(draw[0], self.sizes)]
        group = {"params": self.parameters, "lr": _RATE, "weight_decay": _DECAY, "rate_factor": 1.0}
        self.inner = build_own([group], config)
        self.groups = self._numbers()

    def _numbers(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.inner.param_groups]

    def run(self, steps: int) -> tuple[ElementStates, Tensor]:
        """Step until ``steps`` steps are taken, one tensor after the other; return names of states, and weights."""
        try:
            for gradient in self.gradients[self.taken : steps]:
                for parameter, part in zip(self.parameters, gradient.split(self.sizes), strict=True):
                    parameter.grad = part.clone()
                    self.inner.step()
                    parameter.grad = None
        except (Exception, SystemExit) as error:
            text = f"failed in a step on a flat tensor{error_place(error)}: {type(error).__name__}: {error}"
            raise _unfit(self.config, text) from error
        self.taken = steps
        for before, after in zip(self.groups, self._numbers(), strict=True):
            changed = sorted(
                k for k in after if k not in before or (before[k] is not after[k] and before[k] != after[k])
            )
            if changed:
                raise _not_saved(self.config, f"keeps {', '.join(changed)} in its parameter groups, not per element")
        return self._form(), torch.cat([parameter.detach() for parameter in self.parameters])

    def _form(self) -> ElementStates:
        names, counters = [], {}
        for name, value in self.inner.state[self.parameters[0]].items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and value.shape == self.parameters[0].shape and value.dtype == torch.float64:
                names.append(name)
            elif ((is_tensor and value.dim() == 0) or type(value) in (int, float)) and value == self.taken:
                counters[name] = Tensor if is_tensor else type(value)
            elif value is not None:
                shape = f"of shape {tuple(value.shape)} and {value.dtype}" if is_tensor else f"a {type(value).__name__}"
                text = f"keeps state[{name!r}], {shape}: neither a number per element nor the number of steps"
                raise _not_saved(self.config, text)
        for name in names:
            if not is_state_name(name):
                raise _not_saved(self.config, f"keeps state[{name!r}]: a checkpoint cannot have this name")
        return ElementStates(tuple(names), counters)

    def resumed(self, states: ElementStates) -> _Trial:
        """Return a trial with a new optimizer that continues this one, from the states that a checkpoint holds."""
        new = _Trial(self.config, self.sizes)
        new.taken = self.taken
        for old, own in zip(self.parameters, new.parameters, strict=True):
            own.data.copy_(old.data)
            kept = {name: self.inner.state[old][name].clone() for name in states.names}
            new.inner.state[own] = kept | states.counters_at(self.taken, own.device)
        return new


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return whether weights agree to 1e-8 of the learning rate."""
    return torch.allclose(one, other, rtol=0.0, atol=1e-8 * _RATE)


def _unfit(config: Optimizer, why: str) -> ConfigError:
    return ConfigError("MW-OPTIM-003", f"optimizer.builder = {config.builder!r} {why}")


def _not_element_wise(config: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        "MW-OPTIM-004",
        f"optimizer.builder = {config.builder!r} {why}. On flat shards its numbers would depend on the layout: choose "
        f"an element-wise optimizer",
    )


def _not_saved(config: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        "MW-OPTIM-005",
        f"optimizer.builder = {config.builder!r} {why}. A resumed run would lose it: keep state in "
        f"optimizer.state[parameter], as tensors in the parameter's shape and dtype",
    )


def own_rate(optimizer: Optimizer, step: int, num_steps: int) -> float:
    """Return the learning rate of a step from the user's function ``optimizer.schedule``.

    Raises:
        ConfigError: it fails, or returns something other than a finite factor, at least 0.
    """
    path = optimizer.schedule
    function = _schedule(path)
    try:
        factor = function(step, num_steps)
    except (Exception, SystemExit) as error:
        why = f"{error_place(error)}: {type(error).__name__}: {error}"
        raise ConfigError("MW-OPTIM-006", f"optimizer.schedule = {path!r} failed at step {step}{why}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < 1e300:
        raise ConfigError(
            "MW-OPTIM-007",
            f"optimizer.schedule = {path!r} returned {factor!r} for step {step} of {num_steps}: return a finite factor "
            f"on optimizer.learning_rate, from 0 up",
        )
    return optimizer.learning_rate * factor


@cache
def _schedule(path: str) -> Callable[[int, int], Any]:
    """Import the user's schedule."""
    wanted = "a function of (step, number of steps) that returns a factor on optimizer.learning_rate"
    return find_function(path, "optimizer.schedule", wanted, ConfigError)
