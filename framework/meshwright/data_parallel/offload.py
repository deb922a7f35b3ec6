"""Buckets whose master weights and optimizer state are in host memory (ZeRO-Offload, with ZeRO-0,
1 and 2).

    backward     reduce bucket -> copy its gradient shard to the host after the reduction, overlapped with backward
    STEP         the optimizer steps the master weights on the host
    gather       copy the shard of the weights to the device, then all-gather

On CPU host and device memory are the same: the master weights are still a copy, gradients are not
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.sharding import StageParameter
from meshwright.optimizer import HostMemory


class OffloadedBucket(Bucket):
    """Bucket with master weights in host memory."""

    def __init__(
        self,
        host: HostMemory,
        members: Sequence[StageParameter],
        *,
        keeps_gradient: bool,
        block_size: int,
    ) -> None:
        """Build the bucket on the members' device, with its master weights in ``host``;
        see :class:`.Bucket`.
        """
        self._host = host
        super().__init__(members, keeps_gradient=keeps_gradient, block_size=block_size)
        self._host_gradient: Tensor | None = None
        self._host_weights: Tensor | None = None
        if host.is_apart:
            numel = self.master.numel()
            self._host_gradient = host.allocate_staging(numel, self.master.dtype)
            if self.is_mixed_precision:
                self._host_weights = host.allocate_staging(numel, self.dtype)
        self._is_last = False
        """True when the reduction that was posted last is the last of the step for this bucket."""
        self._sums_in_wait = False
        """True when ``wait`` completes the gradient shard, not the posted collective alone."""
        self._wait_for_copy: Callable[[], None] | None = None
        """Function that blocks until this step's gradient shard is copied to the host;
        None while no copy is posted.
        """

    def make_master(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of the shard of the weights in host memory, in this dtype."""
        return self._host.allocate(weights.numel(), dtype).copy_(weights)

    def begin_step(self) -> None:
        """Mark last step's gradients as stale, on the device and on the host."""
        super().begin_step()
        self._wait_for_copy = None

    def reduce(self, *, last: bool = True) -> None:
        """Post the gradient reduction, and after the step's last one the copy
        of its result to the host.
        """
        super().reduce(last=last)
        self._is_last = last
        self._wait_for_copy = None
        adds_part = self._part is not None
        finishes_in_wait = self.pending is not None and self.pending.finish is not None  # gloo
        self._sums_in_wait = adds_part or finishes_in_wait
        if not self._sums_in_wait:
            self._post_copy()

    def wait(self) -> None:
        """Block until the posted collective is done;
        post the copy to the host where it had to wait for a sum.
        """
        super().wait()
        if self._sums_in_wait:
            self._sums_in_wait = False
            self._post_copy()

    def _post_copy(self) -> None:
        """Post the device-to-host copy of this rank's gradient shard,
        to overlap it with the rest of the backward.

        The copy waits on its own stream for the reduction just posted. Nothing is posted if later
        sums (over copies, tp or ties) change the shard.
        """
        holders = self.holders
        sums_over_copies = self.is_sharded and holders.copies_group.size > 1
        adds_more = holders.partial_over or holders.tied is not None or sums_over_copies
        if self._host_gradient is not None and self._is_last and not adds_more:
            self._wait_for_copy = self._host.fetch(
                self._host_gradient, self.shard_gradient, after=self.pending
            )

    def fetch_gradient(self) -> Tensor:
        """Return this rank's gradient shard (numel/n,) in host memory.
        Blocks until it is complete.
        """
        if self._host_gradient is None:
            return self.shard_gradient
        if self._wait_for_copy is None:
            self._wait_for_copy = self._host.fetch(self._host_gradient, self.shard_gradient)
        self._wait_for_copy()
        return self._host_gradient

    def copy_master(self, shard: Tensor) -> None:
        """Copy the master weights from the host into this rank's shard of the weights; CUDA:
        cast on the host.
        """
        # last step's copy has left _host_weights: this step's gradients depend on it
        source = self.master
        if self._host_weights is not None:  # cast here: half the bytes over PCIe
            source = self._host_weights.copy_(self.master)
        shard.copy_(source, non_blocking=True)
