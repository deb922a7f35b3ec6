"""Cross-entropy of the reference in plain torch,
with its options and the heads of multi-token prediction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.metrics import record
from meshwright.pipeline.values import IGNORED_LABEL


def plain_loss(
    layers: nn.Sequential, output: Tensor | tuple[Tensor, ...], labels: Tensor, *, training: bool
) -> Tensor:
    """Return the loss summed over the labels that count. In eval mode only head 0 counts,
    without z-loss or smoothing.

    ``output``: logits (..., V) for labels (...); with ``loss_heads`` a tuple of logits (B, S, V)
        for labels (B, S).
    """
    if isinstance(output, Tensor):
        return _cross_entropy(layers, output, labels, training)
    total = torch.zeros((), dtype=torch.float64)
    for head, (logits, (shift, weight)) in enumerate(zip(output, layers.loss_heads, strict=True)):  # type: ignore[arg-type]
        mine = shifted(labels, shift)
        loss_sum = _cross_entropy(layers, logits, mine, training)
        record(f"head_loss/{head}", loss_sum.detach(), (mine != IGNORED_LABEL).sum())
        total = total + loss_sum * (weight if training else float(head == 0))
    return total


def shifted(labels: Tensor, shift: int) -> Tensor:
    """Return the labels (B, S) of a head that predicts ``shift`` tokens further ahead;
    a plain loop over positions.
    """
    found = torch.full_like(labels, IGNORED_LABEL)
    for sample, position in (labels != IGNORED_LABEL).nonzero().tolist():
        ahead = labels[sample, position : position + shift + 1]
        if len(ahead) == shift + 1 and bool((ahead != IGNORED_LABEL).all()):
            found[sample, position] = ahead[-1]
    return found


def _cross_entropy(layers: nn.Sequential, output: Tensor, labels: Tensor, training: bool) -> Tensor:
    """Return the cross-entropy of logits (..., V), summed over the labels (...) that count."""
    logits = output if output.dtype == torch.float64 else output.float()
    smoothing, z_loss = (
        getattr(layers, name, 0.0) if training else 0.0 for name in ("label_smoothing", "z_loss")
    )
    rows, targets = logits.flatten(0, -2), labels.flatten()
    total = F.cross_entropy(
        rows, targets, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=smoothing
    )
    if z_loss:
        total = total + z_loss * rows[targets != IGNORED_LABEL].logsumexp(-1).square().sum()
    return total
