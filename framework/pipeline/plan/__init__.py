"""Planning of a pipeline on the meta device, before any process group exists: layers -> costs, stages and their shapes.

describe_model, ModelDescription      check that layers stand alone; the output, and the buffers that forward changes
count_layers, LayerCost               FLOPs and bytes of each layer
cut_layers, layer_weights, partition  layers of each stage
describe_boundaries                   values between the stages
check_recompute, recomputed_names     layers with activation checkpointing (recompute)
check_running                         running buffers (BatchNorm) that this layout would change
outline_of, outline_of_value          equality of layers and of values, for caches
recomputed, recompute_parts, SplitBackward, accumulate_deferred   as a stage runs its layers, for the planner's profile
"""

from meshwright.pipeline.partition import partition
from meshwright.pipeline.plan.boundaries import describe_boundaries
from meshwright.pipeline.plan.costs import LayerCost, count_layers
from meshwright.pipeline.plan.cut import cut_layers, layer_weights
from meshwright.pipeline.plan.describe import ModelDescription, describe_model
from meshwright.pipeline.plan.outline import outline_of, outline_of_value
from meshwright.pipeline.plan.recompute_plan import check_recompute, recomputed_names
from meshwright.pipeline.plan.running import check_running
from meshwright.pipeline.recompute import recompute_parts, recomputed
from meshwright.pipeline.split_backward import SplitBackward, accumulate_deferred

__all__ = [
    "LayerCost",
    "ModelDescription",
    "SplitBackward",
    "accumulate_deferred",
    "check_recompute",
    "check_running",
    "count_layers",
    "cut_layers",
    "describe_boundaries",
    "describe_model",
    "layer_weights",
    "outline_of",
    "outline_of_value",
    "partition",
    "recompute_parts",
    "recomputed",
    "recomputed_names",
]
