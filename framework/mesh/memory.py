"""Peak memory of this process, for a :class:`~meshwright.tracking.record.StepRecord`."""

from __future__ import annotations

import resource
import sys


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory in bytes since the process began, or since the CUDA peak was reset.

    CUDA: the most that torch allocated on the current device (``torch.cuda.max_memory_allocated``), without NCCL and
    the driver. CPU: the peak resident set of this process, interpreter and libraries included.
    """
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS says bytes, Linux KiB
