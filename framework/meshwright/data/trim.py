"""Trimmed micro-batches (``batch.padding = "trim"``): rows without the end that no label counts in.

    labels   7 3 9 . .      B = 2 rows of S = 5, . IGNORE
             4 . 2 2 .      -> length 4 of both rows, rounded up to the multiple, at most S

In a causal model no counted position sees a later one, so the loss and the gradients are those of
whole rows. The length is a pure function of the samples: every rank of a replica reads them, and
computes it without a message.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.data.corpus import IGNORE
from meshwright.errors import DataError

SMALLEST = 8
"""Smallest multiple of lengths, for tensor cores."""
MOST_LENGTHS = 32
"""Number of different lengths at most: a kernel that is compiled for a length, and the blocks of an
allocator, are few then.
"""


def length_multiple(sequence_length: int, parts: int) -> int:
    """Return the number whose multiples are lengths of trimmed rows.

    ``parts``: ranks over which sequence parallelism cuts the tokens.
    """
    least = math.ceil(sequence_length / MOST_LENGTHS / SMALLEST) * SMALLEST
    return math.lcm(least, parts)


def trimmed_length(labels: Tensor, multiple: int) -> int:
    """Return the length of trimmed rows: labels (B, S) -> up to the last one that counts in any row,
    rounded up to the multiple, at most S.
    """
    counting = (labels != IGNORE).any(0).nonzero()
    used = int(counting[-1]) + 1 if len(counting) else 1
    return min(labels.shape[1], math.ceil(used / multiple) * multiple)


def trim(samples: tuple[Any, Tensor], length: int) -> tuple[Any, Tensor]:
    """Cut inputs and labels, each (B, S), to (B, length)."""
    inputs, labels = samples
    return tree_map(lambda leaf: leaf[:, :length].contiguous(), inputs), labels[:, :length]


def check_rows(inputs: Any, labels: Tensor, name: str) -> None:
    """Check that samples are rows of tokens, each input (B, S) like the labels.

    Raises:
        DataError: an input has another shape, or labels are no integers.
    """
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(inputs)]
    integers = not labels.is_floating_point() and labels.dim() == 2
    if integers and all(shape == tuple(labels.shape) for shape in shapes):
        return
    raise DataError(
        "MW-DATA-141",
        f'batch.padding = "trim" cuts rows of tokens, and the samples of {name} are inputs'
        f" {' '.join(map(str, shapes))} with labels {tuple(labels.shape)}: return token ids and other"
        ' inputs (S,) like the labels, or set batch.padding = "keep"',
    )
