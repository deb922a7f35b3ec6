"""Messages of ranks that share a GPU, through host memory: gloo sends no CUDA tensors, NCCL wants a GPU per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Transfer(NamedTuple):
    """One tensor to send to or receive from a neighbour in the group."""

    tensor: Tensor
    peer: int
    """Position of the peer in the group, not its global rank."""
    sends: bool


def through_host(transfers: Sequence[Transfer]) -> tuple[list[Transfer], Callable[[], None]]:
    """Return the transfers on host tensors, and a function that copies what has arrived to the device.

    Blocks until the device has computed what is sent.
    """
    staged = [
        Transfer(_host_copy(tensor) if sends else torch.empty(tensor.shape, dtype=tensor.dtype), peer, sends)
        for tensor, peer, sends in transfers
    ]

    def copy_in() -> None:
        for given, host in zip(transfers, staged, strict=True):
            if not given.sends:
                given.tensor.copy_(host.tensor)

    return staged, copy_in


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
