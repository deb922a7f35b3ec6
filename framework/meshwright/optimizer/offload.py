"""Optimizer in host memory (ZeRO-Offload), and copies that overlap with device computation.

device    backward ....| reduce | copy |....           forward ......
host                            | gradient | update 0 | update 1 | ...
                                                  | copy 0 | copy 1 |   to the device, during the next shard's update

With a CUDA device the memory is pinned, because only copies of pinned memory overlap. With a
directory it is memory-mapped files, unlinked as soon as they are open: the operating system pages
out what does not fit into RAM.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.config import Optimizer, Parallel
from meshwright.errors import ConfigError
from meshwright.mesh.comm import CollectiveHandle
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.states import restore_states, state_names


class HostMemory:
    """Host memory of one rank: pinned, or mapped from files."""

    def __init__(self, device: torch.device, directory: Path | None = None) -> None:
        self.is_apart = device.type == "cuda"
        """True when the device has its own memory (CUDA), so that tensors must be copied."""
        self._stream = torch.cuda.Stream(device) if self.is_apart else None  # type: ignore[no-untyped-call]
        self._directory = directory

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zero tensor (numel,) for the whole run;
        with a directory it is mapped from a file.

        Raises:
            ConfigError: the directory has too little space.
        """
        if self._directory is None:
            return self.allocate_staging(numel, dtype)
        return _mapped(self._directory, numel, dtype)

    def allocate_staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zero tensor (numel,), a staging buffer for device copies;
        pinned if the device is CUDA.
        """
        return torch.zeros(numel, dtype=dtype, pin_memory=self._stream is not None)

    def fetch(
        self, target: Tensor, source: Tensor, after: CollectiveHandle | None = None
    ) -> Callable[[], None]:
        """Post a copy of ``source`` on the device to ``target`` on the host.
        Does not block with CUDA.

        The copy runs on its own stream, after the current stream's work so far and after the
        collective ``after``. The current stream continues meanwhile.

        Returns:
            a function that blocks until the copy is done.
        """
        if self._stream is None:
            if after is not None:
                after.wait()
            target.copy_(source)
            return lambda: None
        # backward, and earlier sums, have written the source on the current stream
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.join()  # the collective writes it on a stream of its own
            # no record_stream: the source is a gradient shard, which lives as long as the run
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done.synchronize


def host_memory(parallel: Parallel, device: torch.device) -> HostMemory | None:
    """Return the host memory for an offloaded optimizer; None:
    the optimizer steps on the device.
    """
    if not parallel.offload:
        return None
    directory = parallel.offload_directory
    return HostMemory(device, None if directory is None else Path(directory))


class OffloadedOptimizer(FlatOptimizer):
    """Flat optimizer whose master weights and state are in host memory.

    Shards are stepped one after the other. The copy of a finished shard to the device overlaps with
    the step of the next one.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        config: Optimizer,
        host: HostMemory,
        *,
        order: Sequence[int] | None = None,
    ) -> None:
        """Build the optimizer over shards in host memory, and allocate its state there, zero;
        see the base class.
        """
        super().__init__(shards, config, order=order, allocate=host.allocate)
        for index, shard in enumerate(self.shards):
            names = state_names(self, index)
            if names:
                zeros = torch.zeros(()).expand_as(shard.weights)  # no memory of its own
                restore_states(self, index, dict.fromkeys(names, zeros), steps=0)

    def _step(self, indices: Sequence[int], gradient_factor: float) -> None:
        for index in indices:  # one by one: each one's copy overlaps with the next one's step
            super()._step([index], gradient_factor)


def _mapped(directory: Path, numel: int, dtype: torch.dtype) -> Tensor:
    num_bytes = numel * dtype.itemsize
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="offload-", dir=directory)
        try:
            # opened below by its descriptor: others may replace a name in a shared directory
            Path(name).unlink()
            # allocate now: a write to a mapped page without disk space kills the process
            if num_bytes:
                os.posix_fallocate(handle, 0, num_bytes)
            return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=numel, dtype=dtype)
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(
            "MW-OPTIM-002",
            f"parallel.offload_directory = {str(directory)!r}: no {num_bytes:,} bytes for what the"
            f" optimizer keeps: {error.strerror or error}. Choose another directory, more ranks to"
            " share it, or leave it out",
        ) from error
