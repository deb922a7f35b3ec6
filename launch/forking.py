"""Ranks as children of a process that has already imported torch: a fork takes milliseconds, an import seconds.

What a parent must keep to, so that its children can compute: one torch thread (a child of a parent that ever ran an
operation with two hangs in its first parallel operation) and no CUDA context.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

PRELOADED = ("torch.distributed.device_mesh", "torch._dynamo", "torch.optim")
"""What torch would import in each child: the second, 800 modules, when the first tensor on meta is filled."""


def preload() -> None:
    """Make this process fit to be forked into ranks on CPU: one thread, and the slow imports done.

    Among them megatron-core, a second of every rank's first step with tp > 1; not where there is a GPU, because the
    door to it must then be opened for the rank's device.
    """
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    if not torch.cuda.is_available():
        from meshwright.tensor_parallel.megatron import mappings

        mappings(torch.device("cpu"))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` dies, however it dies (Linux; elsewhere does nothing).

    The kernel means the parent's *thread*: fork from a thread that lives as long as the ranks shall.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in
        os._exit(1)


def loopback() -> str:
    """Name of the loopback interface: ranks of one machine need not ask what its host name resolves to."""
    return "lo" if sys.platform.startswith("linux") else "lo0"
