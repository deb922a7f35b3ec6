"""From a corpus to the micro-batches of a step.

A corpus is one stream of tokens: documents one after the other, each closed by its end-of-document token. Sample k is a
window over it that crosses document ends; its last token, here only a label, is the next one's first:

    stream    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ...        S = 4
    sample 0  t0 t1 t2 t3   t4                          tokens t0..t3, labels t1..t4
    sample 1                t4 t5 t6 t7   t8            tokens t4..t7, labels t5..t8

The samples of a step are the global indices samples_seen + i, i in [0, global_batch). Replica dp_rank computes in its
micro-batch m those from samples_seen + (dp_rank x chunks + m) x micro_batch_size on: the step as a whole is the same
run of indices in every layout, and the one number to remember for resuming is samples_seen.

Shapes: b samples of a micro-batch, S tokens of a sequence. Nothing here is split over tp or pp: every rank that asks
gets the same answer from the same memory-mapped file, so no tokens go over the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from framework.data import fingerprint as fingerprints
from framework.data.fingerprint import Entropy, Split
from framework.data.indexed import TokenStream, inspect
from framework.errors import DataError

IGNORE = -100
"""A label that counts for nothing: neither in the loss nor in the number of tokens it is divided by."""
_TOKENS_AT_ONCE = 1 << 22
_SCAN_TOKENS = 1 << 26
"""Without a fingerprint, up to this many tokens (a tenth of a second) are read once to know the largest id up front."""


class Microbatch(NamedTuple):
    """What one forward pass takes in, on the CPU."""

    inputs: Any  # (b, S) int64 token ids; of other feeds a tensor or a tree of tensors, each (b, ...)
    labels: Tensor  # (b, S) int64: the next token, or IGNORE
    sample_indices: Tensor  # (b,) int64, global: the position in the run, not in the corpus; seeds dropout


class Corpus:
    """A ``.bin/.idx`` pair as numbered samples. Raises :class:`DataError` for whatever is wrong with it.

    ``vocab_size``: the model's; None: any id will do. ``eod_id``: the end-of-document token; None: the fingerprint's.
    ``eod_mask_loss``: labels that follow an end-of-document token, the unguessable beginnings, become IGNORE.
    ``num_sentinels``: the last ids of the vocabulary are something else, and no text may use them.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        vocab_size: int | None = None,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        num_sentinels: int = 0,
    ) -> None:
        """Check everything that can be checked before a rank starts; with a fingerprint no token is read for it."""
        self.prefix = Path(prefix)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_sentinels = num_sentinels
        self.text_ids = None if vocab_size is None else vocab_size - num_sentinels
        """Text may use the ids below."""
        self.stream = TokenStream(inspect(self.prefix))
        num_tokens = len(self.stream)
        self.num_samples = (num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise DataError(
                f"the corpus {self.prefix} has {num_tokens:,} tokens, less than one sample: a sequence of "
                f"{sequence_length:,} needs {sequence_length + 1:,}. Lower data.sequence_length or prepare more text"
            )
        self.known = _known(self.prefix, num_tokens)
        self.eod_id = self.known.end_of_document_id if eod_id is None and self.known else eod_id
        self.eod_mask_loss = eod_mask_loss
        if eod_mask_loss and self.eod_id is None:
            raise DataError(
                f"data.eod_mask_loss needs the id of the end-of-document token, and nothing beside {self.prefix} tells "
                f"it: set data.tokenizer to the tokenizer.json that made the corpus, or eod_mask_loss = false"
            )
        self._check_largest_id()

    def sample(self, number: int) -> NDArray[np.int64]:
        """Window ``number``: (S + 1,) token ids, checked against the vocabulary."""
        assert 0 <= number < self.num_samples, (number, self.num_samples)
        window = self.stream.read(number * self.sequence_length, self.sequence_length + 1)
        lowest, highest = int(window.min()), int(window.max())
        if lowest < 0 or (self.text_ids is not None and highest >= self.text_ids):
            where = f"in sample {number} (tokens from {number * self.sequence_length:,} on)"
            self._raise_outside(lowest if lowest < 0 else highest, where)
        return window

    def _check_largest_id(self) -> None:
        if self.text_ids is None:
            return
        if self.known:
            if self.known.split.max_token_id >= self.text_ids:
                self._raise_outside(self.known.split.max_token_id, f"according to its {fingerprints.FILE_NAME}")
            return
        if len(self.stream) <= _SCAN_TOKENS:
            for start in range(0, len(self.stream), _TOKENS_AT_ONCE):
                block = self.stream.read(start, min(_TOKENS_AT_ONCE, len(self.stream) - start))
                outside = np.flatnonzero((block < 0) | (block >= self.text_ids))
                if outside.size:
                    at = start + int(outside[0])
                    where = f"in sample {at // self.sequence_length} (token {at:,})"
                    self._raise_outside(int(block[outside[0]]), where)

    def _raise_outside(self, token_id: int, where: str) -> None:
        if token_id < 0:
            raise DataError(f"the corpus {self.prefix} holds the token id {token_id:,} {where}: prepare it again")
        assert self.vocab_size is not None and self.text_ids is not None
        for_text = f"ids 0 to {self.vocab_size - 1:,}"
        if self.num_sentinels:
            for_text = f"of which the last {self.num_sentinels:,} are sentinels, so that text may use ids below "
            for_text += f"{max(self.text_ids, 0):,}"
        raise DataError(
            f"the corpus {self.prefix} holds token id {token_id:,} {where}, the model's vocabulary has "
            f"{self.vocab_size:,} ({for_text}): set the model's vocab_size to "
            f"{token_id + 1 + self.num_sentinels:,} or more, or prepare the corpus with the tokenizer that belongs to "
            f"the model"
        )


class Feed(NamedTuple):
    """A corpus and the order in which a run goes through it."""

    corpus: Corpus
    order: Callable[[int], int | None]
    """Global index -> sample number, None past the end: ``order.SampleOrder`` or ``order.OnceInOrder``."""

    @property
    def num_samples(self) -> int:
        """Of the corpus."""
        return self.corpus.num_samples

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> Microbatch:
        """Micro-batch ``m`` in [0, chunks) of replica ``dp_rank`` in the step that starts at ``samples_seen``.

        Past the end of a corpus that is read once, rows have only IGNORE labels (and tokens 0): they count for nothing.
        """
        assert 0 <= dp_rank < dp and 0 <= m < chunks, (dp_rank, dp, m, chunks)
        first = samples_seen + (dp_rank * chunks + m) * micro_batch_size
        length = self.corpus.sequence_length
        tokens = np.zeros((micro_batch_size, length), dtype=np.int64)
        labels = np.full((micro_batch_size, length), IGNORE, dtype=np.int64)
        for row in range(micro_batch_size):
            number = self.order(first + row)
            if number is None:
                continue
            window = self.corpus.sample(number)
            tokens[row], labels[row] = window[:-1], window[1:]
            if self.corpus.eod_mask_loss:
                labels[row, window[:-1] == self.corpus.eod_id] = IGNORE
        return Microbatch(
            inputs=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            sample_indices=torch.arange(first, first + micro_batch_size, dtype=torch.int64),
        )


def validation_steps(num_samples: int, global_batch: int, at_most: int) -> int:
    """Global batches until every sample was seen once, or ``at_most``; at least 1."""
    return min(at_most, -(-num_samples // global_batch))


def unigram_entropy(corpus: Corpus) -> Entropy:
    """Entropy of the corpus's single tokens: the loss of a model that knows their frequencies and nothing else.

    From the fingerprint, or else by counting the whole corpus.
    """
    if corpus.known:
        return Entropy(corpus.known.split.unigram_entropy_nats, corpus.known.split.unigram_entropy_bits)
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(corpus.stream), _TOKENS_AT_ONCE):
        block = corpus.stream.read(start, min(_TOKENS_AT_ONCE, len(corpus.stream) - start))
        added = np.bincount(block, minlength=counts.size)
        added[: counts.size] += counts
        counts = added
    return fingerprints.entropy(counts)


class _Known(NamedTuple):
    split: Split
    end_of_document_id: int


def _known(prefix: Path, num_tokens: int) -> _Known | None:
    """What a fingerprint beside the corpus tells of it; of its hashes none is computed again here."""
    found = fingerprints.read(prefix.parent)
    split = found.splits.get(prefix.name) if found else None
    if found is None or split is None:
        return None
    if split.tokens != num_tokens:
        raise DataError(
            f"{prefix.parent / fingerprints.FILE_NAME} tells of {split.tokens:,} tokens in {prefix.name}, its .idx of "
            f"{num_tokens:,}: the corpus was changed afterwards. Prepare it again, or delete the fingerprint "
            f"if the .bin/.idx are right"
        )
    return _Known(split, found.end_of_document_id)
