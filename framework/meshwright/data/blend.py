"""Blend of several corpora."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from os.path import realpath

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus import Corpus, CorpusExample


class Blend:
    """Several corpora with consecutive sample numbers.
    It has the interface of :class:`Corpus` that sources use.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float] = ()) -> None:
        """Blend ``corpora``; ``weights``: relative shares of the samples drawn from each;
        none with data stages.
        """
        self.corpora = tuple(corpora)
        self.weights = tuple(weights)
        unique = list(dict.fromkeys(realpath(corpus.prefix) for corpus in corpora))
        self._kinds = [unique.index(realpath(corpus.prefix)) for corpus in corpora]
        """Position of each corpus among those with different paths."""
        self.ends = np.cumsum([corpus.num_samples for corpus in corpora]).tolist()
        self.num_samples: int = self.ends[-1]
        self.sequence_length = corpora[0].sequence_length
        self.vocab_size = corpora[0].vocab_size
        self.document_boundaries = corpora[0].document_boundaries

    def open(self) -> None:
        """Open all corpora."""
        for corpus in self.corpora:
            corpus.open()

    def example(self, number: int) -> CorpusExample:
        """Return sample ``number``, counted over all corpora."""
        corpus, local = self._locate(number)
        return corpus.example(local)

    def document_lengths(self, number: int) -> list[int]:
        """Return the lengths of the documents in sample ``number``, counted over all corpora."""
        corpus, local = self._locate(number)
        return corpus.document_lengths(local)

    def kind(self, number: int) -> int:
        """Return the corpus of sample ``number``, as a position among those with different
        paths.
        """
        return self._kinds[bisect_left(self.ends, number + 1)]

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return window ``number``, counted over all corpora: (S + 1,) token ids."""
        corpus, local = self._locate(number)
        return corpus.sample(local)

    def _locate(self, number: int) -> tuple[Corpus, int]:
        """Return the corpus of a sample, and the sample's number in it."""
        at = bisect_left(self.ends, number + 1)
        return self.corpora[at], number - (self.ends[at - 1] if at else 0)
