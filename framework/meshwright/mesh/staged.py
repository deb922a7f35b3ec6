"""Messages through host memory for ranks that share a GPU: gloo sends no CUDA tensors,
NCCL needs a GPU per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Transfer(NamedTuple):
    """One tensor to send to or receive from a neighbour in the group."""

    tensor: Tensor
    peer: int
    """Position of the peer in the group, not its global rank."""
    sends: bool


def through_host(
    tensors: Sequence[Tensor], sends: bool
) -> tuple[list[Tensor], Callable[[], None] | None]:
    """Return host tensors in place of these, and for a receive the function that copies them
    to the device on arrival.

    A send blocks until the device has computed the tensors.
    """
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    if sends:
        _copy(hosts, tensors)
        return hosts, None
    return hosts, partial(_copy, tensors, hosts)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
