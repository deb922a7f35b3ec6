"""Processes forked from one that has already imported torch: a fork takes milliseconds,
an import seconds.

The parent must use one torch thread and create no CUDA context, so that its children can compute. A
child of a parent that ever ran an operation with two threads hangs in its first parallel operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.config import RunConfig
from meshwright.system.process import SIGNALS
from meshwright_launch.leftovers import own_directory, remove_leftovers

PR_SET_PDEATHSIG = 1

PRELOADED = ("torch.distributed.device_mesh", "torch._dynamo", "torch.optim")
"""Modules that torch would import in each child; ``torch._dynamo`` (800 modules)
when it first fills a meta tensor.
"""


def preload() -> None:
    """Prepare this process to be forked into CPU ranks: set one thread and do the slow imports.

    These include megatron-core, which takes a second of every rank's first step with tp > 1. With a
    GPU it is left out, because it must be set up for the rank's device.
    """
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # a check by CUDA itself would spoil it in forks
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    if not torch.cuda.is_available():
        from meshwright.tensor_parallel.megatron import load_mappings

        load_mappings(torch.device("cpu"))


def warm_up(config: RunConfig, module: str) -> None:
    """Start the server that forks the ranks. Returns at once,
    while the server imports torch and ``module``.

    Call it before this process imports them, so that both import at the same time. On a machine
    with a GPU the server imports torch alone: a library that enumerates devices during its import
    would make CUDA useless in the ranks.
    """
    os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)
    remove_leftovers()
    own_directory()  # the fork server's socket goes there
    if config.train.device != "cpu" and Path("/dev/nvidiactl").exists():
        modules = ["torch", "torch.distributed.device_mesh"]
    else:
        # for its regions, or its datasets
        uses_megatron = config.parallel.tp > 1 or config.data.builder is None
        modules = [*(["meshwright_launch.preload"] if uses_megatron else PRELOADED), module]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    # The server has the import path of this process, without the current directory, which may have
    # a folder `models`. A signal to all processes (Ctrl-C, scancel) is handled by this process and
    # the ranks alone: the server and Python's resource tracker start with signals blocked. One that
    # arrives meanwhile stays pending here.
    path = os.pathsep.join(filter(None, sys.path))
    with _variables(PYTHONPATH=path, PYTHONSAFEPATH="1"):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            multiprocessing.resource_tracker.ensure_running()
            # ensure_running has unblocked some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` dies, for any reason (Linux;
    no effect elsewhere).

    The kernel watches the parent's *thread*: fork from a thread that lives as long as the ranks
    must.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request took effect
        os._exit(1)


@contextlib.contextmanager
def _variables(**variables: str) -> Iterator[None]:
    """Set environment variables for the processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
