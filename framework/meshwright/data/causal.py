"""Causal language modelling over a corpus: token ids in, the next token as the label.

B samples of S tokens each. Every rank that reads the same indices reads the same samples from the
same files (pread), so no tokens go over the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.blend import Blend
from meshwright.data.corpus import IGNORE, Corpus
from meshwright.data.work import keys_seen


class CorpusSource(NamedTuple):
    """Source of a causal language model: a corpus, and the order in which a run reads it."""

    corpus: Corpus | Blend
    order: Callable[[int], int | None]
    """Maps a sample index of the run to a sample number; None past the end.
    See :mod:`meshwright.data.order`.
    """

    @property
    def num_samples(self) -> int:
        """Samples of the corpus."""
        return self.corpus.num_samples

    def work(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the keys that the queries of these samples see, (B,); 0 past the end."""
        numbers = [self.order(index) for index in indices]
        seen = [
            0 if number is None else keys_seen(self.corpus.document_lengths(number))
            for number in numbers
        ]
        return np.array(seen, dtype=np.int64)

    def corpora_of(self, indices: Sequence[int]) -> list[int]:
        """Return the corpus of each sample, see :data:`meshwright.data.mixture_losses.CorporaOf`."""
        if not isinstance(self.corpus, Blend):
            return []
        numbers = [self.order(index) for index in indices]
        return [0 if number is None else self.corpus.kind(number) for number in numbers]

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (token ids (B, S) int64, labels (B, S) int64) of these sample indices of the run.

        A label is the next token, or IGNORE. Past the end of a corpus that is read once, rows have
        IGNORE labels and zero tokens. With document boundaries the inputs are {"tokens": (B, S)
        int64, "starts": (B, S) bool}.
        """
        shape = len(indices), self.corpus.sequence_length
        tokens = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.bool_)
        starts[:, 0] = True
        for row, index in enumerate(indices):
            number = self.order(index)
            if number is not None:
                tokens[row], labels[row], starts[row] = self.corpus.example(number)
        inputs: Any = torch.from_numpy(tokens)
        if self.corpus.document_boundaries:
            inputs = {"tokens": inputs, "starts": torch.from_numpy(starts)}
        return inputs, torch.from_numpy(labels)
