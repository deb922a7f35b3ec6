"""Lengths of a corpus' documents, and the balance of context-parallel ranks
that its samples give.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.context_parallel.balance import mean_imbalance
from meshwright.context_parallel.order import ORDERS
from meshwright.data.corpus import Corpus
from meshwright.data.token_files import Documents
from meshwright.errors import DataError

MAX_BLOCKS, BLOCK = 64, 1 << 14
"""Number of blocks whose document lengths are read, and documents per block;
a smaller corpus is read whole.
"""
MAX_SAMPLES = 32
"""Samples, spread over the corpus, whose balance is computed."""


class ContextReport(NamedTuple):
    """Context parallelism whose balance is reported."""

    cp: int = 1
    order: str | None = None
    """One order of tokens over ranks; None: each order."""
    boundaries: bool = True
    """False: attention crosses the ends of documents, so that a sample counts as one."""


def document_lengths(documents: Documents) -> NDArray[np.int64]:
    """Return the tokens of each document, or of the documents
    in ``MAX_BLOCKS`` blocks spread over a large corpus.
    """
    if len(documents) <= MAX_BLOCKS * BLOCK:
        return np.diff(documents.all_starts())
    firsts = np.linspace(0, len(documents) - BLOCK - 1, MAX_BLOCKS, dtype=np.int64)
    return np.concatenate(
        [np.diff(documents.starts_from(int(first), BLOCK + 1)) for first in firsts]
    )


def describe_lengths(documents: Documents, sequence_length: int) -> str:
    """Describe the distribution of document lengths in one line."""
    lengths = document_lengths(documents)
    low, median, high = (
        int(value) for value in np.percentile(lengths, (10, 50, 90), method="lower")
    )
    part = "" if len(lengths) == len(documents) else f", of {len(lengths):,} documents"
    longer = lengths > sequence_length
    text = (
        f"tokens of a document{part}: {lengths.min():,} to {lengths.max():,}, 10 % {low:,}, median"
        f" {median:,}, "
    )
    text += f"90 % {high:,}"
    if not longer.any():
        return f"{text}; none is longer than a sample"
    share = lengths[longer].sum() / lengths.sum()
    return f"{text}; {longer.sum():,} longer than a sample, with {share:.1%} of the tokens"


def describe_balance(corpus: Corpus, of: ContextReport) -> list[str]:
    """Describe the imbalance of attention keys over ``of.cp`` ranks in some samples: one line;
    none with cp = 1.

    Raises:
        DataError: the samples cannot be cut into cp equal parts.
    """
    length, cp = corpus.sequence_length, of.cp
    if cp == 1:
        return []
    if length % cp:
        nearest = " or ".join(
            str(near) for near in (length // cp * cp, (length // cp + 1) * cp) if near
        )
        raise DataError(
            "MW-DATA-120",
            f"samples of {length:,} tokens cannot be cut into cp = {cp} equal parts: use a length"
            f" of {nearest}, or another cp",
        )
    numbers = np.unique(np.linspace(0, corpus.num_samples - 1, MAX_SAMPLES, dtype=np.int64))
    samples = [corpus.example(int(number)).starts for number in numbers]
    if not of.boundaries:
        samples = [np.zeros(length, dtype=np.bool_)]
    orders = tuple(ORDERS) if of.order is None else (of.order,)
    uneven = ", ".join(f"{mean_imbalance(order, cp, samples):.1%} {order}" for order in orders)
    within = "over whole samples"
    if of.boundaries:
        within = f"within documents, {len(samples):,} samples"
    return [f"cp = {cp}, {within}: the busiest rank sees more keys than the mean by {uneven}"]
