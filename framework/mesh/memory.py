"""The peak of memory, for a :class:`~meshwright.tracking.record.StepRecord`."""

from __future__ import annotations

import resource
import sys


def peak_memory_bytes(device_type: str) -> int:
    """CUDA: the most that torch had allocated on the current device (``torch.cuda.max_memory_allocated``), which leaves
    out what NCCL and the driver hold. CPU: the largest resident set of this process, the interpreter and its libraries
    included. Both since the process began (or the CUDA peak was last reset)."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS says bytes, Linux KiB
