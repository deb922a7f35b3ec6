"""Checksums of the samples that a run reads, which must be the same in every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def checksum(inputs: Any, labels: Tensor) -> int:
    """Return a checksum of one sample's inputs and labels, on CPU,
    sensitive to every value and to their order.
    """
    parts = [leaf.reshape(-1).contiguous() for leaf in (*tree_leaves(inputs), labels)]
    whole = [
        p.double().view(torch.int64) if p.is_floating_point() else p.to(torch.int64) for p in parts
    ]
    both = torch.cat(whole)
    return int((both * torch.arange(1, both.numel() + 1) * 2654435761).sum())


def checksums(batch: list[tuple[Any, Tensor, Tensor]]) -> dict[int, int]:
    """Return global sample index -> checksum of the sample."""
    return {
        index: checksum(tree_map(lambda leaf, row=row: leaf[row], inputs), labels[row])
        for inputs, labels, indices in batch
        for row, index in enumerate(indices.tolist())
    }
