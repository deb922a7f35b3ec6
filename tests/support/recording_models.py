"""Models that record metrics: ``meshwright.record`` from their layers and from their loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import meshwright

D = 8


class Block(nn.Module):
    """Residual MLP that records the share of inactive units, split over tp,
    and the norm of its output.
    """

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        meshwright.record("inactive_share", (h < 0).sum(), h.numel())
        x = x + self.down(h)
        meshwright.record(
            "norm", x.norm(dim=-1).sum(), x[..., 0].numel() if self.counts == "tokens" else 1
        )
        return x


class EvalOnly(nn.Module):
    """Layer that records in eval mode only: the forward on meta, in training mode,
    does not find its metric.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            meshwright.record("late", x.sum(), x.numel())
        return x


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label, (B, S); record the accuracy of the next token."""
    counted = labels != -100
    meshwright.record("accuracy", ((logits.argmax(-1) == labels) & counted).sum(), counted.sum())
    meshwright.record("logit", logits.square().sum(), logits.numel())
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(
        labels.shape
    )


def build(
    vocab_size: int, counts: str = "tokens", own_loss: bool = True, late: bool = False
) -> nn.Sequential:
    """Build embedding, four blocks, head. ``counts`` = "microbatches":
    the norm depends on the micro-batch size.
    """
    layers = nn.Sequential()
    layers.add_module("embedding", nn.Embedding(vocab_size, D))
    for index in range(4):
        layers.add_module(f"block{index}", Block(counts))
    if late:
        layers.add_module("late", EvalOnly())
    layers.add_module("head", nn.Linear(D, vocab_size))
    layers.sharding_plan = {"embedding": "vocab", "*.up": "column", "*.down": "row"}
    if own_loss:
        layers.loss = loss
    else:
        layers.sharding_plan |= {"head": "vocab"}
    return layers
