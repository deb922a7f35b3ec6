"""Rules between keys that belong to one optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from meshwright.config.keys import format_value
from meshwright.config.optimizers import KEYS_OF_SOME, OPTIMIZERS, OptimizerSpec
from meshwright.config.rules import Rule, non_defaults
from meshwright.config.schema import RunConfig
from meshwright.config.training import BUILDER_DEFAULTS, Optimizer

OPTION_OF = {"learning_rate": "lr"}
"""Key of [optimizer] -> the option of an ``optimizer.builder`` with the same meaning,
where their names differ.
"""
GROUP_FIELDS = ("params", "rate_factor", "eps_factor")
"""Fields of the parameter groups that an ``optimizer.builder`` gets:
they overrule arguments of these names.
"""


def _names_where(is_fit: Callable[[OptimizerSpec], bool]) -> str:
    """Return the names of the optimizers that fit, for a message."""
    names = [format_value(name) for name, spec in OPTIMIZERS.items() if is_fit(spec)]
    return " or ".join(names)


def _own_keys(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    spec = OPTIMIZERS[optimizer.name]
    for key in non_defaults(optimizer, *sorted(KEYS_OF_SOME)):
        if key not in spec.keys and key not in spec.key_for:
            given = f"optimizer.{key} = {format_value(getattr(optimizer, key))}"
            choice = _names_where(lambda spec, key=key: key in spec.keys)  # type: ignore[misc]
            return f"{given} has no effect: choose optimizer.name = {choice}, or leave it out"
    if optimizer.builder is not None or optimizer.state_format == "8bit":
        return None
    if non_defaults(optimizer, "block_size"):
        return (
            f"optimizer.block_size = {optimizer.block_size} has no effect: choose"
            ' optimizer.state_dtype = "8bit", or leave it out'
        )
    return None


def _keys_of_another(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    for key in non_defaults(optimizer, *optimizer.spec.key_for):
        value = format_value(getattr(optimizer, key))
        readers = _names_where(lambda spec, key=key: key in spec.keys)  # type: ignore[misc]
        return (
            f"optimizer.{key} = {value} is read by optimizer.name = {readers} only, not by"
            f" {format_value(optimizer.name)}: set optimizer.{optimizer.spec.key_for[key]} ="
            f" {value}, or leave it out"
        )
    return None


def _first_beta(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    if not optimizer.spec.averages_weights:
        return None
    name = f"optimizer.name = {format_value(optimizer.name)}"
    if optimizer.betas[0] == 0:
        return (
            f"optimizer.betas with a first beta of 0 leaves out the average of {name}: choose 0.9"
            " to 0.98"
        )
    return None


def _state_dtype(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    state_format = optimizer.state_dtype
    if state_format == "float32" or state_format in optimizer.spec.formats:
        return None
    chosen = "optimizer.builder"
    if optimizer.builder is None:
        chosen = f"optimizer.name = {format_value(optimizer.name)}"
    readers = _names_where(lambda spec: state_format in spec.formats)
    return (
        f"optimizer.state_dtype = {format_value(state_format)} is for optimizer.name = {readers},"
        f" not {chosen}: leave it out"
    )


def _options(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    for name in GROUP_FIELDS:
        if optimizer.builder is not None and name in optimizer.options:
            return (
                f"optimizer.options.{name} = {format_value(optimizer.options[name])} has no effect:"
                " the parameter groups that optimizer.builder gets have a field of this name;"
                " rename the argument"
            )
    return find_contradiction(optimizer, BUILDER_DEFAULTS)


def find_contradiction(optimizer: Optimizer, keys: Iterable[str]) -> str | None:
    """Return the problem if one of these given keys of [optimizer] contradicts an option
    of the builder.
    """
    for key in keys if optimizer.builder is not None else ():
        option, given = OPTION_OF.get(key, key), getattr(optimizer, key)
        own = optimizer.options.get(option)
        if (
            own is not None
            and given is not None
            and json.dumps(given) != json.dumps(own)
            and given != own
        ):
            return (
                f"optimizer.{key} = {format_value(given)} and optimizer.options.{option} ="
                f" {format_value(own)} contradict each other: leave one of the two out"
            )
    return None


OPTIMIZER_RULES = (
    Rule(
        "MW-CONFIG-070",
        _first_beta,
        ("optimizer.name", "optimizer.betas"),
    ),
    Rule(
        "MW-CONFIG-071",
        _state_dtype,
        ("optimizer.state_dtype", "optimizer.name", "optimizer.builder"),
    ),
    Rule(
        "MW-CONFIG-079",
        _options,
        (
            "optimizer.builder",
            "optimizer.options",
            *(f"optimizer.{key}" for key in BUILDER_DEFAULTS),
        ),
    ),
    Rule("MW-CONFIG-073", _keys_of_another, ("optimizer.name", "optimizer.momentum")),
    Rule(
        "MW-CONFIG-068", _own_keys, ("optimizer.name", "optimizer.muon_momentum", "optimizer.scale")
    ),
)
