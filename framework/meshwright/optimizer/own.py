"""Optimizers and learning-rate schedules of the user, named by import path.

A flat shard holds parts of many parameters, cut anywhere. So an optimizer must be element-wise: the
update of an element depends on the earlier gradients and updates of this element, the learning
rate, and numbers that all parameters share, such as the number of steps. It is tried before the
first step (own_trial.py), and compared with a resumed copy of itself on parts of the real shards
while it trains (own_check.py).

Its state is in ``state[parameter]``: tensors with one number per element, and numbers
(own_states.py). A checkpoint holds those that exist at the save, whenever they began. Any other
state is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from meshwright.config import Optimizer
from meshwright.config.functions import error_place, find_function
from meshwright.errors import ConfigError, reason_of
from meshwright.optimizer.own_defaults import WANTED, peak_rate

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups as an ``optimizer.builder`` gets them."""


def build_own(groups: Groups, config: Optimizer) -> torch.optim.Optimizer:
    """Call ``optimizer.builder`` with parameter groups ("params", "lr", "weight_decay")
    and ``optimizer.options``.

    Each of its parameter groups then has the "rate_factor" of the given group of its parameters.

    Raises:
        ConfigError: the builder fails, or what it returns cannot be stepped with a learning rate
            per step.
    """
    assert config.builder is not None
    builder = find_function(config.builder, "optimizer.builder", WANTED, ConfigError)
    factor_of = {
        id(parameter): group["rate_factor"] for group in groups for parameter in group["params"]
    }
    filled = [dict(group) for group in groups if group["params"]] or [dict(groups[0])]
    try:
        made = builder(filled, **config.options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise unfit(config, f"failed{error_place(error)}: {reason_of(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise unfit(config, f"returned a {type(made).__name__}: return a torch.optim.Optimizer")
    found = [id(parameter) for group in made.param_groups for parameter in group["params"]]
    if sorted(found) != sorted(factor_of):
        raise unfit(config, f"took {len(found)} of {len(factor_of)} parameters: step each one once")
    for group in made.param_groups:
        factors = {factor_of[id(parameter)] for parameter in group["params"]} or {1.0}
        if "lr" not in group or len(factors) > 1:
            why = (
                "parameters with other learning rates" if "lr" in group else 'a group without "lr"'
            )
            raise unfit(config, f"made a group of {why}: keep the groups that it is given")
        group["rate_factor"] = factors.pop()
    return made


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of a step in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_factor"]


def unfit(config: Optimizer, why: str) -> ConfigError:
    """Return the error of a builder, or of its optimizer, that fails."""
    return ConfigError("MW-OPTIM-003", f"optimizer.builder = {config.builder!r} {why}")


def not_element_wise(config: Optimizer, why: str) -> ConfigError:
    """Return the error of an optimizer whose updates depend on more
    than an element's own history.
    """
    return ConfigError(
        "MW-OPTIM-004",
        f"optimizer.builder = {config.builder!r} {why}. On flat shards its numbers would depend on"
        " the layout: choose an element-wise optimizer",
    )


def not_saved(config: Optimizer, why: str) -> ConfigError:
    """Return the error of an optimizer with a state that no checkpoint holds."""
    return ConfigError(
        "MW-OPTIM-005",
        f"optimizer.builder = {config.builder!r} {why}. A resumed run would lose it: keep state in"
        " optimizer.state[parameter], as tensors in the parameter's shape and dtype, or as numbers"
        " that are the same for all parameters",
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = f"{error_place(error)}: {reason_of(error)}"
        raise ConfigError(
            "MW-OPTIM-006", f"optimizer.schedule = {path!r} failed at step {step}{why}"
        ) from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < 1e300:
        raise ConfigError(
            "MW-OPTIM-007",
            f"optimizer.schedule = {path!r} returned {factor!r} for step {step} of {num_steps}:"
            " return a finite factor on optimizer.learning_rate, from 0 up",
        )
    return peak_rate(optimizer) * factor


@cache
def _schedule(path: str) -> Callable[[int, int], Any]:
    """Import the user's schedule."""
    wanted = (
        "a function of (step, number of steps) that returns a factor on optimizer.learning_rate"
    )
    return find_function(path, "optimizer.schedule", wanted, ConfigError)
