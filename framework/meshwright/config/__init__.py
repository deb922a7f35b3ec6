"""Configuration of a run: a TOML file and command-line overrides -> frozen, typed RunConfig, or an
error that lists all problems.
"""

from meshwright.config.batch import phases as phases
from meshwright.config.batch import samples_after as samples_after
from meshwright.config.batch import step_of as step_of
from meshwright.config.derived import batch_numbers as batch_numbers
from meshwright.config.derived import bucket_bytes as bucket_bytes
from meshwright.config.derived import default_world_size as default_world_size
from meshwright.config.derived import expert_shard_factor as expert_shard_factor
from meshwright.config.derived import find_rank_problems as find_rank_problems
from meshwright.config.derived import has_base_elsewhere as has_base_elsewhere
from meshwright.config.derived import is_meant_for_gpu as is_meant_for_gpu
from meshwright.config.derived import leaves_out_base as leaves_out_base
from meshwright.config.derived import reduces_each_microbatch as reduces_each_microbatch
from meshwright.config.derived import resolve as resolve
from meshwright.config.derived import shard_factor as shard_factor
from meshwright.config.layout_rules import MAX_FORWARDS as MAX_FORWARDS
from meshwright.config.loading import load as load
from meshwright.config.loading import load_keys as load_keys
from meshwright.config.loading import load_saved as load_saved
from meshwright.config.loading import load_with_origins as load_with_origins
from meshwright.config.saved import dump as dump
from meshwright.config.saved import parse as parse
from meshwright.config.saved import read_resolved as read_resolved
from meshwright.config.saved import to_toml as to_toml
from meshwright.config.saved import write_snapshot as write_snapshot
from meshwright.config.schema import RunConfig as RunConfig
from meshwright.config.sections import V_SCHEDULES as V_SCHEDULES
from meshwright.config.sections import Batch as Batch
from meshwright.config.sections import Data as Data
from meshwright.config.sections import Model as Model
from meshwright.config.sections import Parallel as Parallel
from meshwright.config.sections import ParameterGroup as ParameterGroup
from meshwright.config.sections import Pipeline as Pipeline
from meshwright.config.sections import Run as Run
from meshwright.config.sections import Section as Section
from meshwright.config.sources import given_keys as given_keys
from meshwright.config.sources import split_overrides as split_overrides
from meshwright.config.training import Checkpoint as Checkpoint
from meshwright.config.training import Launch as Launch
from meshwright.config.training import LossScaling as LossScaling
from meshwright.config.training import Optimizer as Optimizer
from meshwright.config.training import Tracking as Tracking
from meshwright.config.training import Train as Train
