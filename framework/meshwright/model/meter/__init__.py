"""Meter of a model's operations: FLOPs, bytes and time (:mod:`.counting`),
over one recorder (:mod:`.recorder`).
"""

from meshwright.model.meter.counting import AttentionKernel as AttentionKernel
from meshwright.model.meter.counting import FusedAttentionMode as FusedAttentionMode
from meshwright.model.meter.counting import Meter as Meter
from meshwright.model.meter.counting import OperationCost as OperationCost
from meshwright.model.meter.counting import ReferenceDevice as ReferenceDevice
from meshwright.model.meter.counting import causal_share as causal_share
from meshwright.model.meter.counting import fused_attention as fused_attention
from meshwright.model.meter.counting import reference as reference
from meshwright.model.meter.recorder import Operation as Operation
from meshwright.model.meter.recorder import OperationRecorder as OperationRecorder
from meshwright.model.meter.recorder import StorageRegistry as StorageRegistry
from meshwright.model.meter.recorder import stored_bytes as stored_bytes
