"""Span corruption: fixed lengths, nothing lost, the same in every layout,
sentinels that no text uses.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.data.corpus import IGNORE
from meshwright.data.order import OnceInOrder, SampleOrder
from meshwright.data.span_corruption import (
    Lengths,
    SpanCorruptionSource,
    corrupt,
    lengths,
    open_corpus,
    spans_of,
)
from tests.support.errors import raises
from tests.support.layouts import samples

LENGTH = 32
VOCAB = 60
SHAPE = lengths(LENGTH)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 windows and 3 tokens over; the largest id leaves just room for the sentinels."""
    prefix = tmp_path_factory.mktemp("corpus") / "train"
    text = np.random.default_rng(7).integers(0, VOCAB - SHAPE.sentinels, 20 * SHAPE.window + 3)
    text[5] = VOCAB - SHAPE.sentinels - 1
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(text, [len(text)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def feed_of(prefix: Path, seed: int = 3) -> SpanCorruptionSource:
    corpus = open_corpus(prefix, LENGTH, VOCAB)
    return SpanCorruptionSource(corpus, SampleOrder(corpus.num_samples, seed), LENGTH, seed)


def restored(
    encoder_ids: list[int], labels: list[int], vocab_size: int, num_spans: int
) -> list[int]:
    """Return the window: each sentinel of the encoder gives way to what follows the same one
    in the target.
    """
    sentinels = [vocab_size - 1 - i for i in range(num_spans + 1)]
    target = [token for token in labels if token != IGNORE]
    assert labels == target + [IGNORE] * (len(labels) - len(target)), "only the end is ignored"
    at = [target.index(sentinel) for sentinel in sentinels]
    assert at == sorted(at) and at[0] == 0 and at[-1] == len(target) - 1
    taken = {
        sentinel: target[start + 1 : stop]
        for sentinel, (start, stop) in zip(sentinels[:-1], pairwise(at), strict=True)
    }
    assert [token for token in encoder_ids if token in sentinels] == sentinels[:-1]
    return [token for given in encoder_ids for token in taken.get(given, [given])]


@pytest.mark.parametrize(
    ("sequence_length", "expected", "decoder"),
    [
        (2, Lengths(2, 1, 1), 8),
        (32, Lengths(35, 5, 2), 8),
        (128, Lengths(142, 21, 7), 32),
        (512, Lengths(569, 85, 28), 120),  # the authors' 568 tokens and an end token
    ],
)
def test_lengths_follow_from_the_config_alone(
    sequence_length: int, expected: Lengths, decoder: int
) -> None:
    found = lengths(sequence_length)
    assert found == expected
    assert (found.encoder, found.decoder) == (sequence_length, decoder)


def test_every_length_from_two_on_can_be_had() -> None:
    for sequence_length in range(2, 700):
        found = lengths(sequence_length)
        assert found.encoder == sequence_length and found.spans <= found.noise < found.window
        assert found.decoder % 8 == 0 and 0 <= found.decoder - found.noise - found.sentinels < 8
        if sequence_length > 100:
            assert found.noise / found.window == pytest.approx(0.15, abs=0.5 / found.window + 1e-12)
            assert found.noise / found.spans == pytest.approx(3, rel=0.1)
    with raises("MW-DATA-091", 1):
        lengths(1)


@settings(max_examples=60, deadline=None)
@given(sequence_length=st.integers(2, 200), seed=st.integers(0, 2**40), place=st.integers(0, 2**40))
def test_window_comes_back_from_input_and_target(
    sequence_length: int, seed: int, place: int
) -> None:
    shape = lengths(sequence_length)
    vocab_size = 1000
    text = np.random.default_rng(place).integers(0, vocab_size - shape.sentinels, shape.window)
    spans = spans_of(shape, seed, place)
    found = corrupt(text, spans, vocab_size, shape.decoder)
    assert found.encoder_ids.shape == (shape.encoder,)
    assert found.decoder_ids.shape == found.labels.shape == (shape.decoder,)
    assert (
        restored(found.encoder_ids.tolist(), found.labels.tolist(), vocab_size, shape.spans)
        == text.tolist()
    )
    assert found.decoder_ids[0] == 0
    counted = found.labels[1:] != IGNORE
    assert (found.decoder_ids[1:][counted] == found.labels[:-1][counted]).all()
    assert not found.decoder_ids[1:][~counted].any()
    assert sum(stop - start for start, stop in spans) == shape.noise


def test_spans_are_spread_evenly_and_no_two_touch() -> None:
    shape = lengths(128)
    samples = [spans_of(shape, 1, place) for place in range(400)]
    lengths_found = Counter(stop - start for spans in samples for start, stop in spans)
    assert all(start > 0 for spans in samples for start, _ in spans)
    assert all(start > stop for spans in samples for (_, stop), (start, _) in pairwise(spans))
    assert len({tuple(spans) for spans in samples}) == 400
    # 21 tokens in 7 parts: one is 1 long as often as C(19, 5) of C(20, 6) divisions
    assert lengths_found[1] / 2800 == pytest.approx(0.3, abs=0.03)
    hidden = np.zeros(shape.window)
    for spans in samples:
        for start, stop in spans:
            hidden[start:stop] += 1
    assert hidden[10:-10] / 400 == pytest.approx(0.15, abs=0.08), (
        "all places of a window alike, but for its ends"
    )


def test_the_feed_corrupts_the_samples_of_its_order(prefix: Path) -> None:
    feed = feed_of(prefix)
    found = samples(feed, 30, 20)
    assert found.inputs["encoder_ids"].shape == (20, feed.sequence_length) == (20, LENGTH)
    assert found.inputs["decoder_ids"].shape == found.labels.shape == (20, feed.decoder_length)
    assert {
        leaf.dtype for leaf in (*found.inputs.values(), found.labels, found.sample_indices)
    } == {torch.int64}
    for row in range(20):
        window = feed.corpus.sample(feed.order(30 + row) or 0)[:-1]
        encoder_ids, labels = found.inputs["encoder_ids"][row].tolist(), found.labels[row].tolist()
        assert restored(encoder_ids, labels, VOCAB, SHAPE.spans) == window.tolist()


def test_spans_change_with_the_seed_and_with_the_epoch(prefix: Path) -> None:
    feed = feed_of(prefix)
    first = {feed.order(i): samples(feed, i, 1).inputs["encoder_ids"] for i in range(20)}
    again = {feed.order(i): samples(feed, i, 1).inputs["encoder_ids"] for i in range(20, 40)}
    assert first.keys() == again.keys()
    assert sum(torch.equal(first[number], again[number]) for number in first) <= 2
    other = samples(SpanCorruptionSource(feed.corpus, feed.order, LENGTH, seed=4), 0, 20)
    same = samples(feed_of(prefix), 0, 20)
    assert torch.equal(
        same.inputs["encoder_ids"], torch.cat([first[feed.order(i)] for i in range(20)])
    )
    assert not torch.equal(other.inputs["encoder_ids"], same.inputs["encoder_ids"])


def test_spans_are_pinned() -> None:
    """A run resumed with a later version of this file, or of numpy,
    goes on with the same samples.
    """
    assert spans_of(lengths(32), 1234, 0) == [(22, 23), (31, 35)]


def test_past_the_end_of_what_is_read_once_nothing_counts(prefix: Path) -> None:
    corpus = open_corpus(prefix, LENGTH, VOCAB)
    feed = SpanCorruptionSource(corpus, OnceInOrder(corpus.num_samples), LENGTH, 0)
    found = samples(feed, 19, 2)
    assert (found.labels[0] != IGNORE).sum() == SHAPE.noise + SHAPE.sentinels
    assert (found.labels[1] == IGNORE).all() and not found.inputs["encoder_ids"][1].any()


def test_text_that_uses_a_sentinel_is_refused_with_the_size_that_would_do(prefix: Path) -> None:
    assert open_corpus(prefix, LENGTH, VOCAB).num_samples == 20
    largest = VOCAB - SHAPE.sentinels - 1
    with raises("MW-DATA-006") as caught:
        open_corpus(prefix, LENGTH, VOCAB - 1)
    for words in (
        f"token id {largest}",
        "the last 3 are sentinels",
        "ids below 56",
        "vocab_size to 60 or more",
    ):
        assert words in str(caught.value)
    with raises("MW-DATA-006"):
        open_corpus(prefix, LENGTH, 2)
    with raises("MW-DATA-092", 3):
        open_corpus(prefix, LENGTH, None)
