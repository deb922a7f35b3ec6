"""Configuration of a run: TOML plus dotted overrides become a frozen, typed RunConfig; all problems are reported at
once."""

from meshwright.config.derived import bucket_bytes, default_world_size, reduces_each, resolve, shard_factor
from meshwright.config.load import change, dump, explain, load, parse, read_resolved
from meshwright.config.schema import (
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
from meshwright.config.snapshot import keep
from meshwright.config.toml import to_toml

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
    "bucket_bytes",
    "change",
    "default_world_size",
    "dump",
    "explain",
    "keep",
    "load",
    "parse",
    "read_resolved",
    "reduces_each",
    "resolve",
    "shard_factor",
    "to_toml",
]
