"""Feed-forward networks and their activations. Shapes: B samples, S tokens, D hidden,
F ffn size (F/tp under tp).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]
"""Function of each element: keeps the shape."""

gelu_tanh = partial(F.gelu, approximate="tanh")
"""GELU's tanh approximation, as in GPT-2."""


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2 of each element (So et al. 2021, "Primer"). x: any shape."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "silu": F.silu,
}


class Mlp(nn.Module):
    """Feed-forward down(activation(up(x))), (B, S, D) -> (B, S, D)."""

    def __init__(
        self, hidden_size: int, ffn_size: int, *, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMlp(nn.Module):
    """Gated feed-forward down(activation(gate(x)) * up(x)), (B, S, D) -> (B, S, D) (Shazeer 2020).

    SwiGLU with silu, GEGLU with a GELU. Gate and up are one projection. Its rows are ordered in
    blocks, so that a contiguous run of blocks contains each gate row with its up row::

        | gate 0 .. f-1 | up 0 .. f-1 | gate f .. 2f-1 | up f .. 2f-1 | ...        f = block_size

    Blocks instead of single pairs keep elements contiguous in memory for vector units.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_blocks: int,
        *,
        activation: Activation,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.block_size = ffn_size // num_blocks
        self.activation = activation
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=bias)
        self.fused_rows = {"gate_up": (self.block_size, self.block_size)}
        self.shared_units = {"gate_up": (self.fused_rows["gate_up"], 0, "block_size")}

    def forward(self, x: Tensor) -> Tensor:
        gate, up = rearrange(
            self.gate_up(x), "b s (n two f) -> two b s n f", two=2, f=self.block_size
        )
        return self.down(rearrange(self.activation(gate) * up, "b s n f -> b s (n f)"))
