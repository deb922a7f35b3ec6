"""Configuration of a run: TOML plus dotted overrides become a frozen, typed RunConfig; all problems are reported at
once."""

from meshwright.config.derived import bucket_bytes, default_world_size, reduces_each_microbatch, resolve, shard_factor
from meshwright.config.loading import load, load_saved, load_with_origins
from meshwright.config.saved import dump, parse, read_resolved, to_toml, write_snapshot
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
from meshwright.config.sources import given_keys

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
    "default_world_size",
    "dump",
    "given_keys",
    "load",
    "load_saved",
    "load_with_origins",
    "parse",
    "read_resolved",
    "reduces_each_microbatch",
    "resolve",
    "shard_factor",
    "to_toml",
    "write_snapshot",
]
