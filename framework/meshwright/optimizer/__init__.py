"""Optimizers on flat shards, gradient clipping by the global norm,
and the learning rate as a function of the step.

ShardLayout, ShardPlace, MatrixShard, MatrixSlot   weights in a shard, for optimizers that are not element-wise
with_settings, sampled_rates                       settings of each parameter; learning rates that ranks compare
HostMemory, host_memory, OffloadedOptimizer        optimizer in host memory
LossScale, first_scale, next_scale, can_fall       loss scale of float16
read_states, restore_states, add_state             state of each shard
state_names, states_of, saved_states_of            names of the state
factors_of, factor_infos, factor_elements          states with less than a number per element
peak_rate, default_decay                           learning rate and weight decay: the keys', or a user's optimizer's
read_record                                        states of a user's optimizer, from a checkpoint
evaluating, evaluated_weights, GRADIENT_POINT      weights of evaluation, where they are an average
BlockCodec, table_bytes                            8-bit states: for planner and verify
step_bytes, find_homes, iteration_flops, matrices_of, batch_size   temporaries and work of a step on whole weights
"""

from meshwright.optimizer.choice import saved_states_of as saved_states_of
from meshwright.optimizer.choice import states_of as states_of
from meshwright.optimizer.eight_bit import SMALLEST as SMALLEST
from meshwright.optimizer.eight_bit import BlockCodec as BlockCodec
from meshwright.optimizer.eight_bit import table_bytes as table_bytes
from meshwright.optimizer.factored import factor_elements as factor_elements
from meshwright.optimizer.factored import factor_infos as factor_infos
from meshwright.optimizer.factored import step_bytes as step_bytes
from meshwright.optimizer.layout import ShardLayout as ShardLayout
from meshwright.optimizer.loss_scale import MAX_SCALE as MAX_SCALE
from meshwright.optimizer.loss_scale import LossScale as LossScale
from meshwright.optimizer.loss_scale import can_fall as can_fall
from meshwright.optimizer.loss_scale import first_scale as first_scale
from meshwright.optimizer.loss_scale import next_scale as next_scale
from meshwright.optimizer.matrix_plan import MatrixShard as MatrixShard
from meshwright.optimizer.matrix_plan import MatrixSlot as MatrixSlot
from meshwright.optimizer.matrix_plan import batch_size as batch_size
from meshwright.optimizer.matrix_plan import find_homes as find_homes
from meshwright.optimizer.matrix_plan import iteration_flops as iteration_flops
from meshwright.optimizer.matrix_plan import matrices_of as matrices_of
from meshwright.optimizer.offload import HostMemory as HostMemory
from meshwright.optimizer.offload import OffloadedOptimizer as OffloadedOptimizer
from meshwright.optimizer.offload import host_memory as host_memory
from meshwright.optimizer.own_defaults import default_decay as default_decay
from meshwright.optimizer.own_defaults import peak_rate as peak_rate
from meshwright.optimizer.own_states import read_record as read_record
from meshwright.optimizer.rounded import ShardPlace as ShardPlace
from meshwright.optimizer.schedule_free import GRADIENT_POINT as GRADIENT_POINT
from meshwright.optimizer.settings import sampled_rates as sampled_rates
from meshwright.optimizer.settings import with_settings as with_settings
from meshwright.optimizer.states import add_state as add_state
from meshwright.optimizer.states import evaluated_weights as evaluated_weights
from meshwright.optimizer.states import evaluating as evaluating
from meshwright.optimizer.states import factors_of as factors_of
from meshwright.optimizer.states import read_states as read_states
from meshwright.optimizer.states import restore_states as restore_states
from meshwright.optimizer.states import state_names as state_names
