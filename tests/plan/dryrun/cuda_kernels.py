"""A GPT whose blocks, and whose optimizer, have to take this project's kernels on CUDA."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.codecs import NUMBERS
from meshwright_models import gpt2
from meshwright_models.blocks import Block, SideTensors, Value


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of operators of one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().partition(".")[0] == self.name
        return func(*args, **(kwargs or {}))

    def check(self, expected: int) -> None:
        """Raise where the operator ran another number of times."""
        if self.count != expected:
            raise RuntimeError(f"{self.name} ran {self.count} times, not {expected}")


class CountingBlock(Block):
    """Block that counts its dropout kernels."""

    dropouts = 0

    def forward(self, value: Value) -> Value:
        with Operators("meshwright::dropout") as seen:
            found = super().forward(value)
        if SideTensors(value).x.is_cuda:
            seen.check(self.dropouts)
        return found


def build(dropouts: int) -> nn.Sequential:
    """Build a block. ``dropouts``: kernels in its forward."""
    model = gpt2.build(
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        max_sequence_length=16,
        dropout=0.1,
    )
    CountingBlock.dropouts = dropouts
    model[1].__class__ = CountingBlock
    plain = FlatAdamW.step

    def step(self: FlatAdamW, closure: None = None) -> None:
        narrow = sum(
            len(group["params"]) for group in self.param_groups if group["codec"] is not NUMBERS
        )
        with Operators("meshwright::adamw_8bit") as seen:
            plain(self)
        if any(parameter.is_cuda for group in self.param_groups for parameter in group["params"]):
            seen.check(narrow or 1)

    FlatAdamW.step = step  # type: ignore[method-assign]
    return model
