"""Rules between keys that belong to one optimizer, or to the routing; and ALL_RULES, with those of other modules."""

from __future__ import annotations

from meshwright.config.keys import format_value
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.rules import RULES, Rule
from meshwright.config.schema import RunConfig


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
    Rule("MW-CONFIG-078", _routing, ("train.routing", "train.routing_directory")),
)
ALL_RULES = (*LAYOUT_RULES, *RULES, *OPTIMIZER_RULES)
