"""Samples for the comparison: the run's own corpus or random tokens,
with unevenly ignored labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.context_parallel.cut import STARTS
from meshwright.data.sources import Source, span_corruption_sampler
from meshwright.data.work import keys_seen
from meshwright.pipeline.values import IGNORED_LABEL
from meshwright.seeding import derive


class VerifySource(NamedTuple):
    """Samples by global index; sample i ignores its first ``7 i mod m`` labels,
    m being S/2 or the next odd number.

    The number of labels that count therefore differs between samples and, since m is odd, between
    two or four replicas. A loss averaged per micro-batch, or per replica, then differs from the
    mean over labels. With ``ends`` some of the last labels are ignored too: trimmed rows leave them
    out, and their tokens are no padding. Of samples with one label each, three in eight are ignored:
    1, 1, 0 and 1 among four replicas of two. Labels that are not integers all count.
    """

    sample: Callable[[int], tuple[Any, Tensor]]
    ends: bool = False

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of these sample indices,
        with some labels of each set to IGNORED_LABEL.
        """
        rows = [self.sample(index) for index in indices]
        labels = torch.stack([row[1] for row in rows])
        for row, index in enumerate(indices):
            if labels.dtype != torch.int64:
                continue
            if labels.dim() > 1:
                length = labels.shape[1]
                labels[row, : index * 7 % (max(1, length // 2) | 1)] = IGNORED_LABEL
                if self.ends:
                    labels[row, length - index * 5 % (length | 1) :] = IGNORED_LABEL
            elif index % 8 in (1, 2, 7):
                labels[row] = IGNORED_LABEL
        return default_collate([row[0] for row in rows]), labels

    def work(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the keys that the queries of these samples see, (B,)."""
        found = []
        for index in indices:
            starts = self.sample(index)[0][STARTS]
            places = [*starts.nonzero().flatten().tolist(), len(starts)]
            found.append(keys_seen(b - a for a, b in itertools.pairwise(places)))
        return np.array(found, dtype=np.int64)


def random_sample(
    seed: int, vocab_size: int, sequence_length: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a sampler of token ids drawn by (seed, sample index), without a file: (S,)
    inputs and (S,) labels.

    The first quarter of a sample is one token, as in padding. Without absolute positions its states
    are equal in exact arithmetic, so that rounding would choose between them wherever a layer
    chooses tokens.
    """

    def sample(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive(seed, "verify tokens", index))
        window = torch.randint(vocab_size, (sequence_length + 1,), generator=generator)
        window[: sequence_length // 4] = window[0]
        return window[:-1], window[1:].clone()

    return sample


def random_documents(
    seed: int, vocab_size: int, sequence_length: int
) -> Callable[[int], tuple[Any, Tensor]]:
    """Return a sampler like :func:`random_sample` with several documents per sample,
    for document boundaries.

    All documents of a sample begin with the same token, whose states are equal too.
    """
    window = random_sample(seed, vocab_size, sequence_length)

    def sample(index: int) -> tuple[Any, Tensor]:
        tokens, labels = window(index)
        generator = torch.Generator().manual_seed(derive(seed, "verify documents", index))
        starts = torch.rand(sequence_length, generator=generator) < 4 / sequence_length
        starts[0] = True
        tokens = tokens.masked_fill(starts, int(tokens[0]))
        labels[:-1][starts[1:]] = IGNORED_LABEL
        return {"tokens": tokens, "starts": starts}, labels

    return sample


def random_corruption(
    seed: int, vocab_size: int, sequence_length: int
) -> Callable[[int], tuple[Any, Tensor]]:
    """Return a sampler like :func:`random_sample` with span corruption,
    for encoder-decoder models.
    """
    return span_corruption_sampler(partial(random_sample, seed), seed, vocab_size, sequence_length)


def own_sample(source: Source) -> Callable[[int], tuple[Any, Tensor]]:
    """Return a sampler of the run's own samples, by index in the run's order."""

    def sample(index: int) -> tuple[Any, Tensor]:
        inputs, labels = source.read([index])
        return tree_map(lambda leaf: leaf[0], inputs), labels[0]

    return sample
