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

PRELOADED = ("torch", "torch.distributed", "torch.distributed.device_mesh", "torch._dynamo", "torch.optim")
"""Imported before the fork. torch imports the fourth, 800 modules, at a child's first optimizer step if nobody has."""


def preload(modules: tuple[str, ...] = PRELOADED) -> None:
    """Make this process fit to be forked into ranks: one thread, and the slow imports done."""
    import torch

    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)


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
