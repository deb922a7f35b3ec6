"""Span corruption, T5's objective: predict the spans that were removed from a window of tokens.

Raffel et al. 2019 (arXiv:1910.10683), section 3.1.4 and figure 2: 15 % of the tokens are noise, in
spans of 3 on average. A sentinel replaces each span. The target is each span after its sentinel,
and a last sentinel::

    window      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9                3 tokens in 2 spans, for example
                      -----                --
    encoder     t0 t1   X   t4 t5 t6 t7 t8  Y
    labels       X t2 t3  Y t9  Z  .  .                      . IGNORE, up to a multiple of 8
    decoder      0  X t2 t3  Y t9  0  0                      the labels shifted right, 0 first

X, Y, Z are the last ids of the vocabulary, counting down; text must not use them. The numbers of
noise tokens and spans follow from ``data.sequence_length``, the length of the encoder, so all
samples have the same shapes. The positions of the spans are a pure function of the seed and of the
sample's index in the run: the same in every layout and after a resume, and different when the same
text is read in the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.blend import Blend
from meshwright.data.corpus import IGNORE, Corpus
from meshwright.data.indexed import mask_path
from meshwright.data.order import permute, round_keys
from meshwright.errors import DataError
from meshwright.seeding import derive

NOISE_PERCENT = 15
MEAN_SPAN = 3
START = 0
"""The decoder's first token, and its input where the label is ignored."""
DECODER_MULTIPLE = 8
"""The decoder's length is rounded up to a multiple of it for sequence parallelism;
at most 5 % at length 512.
"""


