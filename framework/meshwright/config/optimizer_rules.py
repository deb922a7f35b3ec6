"""Rules between keys that belong to one optimizer, or to the routing; and ALL_RULES, with those of other modules."""

from __future__ import annotations

import json
from collections.abc import Iterable

from meshwright.config.keys import format_value
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.rules import RULES, Rule
from meshwright.config.schema import RunConfig
from meshwright.config.training import BUILDER_DEFAULTS, Optimizer

OPTION_OF = {"learning_rate": "lr"}
"""Key of [optimizer] -> the option of an ``optimizer.builder`` with the same meaning, where their names differ."""
GROUP_FIELDS = ("params", "rate_factor", "eps_factor", "eight_bit")
"""Fields of the parameter groups that an ``optimizer.builder`` gets: they overrule arguments of these names."""


def _schedule_free(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    if optimizer.name != "schedule_free_adamw" or optimizer.builder is not None:
        return None
    if optimizer.schedule != "constant":
        return (
            f'optimizer.name = "schedule_free_adamw" averages the weights in place of a decay, and optimizer.schedule '
            f'= {format_value(optimizer.schedule)} changes the learning rate: set optimizer.schedule = "constant"; '
            f"warmup_steps may stay"
        )
    if optimizer.betas[0] == 0:
        return (
            'optimizer.betas with a first beta of 0 leaves out the average of optimizer.name = "schedule_free_adamw": '
            "choose 0.9 to 0.98"
        )
    return None


def _state_dtype(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    if optimizer.state_dtype == "float32" or (optimizer.name == "adamw" and optimizer.builder is None):
        return None
    chosen = f"optimizer.name = {format_value(optimizer.name)}" if optimizer.builder is None else "optimizer.builder"
    return f'optimizer.state_dtype = "bfloat16" is for optimizer.name = "adamw", not {chosen}: leave it out'


def _options(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    for name in GROUP_FIELDS:
        if optimizer.builder is not None and name in optimizer.options:
            return (
                f"optimizer.options.{name} = {format_value(optimizer.options[name])} has no effect: the parameter "
                f"groups that optimizer.builder gets have a field of this name; rename the argument"
            )
    return find_contradiction(optimizer, BUILDER_DEFAULTS)


def find_contradiction(optimizer: Optimizer, keys: Iterable[str]) -> str | None:
    """Return the problem if one of these given keys of [optimizer] contradicts an option of the builder."""
    for key in keys if optimizer.builder is not None else ():
        option, given = OPTION_OF.get(key, key), getattr(optimizer, key)
        own = optimizer.options.get(option)
        if own is not None and given is not None and json.dumps(given) != json.dumps(own) and given != own:
            return (
                f"optimizer.{key} = {format_value(given)} and optimizer.options.{option} = {format_value(own)} "
                f"contradict each other: leave one of the two out"
            )
    return None


def _routing(config: RunConfig) -> str | None:
    mode, directory = config.train.routing, config.train.routing_directory
    if mode == "replay" and directory is None:
        return 'train.routing = "replay" needs train.routing_directory, the directory of a recording: set it'
    if mode == "off" and directory is not None:
        return (
            f'train.routing_directory = {format_value(directory)} has no effect with train.routing = "off": leave it '
            f'out, or choose "record" or "replay"'
        )
    return None


OPTIMIZER_RULES = (
    Rule("MW-CONFIG-070", _schedule_free, ("optimizer.name", "optimizer.schedule", "optimizer.betas")),
    Rule("MW-CONFIG-071", _state_dtype, ("optimizer.state_dtype", "optimizer.name", "optimizer.builder")),
    Rule(
        "MW-CONFIG-079",
        _options,
        ("optimizer.builder", "optimizer.options", *(f"optimizer.{key}" for key in BUILDER_DEFAULTS)),
    ),
    Rule("MW-CONFIG-078", _routing, ("train.routing", "train.routing_directory")),
)
ALL_RULES = (*LAYOUT_RULES, *RULES, *OPTIMIZER_RULES)
