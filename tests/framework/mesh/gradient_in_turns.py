"""A forward that takes a gradient, in turns with a backward, on the stub CUDA device:
a process of its own.

``python -m tests.framework.mesh.gradient_in_turns LIBRARY`` prints the order. If it blocks, it ends
with the stacks.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

from tests.support.cuda.library import load_library

if __name__ == "__main__":
    load_library(Path(sys.argv[1]))  # before torch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.mesh.turns import Turns
from meshwright.system.process import leave

LIMIT_S = 30.0
"""For a few operations, on a busy machine."""

turns, mode = Turns(), FakeTensorMode(allow_non_fake_inputs=True)


class Exchange(torch.autograd.Function):
    """An exchange that posts its message and ends the turn, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        turns.pause()
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        print("backward pauses", flush=True)
        turns.pause()
        print("backward goes on", flush=True)
        return gradient * 1


def main() -> None:
    """Run the forward and the backward in turns."""
    with mode:
        x, w = (torch.ones(2, 2, device="cuda", requires_grad=True) for _ in range(2))
        loss = Exchange.apply(w * 3).sum()  # type: ignore[no-untyped-call]

    def forward() -> None:
        with mode:
            h = Exchange.apply(x * 2)  # type: ignore[no-untyped-call]
            torch.autograd.grad(h.tanh().sum(), h, create_graph=True)
            print("forward has its gradient", flush=True)

    def backward() -> None:
        with mode:
            loss.backward()

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    turns.run(forward, backward, lambda: lambda: None)
    assert w.grad is not None


if __name__ == "__main__":
    main()
    # autograd's thread may still be freeing tensors: at interpreter shutdown it would abort
    leave(0)