class Lengths(NamedTuple):
    """Sizes of a sample in tokens, and its number of spans."""

    window: int
    noise: int
    spans: int

    @property
    def encoder(self) -> int:
        """Length of the encoder: the kept tokens, and a sentinel for each span."""
        return self.window - self.noise + self.spans

    @property
    def sentinels(self) -> int:
        """Number of sentinels: one for each span and one for the end."""
        return self.spans + 1

    @property
    def decoder(self) -> int:
        """Length of the decoder: the noise tokens and all sentinels, rounded up."""
        return -(-(self.noise + self.sentinels) // DECODER_MULTIPLE) * DECODER_MULTIPLE


@cache
def lengths(sequence_length: int) -> Lengths:
    """Return the sizes of the longest window whose encoder has ``sequence_length`` tokens.
    Raises DataError for 1.

    One more token in the window lengthens the encoder by one, or by none if it is noise, so each
    length from 2 on is reached.
    """
    if sequence_length < 2:
        raise DataError(
            "MW-DATA-091",
            f"data.sequence_length = {sequence_length} leaves no room for a token beside a"
            " sentinel: span corruption needs 2 or more",
        )
    sizes = _of_window(sequence_length)
    while (longer := _of_window(sizes.window + 1)).encoder <= sequence_length:
        sizes = longer
    assert sizes.encoder == sequence_length, (sizes, sequence_length)
    return sizes


def _of_window(window: int) -> Lengths:
    """Return the sizes for a window; noise and spans are rounded to the nearest, at least one."""
    noise = max((window * NOISE_PERCENT + 50) // 100, 1)
    return Lengths(window, noise, max((2 * noise + MEAN_SPAN) // (2 * MEAN_SPAN), 1))


def spans_of(shape: Lengths, seed: int, place: int) -> list[tuple[int, int]]:
    """Return the noise spans [start, stop) of the run's sample ``place``, in order;
    no two are adjacent.

    Kept tokens and noise are each divided into ``spans`` parts, all divisions equally likely, and
    interleaved, kept tokens first (``random_spans_noise_mask`` in the authors' code).
    """
    kept = _divide(
        shape.window - shape.noise,
        shape.spans,
        round_keys(derive(seed, "kept between spans"), place),
    )
    noise = _divide(shape.noise, shape.spans, round_keys(derive(seed, "spans of noise"), place))
    stops = accumulate(k + n for k, n in zip(kept, noise, strict=True))
    return [(stop - length, stop) for stop, length in zip(stops, noise, strict=True)]


def _divide(tokens: int, parts: int, keys: tuple[int, ...]) -> list[int]:
    """Divide tokens into ``parts`` parts of at least one, at cuts from a keyed permutation;
    return their lengths.
    """
    cuts = sorted(permute(i, tokens - 1, keys) + 1 for i in range(parts - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]


class CorruptedExample(NamedTuple):
    """One sample of span corruption."""

    encoder_ids: NDArray[np.int64]  # (Se,)
    decoder_ids: NDArray[np.int64]  # (Sd,)
    labels: NDArray[np.int64]  # (Sd,): IGNORE after the last sentinel


def corrupt(
    tokens: NDArray[np.int64], spans: list[tuple[int, int]], vocab_size: int, decoder_length: int
) -> CorruptedExample:
    """Replace the spans of a window (W,) by sentinels. Sentinel i is ``vocab_size - 1 - i``."""
    kept: list[NDArray[np.int64]] = []
    target: list[NDArray[np.int64]] = []
    end = 0
    for i, (start, stop) in enumerate(spans):
        sentinel = np.array([vocab_size - 1 - i])
        kept += [tokens[end:start], sentinel]
        target += [sentinel, tokens[start:stop]]
        end = stop
    kept.append(tokens[end:])
    whole = np.concatenate([*target, [vocab_size - 1 - len(spans)]])
    labels = np.full(decoder_length, IGNORE, dtype=np.int64)
    decoder_ids = np.full(decoder_length, START, dtype=np.int64)
    labels[: len(whole)] = whole
    decoder_ids[1 : len(whole)] = whole[:-1]
    return CorruptedExample(np.concatenate(kept), decoder_ids, labels)


def open_corpus(prefix: str | Path, sequence_length: int, vocab_size: int | None) -> Corpus:
    """Open a corpus as windows of the size given by :func:`lengths`,
    and check that no id is a sentinel.

    Raises:
        DataError: the corpus is damaged or has a mask; the vocabulary is unknown or has no room for
            the sentinels.
    """
    shape = lengths(sequence_length)
    if vocab_size is None:
        raise DataError(
            "MW-DATA-092",
            f"span corruption takes the last {shape.sentinels} ids of the model's vocabulary as"
            " sentinels, and its size is not known: set model.options.vocab_size",
        )
    corpus = Corpus(prefix, shape.window, vocab_size, num_sentinels=shape.sentinels)
    if corpus.mask:
        raise DataError(
            "MW-DATA-093",
            f"{mask_path(corpus.prefix)} limits the tokens that count as labels, and span"
            " corruption takes spans from "
            f'all tokens: prepare the corpus with --format text, or set data.task = "causal"',
        )
    return corpus


class SpanCorruptionSource(NamedTuple):
    """Source of span corruption: a corpus from :func:`open_corpus`,
    and the order in which a run reads it.
    """

    corpus: Corpus | Blend
    order: Callable[[int], int | None]
    """Maps a sample index of the run to a sample number; None past the end.
    See :mod:`meshwright.data.order`.
    """
    sequence_length: int
    seed: int

    @property
    def num_samples(self) -> int:
        """Samples of the corpus."""
        return self.corpus.num_samples

    @property
    def decoder_length(self) -> int:
        """Sd: length of the decoder."""
        return lengths(self.sequence_length).decoder

    def corpora_of(self, indices: Sequence[int]) -> list[int]:
        """Return the corpus of each sample, see :data:`meshwright.data.mixture_losses.CorporaOf`."""
        if not isinstance(self.corpus, Blend):
            return []
        numbers = [self.order(index) for index in indices]
        return [0 if number is None else self.corpus.kind(number) for number in numbers]

    def read(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Return (inputs, labels (B, Sd) int64) of these sample indices of the run.

        The inputs are encoder_ids (B, Se) and decoder_ids (B, Sd), int64. Past the end of a corpus
        that is read once, rows have only IGNORE labels.
        """
        shape = lengths(self.sequence_length)
        assert self.corpus.vocab_size is not None and self.corpus.sequence_length == shape.window
        encoder_ids = np.full((len(indices), shape.encoder), START, dtype=np.int64)
        decoder_ids = np.full((len(indices), shape.decoder), START, dtype=np.int64)
        labels = np.full((len(indices), shape.decoder), IGNORE, dtype=np.int64)
        for row, index in enumerate(indices):
            number = self.order(index)
            if number is None:
                continue
            # the last token is the first of the next window
            window = self.corpus.sample(number)[:-1]
            spans = spans_of(shape, self.seed, index)
            encoder_ids[row], decoder_ids[row], labels[row] = corrupt(
                window, spans, self.corpus.vocab_size, shape.decoder
            )
        inputs = {
            "encoder_ids": torch.from_numpy(encoder_ids),
            "decoder_ids": torch.from_numpy(decoder_ids),
        }
        return inputs, torch.from_numpy(labels)
