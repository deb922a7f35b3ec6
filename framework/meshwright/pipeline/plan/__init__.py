"""Planning of a pipeline on the meta device, before any process group exists: layers -> costs,
stages and their shapes.

describe_model, ModelDescription      output and changed buffers of the model; checks that layers are self-contained
draw_functions_by_name                functional dropouts of layers, drawn by name
model_costs, count_layers, LayerCost  FLOPs and bytes of each layer
cut_layers, layer_weights, partition  layers of each stage
describe_boundaries                   values between the stages
recomputed_names                      layers with activation checkpointing (recompute)
offloaded_names                       layers with activation offload
check_trimmable, with_token_dims      trimmed rows: whether a model allows them, and shapes by their length
check_running                         running buffers (BatchNorm) that this layout would change
check_synchronised                    nn.SyncBatchNorm whose samples this layout would not have together
outline_of, outline_of_value          equality of layers and of values, for caches
recomputed, recompute_parts, SplitBackward, accumulate_deferred   of a stage, for the planner's profile of layers
"""

from meshwright.pipeline.partition import partition as partition
from meshwright.pipeline.plan.boundaries import describe_boundaries as describe_boundaries
from meshwright.pipeline.plan.costs import LayerCost as LayerCost
from meshwright.pipeline.plan.costs import count_layers as count_layers
from meshwright.pipeline.plan.costs import model_costs as model_costs
from meshwright.pipeline.plan.cut import cut_layers as cut_layers
from meshwright.pipeline.plan.cut import layer_weights as layer_weights
from meshwright.pipeline.plan.describe import ModelDescription as ModelDescription
from meshwright.pipeline.plan.describe import describe_model as describe_model
from meshwright.pipeline.plan.functional import draw_functions_by_name as draw_functions_by_name
from meshwright.pipeline.plan.outline import outline_of as outline_of
from meshwright.pipeline.plan.outline import outline_of_value as outline_of_value
from meshwright.pipeline.plan.recompute_plan import offloaded_names as offloaded_names
from meshwright.pipeline.plan.recompute_plan import recomputed_names as recomputed_names
from meshwright.pipeline.plan.running import check_running as check_running
from meshwright.pipeline.plan.running import check_synchronised as check_synchronised
from meshwright.pipeline.plan.trimmed import check_trimmable as check_trimmable
from meshwright.pipeline.plan.trimmed import with_token_dims as with_token_dims
from meshwright.pipeline.recompute import recompute_parts as recompute_parts
from meshwright.pipeline.recompute import recomputed as recomputed
from meshwright.pipeline.split_backward import SplitBackward as SplitBackward
from meshwright.pipeline.split_backward import accumulate_deferred as accumulate_deferred
