"""From a corpus to the micro-batches of a step.

The samples of a step are the global indices samples_seen + i, i in [0, global_batch). Replica dp_rank computes in its
micro-batch m those from samples_seen + (dp_rank x chunks + m) x micro_batch_size on: the step as a whole is the same
run of indices in every layout, and the one number to remember for resuming is samples_seen.

Shapes: b samples of a micro-batch, S tokens of a sequence. Nothing here is split over tp or pp: every rank that asks
gets the same answer from the same memory-mapped file, so no tokens go over the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.data.corpus import IGNORE, Blend, Corpus


class Microbatch(NamedTuple):
    """What one forward pass takes in, on the CPU."""

    inputs: Any  # (b, S) int64 token ids; of other feeds a tensor or a tree of tensors, each (b, ...)
    labels: Tensor  # (b, S) int64: the next token, or IGNORE
    sample_indices: Tensor  # (b,) int64, global: the position in the run, not in the corpus; seeds dropout


class Feed(NamedTuple):
    """A corpus and the order in which a run goes through it."""

    corpus: Corpus | Blend
    order: Callable[[int], int | None]
    """Global index -> sample number, None past the end: one of :mod:`meshwright.data.order`."""

    @property
    def num_samples(self) -> int:
        """Of the corpus."""
        return self.corpus.num_samples

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> Microbatch:
        """Micro-batch ``m`` in [0, chunks) of replica ``dp_rank`` in the step that starts at ``samples_seen``.

        Past the end of a corpus that is read once, rows have only IGNORE labels (and tokens 0): they count for nothing.
        With document boundaries the inputs are {"tokens": (b, S) int64, "starts": (b, S) bool}.
        """
        assert 0 <= dp_rank < dp and 0 <= m < chunks, (dp_rank, dp, m, chunks)
        first = samples_seen + (dp_rank * chunks + m) * micro_batch_size
        length = self.corpus.sequence_length
        tokens = np.zeros((micro_batch_size, length), dtype=np.int64)
        labels = np.full((micro_batch_size, length), IGNORE, dtype=np.int64)
        starts = np.zeros((micro_batch_size, length), dtype=np.bool_)
        starts[:, 0] = True
        for row in range(micro_batch_size):
            number = self.order(first + row)
            if number is not None:
                tokens[row], labels[row], starts[row] = self.corpus.example(number)
        inputs: Any = torch.from_numpy(tokens)
        if self.corpus.document_boundaries:
            inputs = {"tokens": inputs, "starts": torch.from_numpy(starts)}
        return Microbatch(
            inputs=inputs,
            labels=torch.from_numpy(labels),
            sample_indices=torch.arange(first, first + micro_batch_size, dtype=torch.int64),
        )


def validation_steps(num_samples: int, global_batch: int, at_most: int) -> int:
    """Global batches until every sample was seen once, or ``at_most``; at least 1."""
    return min(at_most, -(-num_samples // global_batch))
