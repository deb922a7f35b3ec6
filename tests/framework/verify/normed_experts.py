"""A mixture of experts whose input is normalised over all tokens of a micro-batch,
with running statistics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright_models import llama
from meshwright_models.experts import MoE


class TokenNorm(nn.Module):
    """BatchNorm of each feature over samples and tokens, (B, S, D) -> (B, S, D)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return found


def build(**options: Any) -> nn.Sequential:
    """Llama with such norms before its experts."""
    model = llama.build(**options)
    for block in model.children():
        if isinstance(getattr(block, "mlp", None), MoE):
            block.mlp_norm = TokenNorm(options["hidden_size"])
    return model
