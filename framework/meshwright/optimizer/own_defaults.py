"""Peak learning rate and weight decay of a run: the keys', or those of the user's own optimizer.

A key that is not set must not overrule ``optimizer.builder``, whether the value stands in
``optimizer.options``, in the code of the builder or among its default arguments. So the builder is
asked once: what it returns for a group without "lr", or without "weight_decay", has its own value
there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.config.functions import find_function
from meshwright.errors import ConfigError
from meshwright.parameters import GroupSettings

RATE, DECAY = "lr", "weight_decay"
WANTED = "a function of (parameter groups, **options) that returns a torch optimizer"


def peak_rate(config: Optimizer) -> float:
    """Return the highest learning rate of the run.

    Raises:
        ConfigError: it is the builder's, and ``optimizer.min_learning_rate`` is above it.
    """
    if config.learning_rate is not None:
        return config.learning_rate
    rate = _builder_value(config, RATE, positive=True)
    if rate is None:
        default: float = Optimizer.model_fields["learning_rate"].default
        return default
    if config.min_learning_rate is not None and config.min_learning_rate > rate:
        raise ConfigError(
            "MW-OPTIM-011",
            f"optimizer.min_learning_rate = {config.min_learning_rate:g} is above {rate:g}, the"
            f" learning rate of optimizer.builder = {config.builder!r}: lower it, or set"
            " optimizer.learning_rate",
        )
    return rate


def default_decay(config: Optimizer) -> float:
    """Return the weight decay of parameters that decay and have none of their own
    in ``model.parameter_groups``.
    """
    if config.weight_decay is not None:
        return config.weight_decay
    decay = _builder_value(config, DECAY, positive=False)
    default: float = Optimizer.model_fields["weight_decay"].default
    return default if decay is None else decay


def _builder_value(config: Optimizer, field: str, *, positive: bool) -> float | None:
    """Return the builder's own value of a field of its groups, or None if it has no usable one."""
    if config.builder is None:
        return None
    found = _own_value(config.builder, json.dumps(config.options, sort_keys=True), field)
    return found if found is not None and (found > 0 if positive else found >= 0) else None


@cache
def _own_value(builder: str, options: str, field: str) -> float | None:
    given: dict[str, Any] = {
        **GroupSettings()._asdict(),
        RATE: 1e-3,
        DECAY: 0.0,
    }
    asked: Mapping[str, Any] = {name: value for name, value in given.items() if name != field}
    function = find_function(builder, "optimizer.builder", WANTED, ConfigError)
    try:
        made = function(
            [{"params": [nn.Parameter(torch.zeros(2))], **asked}], **json.loads(options)
        )
        value = made.param_groups[0].get(field)
    except (Exception, SystemExit):
        # it reads the field itself, or fails always, which its trial reports
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None
