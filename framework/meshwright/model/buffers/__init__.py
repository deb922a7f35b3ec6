"""Buffers of a model that a training forward changes.

:mod:`.running` finds, casts and lists them; :mod:`.step_state` combines them over the micro-batches
of a step.
"""

from meshwright.model.buffers.running import INSTEAD as INSTEAD
from meshwright.model.buffers.running import BufferWatch as BufferWatch
from meshwright.model.buffers.running import cast_model as cast_model
from meshwright.model.buffers.running import cast_parameters as cast_parameters
from meshwright.model.buffers.running import cast_running as cast_running
from meshwright.model.buffers.running import cast_statistics as cast_statistics
from meshwright.model.buffers.running import couples_samples as couples_samples
from meshwright.model.buffers.running import coupling_modules as coupling_modules
from meshwright.model.buffers.running import is_reused as is_reused
from meshwright.model.buffers.running import keeps_statistics as keeps_statistics
from meshwright.model.buffers.running import owner_of as owner_of
from meshwright.model.buffers.running import running_buffers as running_buffers
from meshwright.model.buffers.running import running_values as running_values
from meshwright.model.buffers.step_state import BatchNorm as BatchNorm
from meshwright.model.buffers.step_state import SpareCounters as SpareCounters
from meshwright.model.buffers.step_state import StepState as StepState
from meshwright.model.buffers.step_state import has_statistics as has_statistics
from meshwright.model.buffers.step_state import has_step_sums as has_step_sums
from meshwright.model.buffers.step_state import is_saved as is_saved
from meshwright.model.buffers.step_state import step_sum_problem as step_sum_problem
