"""Base class of optimizers that step one flat parameter after the other, in pieces that bound temporary memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import device_kind

TOGETHER = {"cpu": 2**20, "cuda": 2**26}
"""Elements updated at a time, by device: few fit into a CPU's cache; on CUDA each piece costs some kernel launches."""


def pieces_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same elements of tensors (numel,), :data:`TOGETHER` at a time."""
    size = TOGETHER.get(device_kind(tensors[0]), TOGETHER["cpu"])
    yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


class ParameterwiseOptimizer(torch.optim.Optimizer):
    """Base class of optimizers without a fused kernel: one parameter is stepped after the other."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. The gradient may be overwritten."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    @abstractmethod
    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter (numel,) of a group in place."""
