"""The configuration of a run: TOML + dotted overrides -> a frozen, typed RunConfig; all problems reported at once."""

from framework.config.load import dump, load, parse
from framework.config.schema import (
    Batch,
    Checkpoint,
    Data,
    Launch,
    Model,
    Optimizer,
    Parallel,
    Pipeline,
    Run,
    RunConfig,
    Section,
    Tracking,
    Train,
)
from framework.config.toml import to_toml
from framework.config.world import default_world_size, resolve

__all__ = [
    "Batch",
    "Checkpoint",
    "Data",
    "Launch",
    "Model",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Run",
    "RunConfig",
    "Section",
    "Tracking",
    "Train",
    "default_world_size",
    "dump",
    "load",
    "parse",
    "resolve",
    "to_toml",
]
