"""Rules between keys that belong to one optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable

from meshwright.config.keys import format_value
from meshwright.config.rules import Rule, non_defaults
from meshwright.config.schema import RunConfig
from meshwright.config.training import BUILDER_DEFAULTS, Optimizer

OPTION_OF = {"learning_rate": "lr"}
"""Key of [optimizer] -> the option of an ``optimizer.builder`` with the same meaning, where their names differ."""
GROUP_FIELDS = ("params", "rate_factor", "eps_factor", "eight_bit")
"""Fields of the parameter groups that an ``optimizer.builder`` gets: they overrule arguments of these names."""


_MUON, _ADAMW = ("muon",), ("adamw", "adamw8bit", "schedule_free_adamw", "muon")  # Muon steps vectors as AdamW does
READ_BY = {
    **dict.fromkeys(("muon_momentum", "nesterov", "ns_steps", "scale"), _MUON),
    **dict.fromkeys(("beta2_decay", "clip_threshold"), ("adafactor",)),
    "momentum": ("sgd",),
    **{"betas": (*_ADAMW, "lion"), "eps": (*_ADAMW, "lion", "adafactor"), "block_size": ("adamw8bit",)},
}
"""Key that only some optimizers read -> names of these optimizers."""


def _own_keys(config: RunConfig) -> str | None:
    for key in non_defaults(config.optimizer, *READ_BY):
        if config.optimizer.name not in (names := READ_BY[key]):
            given = f"optimizer.{key} = {format_value(getattr(config.optimizer, key))}"
            choice = " or ".join(map('"{}"'.format, names))
            return f"{given} has no effect: choose optimizer.name = {choice}, or leave it out"
    return None


def _muon_momentum(config: RunConfig) -> str | None:
    momentum = config.optimizer.momentum
    if config.optimizer.name != "muon" or not non_defaults(config.optimizer, "momentum"):
        return None
    return (
        f'optimizer.momentum = {momentum} is read by optimizer.name = "sgd" only, not by "muon": set '
        f"optimizer.muon_momentum = {momentum}, or leave it out"
    )


def _offloaded_wholes(config: RunConfig) -> str | None:
    if not config.optimizer.needs_full_weights or not config.parallel.offload:
        return None
    if config.optimizer.name == "adafactor":
        return (
            'parallel.offload = true keeps optimizer states on the host, and optimizer.name = "adafactor" has almost '
            "none: its row and column means, which ranks all-reduce on the device; leave offload out"
        )
    return (
        'parallel.offload = true runs the optimizer on the host, and optimizer.name = "muon" multiplies matrices: '
        "leave offload out (Muon keeps 4 bytes per element, AdamW 8), or choose another optimizer"
    )


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


OPTIMIZER_RULES = (
    Rule("MW-CONFIG-070", _schedule_free, ("optimizer.name", "optimizer.schedule", "optimizer.betas")),
    Rule("MW-CONFIG-071", _state_dtype, ("optimizer.state_dtype", "optimizer.name", "optimizer.builder")),
    Rule(
        "MW-CONFIG-079",
        _options,
        ("optimizer.builder", "optimizer.options", *(f"optimizer.{key}" for key in BUILDER_DEFAULTS)),
    ),
    Rule("MW-CONFIG-067", _offloaded_wholes, ("parallel.offload", "optimizer.name")),
    Rule("MW-CONFIG-073", _muon_momentum, ("optimizer.name", "optimizer.momentum")),
    Rule("MW-CONFIG-068", _own_keys, ("optimizer.name", "optimizer.muon_momentum", "optimizer.scale")),
)
