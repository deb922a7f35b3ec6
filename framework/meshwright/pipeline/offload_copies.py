"""Copies of saved storages between device and host memory, on a stream for each direction.

NOTE [copy order]: for both directions, device memory is allocated and freed in the order of the
compute stream. A copy begins after the compute stream's work so far, and the compute stream waits
for it before it uses or frees the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Alignment of storages in a host block, in bytes."""


class HostBlock:
    """Host memory of storages that are copied together,
    returned for reuse when the last of them is released.
    """

    def __init__(self, memory: Tensor, give_back: Callable[[Tensor], None]) -> None:
        self.memory, self._give_back = memory, give_back

    def __del__(self) -> None:
        self._give_back(self.memory)


class StoredActivation:
    """A storage saved for backward: flat on the device, in host memory, or both."""

    def __init__(self, flat: Tensor) -> None:
        self.device: Tensor | None = flat
        self.host: Tensor | None = None
        self.block: HostBlock | None = None
        self.copied: Any = None
        """Event of its copy to the host."""
        self.arrived: Any = None
        """Event of its copy back; None once the compute stream has waited for it."""
        self.version = flat._version
        self.is_stale = False
        """True if the tensor was overwritten before it was released."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self.device is None else self.device.numel() * self.device.element_size()

    def release(self) -> None:
        """Release the device memory of a storage that has been copied to the host."""
        if self.device is not None and self.arrived is None:
            self.is_stale |= self.device._version != self.version
        self.device = self.arrived = None


class HostCopies:
    """Copy streams of one rank, and the host memory that the copies use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = None
        self._in: Any = None
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.on_allocate: Callable[[Tensor], object] = lambda memory: None
        """Function called with each new host tensor,
        whose bytes are those that torch takes from the host.
        """
        self._free: dict[int, list[Tensor]] = {}
        """Size class in bytes -> host tensors to reuse. Only with CUDA."""

    def post_out(self, stored: Sequence[StoredActivation]) -> None:
        """Post the copies of storages to the host. Does not block with CUDA."""
        leaving = [saved for saved in stored if saved.host is None and saved.device is not None]
        if not leaving:
            return
        sizes = [-(-saved.num_bytes // _ALIGNMENT) * _ALIGNMENT for saved in leaving]
        block, offset = self._host_block(sum(sizes)), 0
        with self._on(self._out):
            for saved, size in zip(leaving, sizes, strict=True):
                assert saved.device is not None
                saved.block = block
                saved.host = block.memory[offset : offset + saved.num_bytes].view(
                    saved.device.dtype
                )
                saved.host.copy_(saved.device, non_blocking=self._out is not None)
                offset += size
            copied = _recorded(self._out)
        for saved in leaving:
            saved.copied = copied

    def finish_out(self, stored: Sequence[StoredActivation]) -> None:
        """Release the device memory of storages whose copies are posted. The current stream waits,
        the host does not.

        Later work of the stream may reuse the memory.
        """
        for saved in stored:
            if saved.host is not None:
                if saved.copied is not None and saved.device is not None:
                    torch.cuda.current_stream(self._device).wait_event(saved.copied)
                saved.release()

    def post_in(self, stored: Sequence[StoredActivation]) -> None:
        """Post the copies back of those storages that are on the host alone.
        Does not block with CUDA.
        """
        returning = [saved for saved in stored if saved.device is None and saved.host is not None]
        if not returning:
            return
        for saved in returning:
            assert saved.host is not None
            saved.device = torch.empty_like(saved.host, device=self._device)
        with self._on(self._in):
            for saved in returning:
                assert saved.device is not None and saved.host is not None
                if self._in is not None:
                    self._in.wait_event(saved.copied)
                saved.device.copy_(saved.host, non_blocking=self._in is not None)
            arrived = _recorded(self._in)
        for saved in returning:
            saved.arrived = arrived

    def finish_in(self, stored: Sequence[StoredActivation]) -> None:
        """Make the current stream wait until the storages are on the device.
        The host does not wait.
        """
        for saved in stored:
            if saved.arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(saved.arrived)
                saved.arrived = None

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Enter ``stream``, after it waits for the current stream's work so far; None:
        stay on the current stream.
        """
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def _host_block(self, num_bytes: int) -> HostBlock:
        """Return host memory of at least ``num_bytes``, uint8. With a CUDA device it is pinned,
        and a power of two.

        NOTE [own blocks]: a block is free when autograd has released its tensors. By then the
        compute stream has waited for their copies back, and each new copy begins after that
        stream's work: no event has to be polled. Powers of two are the size classes of torch's
        cache of pinned memory, which takes no fewer bytes for a smaller request. The sizes of
        exchanged tokens vary, so blocks of exact sizes would seldom be reused. Free blocks stay
        here: torch's cache would keep their memory as well.
        """
        pins = self._out is not None
        size = 1 << (num_bytes - 1).bit_length() if pins else num_bytes
        free = self._free.setdefault(size, [])
        if free:
            memory = free.pop()
        else:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
            self.on_allocate(memory)
        return HostBlock(memory, self._give_back)

    def _give_back(self, memory: Tensor) -> None:
        if self._out is not None:
            self._free[memory.numel()].append(memory)


def _recorded(stream: Any) -> Any:
    return None if stream is None else stream.record_event()
