"""Device of a rank: its choice, torch's settings for it, and its peak memory."""

from __future__ import annotations

import os
import resource
import sys

import torch

from meshwright.errors import ConfigError, MeshError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that torch's CUDA allocator reads; all but the first are deprecated."""
RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Environment variables with the size of torch's flight recorder;
all but the first are deprecated.
"""


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory in bytes since the process began, or since the CUDA peak was reset.

    CUDA: the most that torch allocated on the current device (``torch.cuda.max_memory_allocated``),
        without NCCL and
    the driver. CPU: the peak resident set of this process, interpreter and libraries included.
    """
    if device_type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def pick_device(wanted: str, local_rank: int, *, share: bool = False) -> torch.device:
    """Return the device: with ``auto`` this process's GPU if there is one, else the CPU.

    ``share``: ranks are assigned to the GPUs round-robin, so that several may have the same one.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "MW-MESH-010",
            "train.device = 'cuda', but torch sees no GPU here: use 'auto' or 'cpu', or a CUDA"
            " build of torch",
        )
    prepare_allocator()
    prepare_recorder()
    count = torch.cuda.device_count()
    # srun --gpus-per-task=1 shows each task its own, as number 0
    if count == 1 and "SLURM_PROCID" in os.environ:
        local_rank = 0
    if share:
        local_rank %= count
    if local_rank >= count:
        raise MeshError(
            "MW-MESH-011",
            f"local rank {local_rank} has no GPU of its own: {count} visible. Start at most {count}"
            " processes on this node (launch.processes), set CUDA_VISIBLE_DEVICES, or let ranks"
            " share: launch.share_devices = true",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def prepare_allocator() -> None:
    """Set expandable segments in torch's CUDA allocator, against fragmentation;
    a user's setting wins.

    torch reads the variable at its first allocation.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def prepare_recorder() -> None:
    """Turn on torch's flight recorder, which a report of a hang reads; a user's setting wins."""
    if not any(name in os.environ for name in RECORDER_VARIABLES):
        os.environ[RECORDER_VARIABLES[0]] = "2000"
