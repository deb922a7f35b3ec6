"""Recorder of a step on the stub CUDA device: host-device synchronisations, devices of collectives,
threads.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from meshwright.model.meter import Operation
from meshwright_plan.dryrun.recorder import StepRecorder
from tests.support.cuda.call_site import call_site
from tests.support.cuda.streams import Streams
from tests.support.cuda.stubs import HostWaits

aten = torch.ops.aten
_VALUES = {torch.bool: True, torch.int64: 1, torch.int32: 1}
"""Dtype -> result of ``item()`` on a fake tensor; 1.0 for all others."""


class CudaRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """StepRecorder that also records host waits, collectives off the device,
    and accesses by stream.
    """

    def __init__(self, waits: HostWaits, streams: Streams) -> None:
        super().__init__()
        self.waits, self.streams = waits, streams
        waits.now, streams.number_of = (lambda: self.now), self.number_of
        self.off_device: list[str] = []
        """Collectives and messages with a tensor that is not on the device."""
        self.num_from_autograd = 0
        """Collectives posted by hooks on the thread that autograd has for the device."""
        self._main = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].device.type == "cuda":
            self.waits.note()
            self.streams.read_by_host(args[0])
            return _VALUES.get(args[0].dtype, 1.0)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record(self, operation: Operation) -> None:
        """Record the operation, and whether it is a blocking copy or a collective
        with a tensor off the device.
        """
        before = len(self.communication)
        super().record(operation)
        if len(self.communication) == before:
            self.streams.operation(operation)
            if operation.packet in (aten._to_copy, aten.copy_) and _is_blocking_copy(operation):
                self.waits.note()
                self.streams.host_waits(self.streams.current)
        else:
            call = self.communication[-1].call
            self.streams.communication(
                operation, call, self._interceptor.communicator_of(operation.args)
            )
            if any(tensor.device.type != "cuda" for tensor in operation.inputs):
                self.off_device.append(
                    f"{call.operation} of {call.num_bytes:,} bytes at {call_site()}"
                )
            self.num_from_autograd += threading.get_ident() != self._main


def _is_blocking_copy(operation: Operation) -> bool:
    """Return True for a copy between host and device in which the host program waits."""
    target = operation.outputs[0].device.type
    source = operation.inputs[-1].device.type
    is_async = operation.kwargs.get("non_blocking") or (
        operation.packet is aten.copy_ and operation.args[2:3] == (True,)
    )
    return {source, target} == {"cpu", "cuda"} and not is_async
