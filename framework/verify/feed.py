"""What the layouts are compared on: the run's own corpus or random tokens, with labels ignored unevenly on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from framework.build import Source
from framework.pipeline.stage import IGNORED_LABEL
from framework.seeding import derive


class VerifyFeed(NamedTuple):
    """Samples by global index; sample i ignores its first ``i * 7 mod (S/2)`` labels, so that samples count unevenly.

    A loss averaged per micro-batch, or divided by the number of micro-batches, then differs from the mean over tokens.
    """

    sample: Callable[[int], tuple[Tensor, Tensor]]

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Micro-batch m of a replica, as :class:`framework.data.samples.Feed` numbers them."""
        first = samples_seen + (dp_rank * chunks + m) * micro_batch_size
        indices = list(range(first, first + micro_batch_size))
        rows = [self.sample(index) for index in indices]
        labels = torch.stack([row[1] for row in rows])
        for row, index in enumerate(indices):
            labels[row, : index * 7 % max(1, labels.shape[1] // 2)] = IGNORED_LABEL
        return torch.stack([row[0] for row in rows]), labels, torch.tensor(indices)


def random_sample(seed: int, vocab_size: int, sequence_length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Token ids drawn for (seed, sample): a corpus that needs no file."""

    def sample(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive(seed, "verify tokens", index))
        window = torch.randint(vocab_size, (sequence_length + 1,), generator=generator)
        return window[:-1], window[1:].clone()

    return sample


def corpus_sample(feed: Source, sequence_length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The run's own samples, in its own order."""

    def sample(index: int) -> tuple[Tensor, Tensor]:
        tokens, labels, _ = feed.microbatch(index, 0, 1, 1, 1, 0)
        return tokens[0, :sequence_length], labels[0, :sequence_length]

    return sample
