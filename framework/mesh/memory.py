"""Peak memory of this process, for a :class:`~meshwright.tracking.record.StepRecord`."""

from __future__ import annotations

import resource
import sys


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory in bytes since the process began (or the CUDA peak was last reset).

    CUDA: ``torch.cuda.max_memory_allocated`` of the current device, without the memory of NCCL and the driver. CPU: the
    largest resident set of this process, the interpreter and its libraries included."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, Linux KiB
