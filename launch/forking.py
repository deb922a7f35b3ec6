"""Ranks forked from a process that has already imported torch: a fork takes milliseconds, an import seconds.

The parent must keep to one torch thread and create no CUDA context, so that its children can compute. A child of a
parent that ever ran an operation with two threads hangs in its first parallel operation.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

PRELOADED = ("torch.distributed.device_mesh", "torch._dynamo", "torch.optim")
"""Modules that torch would import in each child; the second (800 modules) when it first fills a meta tensor."""


def preload() -> None:
    """Prepare this process to be forked into CPU ranks: set one thread and do the slow imports.

    They include megatron-core, which takes a second of every rank's first step with tp > 1. With a GPU it is left out,
    because megatron-core must then be set up for the rank's device.
    """
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    if not torch.cuda.is_available():
        from meshwright.tensor_parallel.megatron import load_mappings

        load_mappings(torch.device("cpu"))


def die_with_parent(parent: int) -> None:
    """Request that the kernel kills this process when ``parent`` dies, for any reason (Linux; no effect elsewhere).

    The kernel watches the parent's *thread*: fork from a thread that lives as long as the ranks must.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request took effect
        os._exit(1)


def loopback() -> str:
    """Return the name of the loopback interface, so that ranks of one machine need not resolve its host name."""
    return "lo" if sys.platform.startswith("linux") else "lo0"
