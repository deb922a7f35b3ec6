"""Samples and micro-batches: the right windows, the same samples in every layout,
nothing lost or doubled.
"""

from __future__ import annotations

from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.config.batch import validation_steps
from meshwright.data import fingerprint as fingerprints
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import IGNORE, Corpus, DocumentRules
from meshwright.data.fingerprint import Fingerprint, SourceSummary, Split
from meshwright.data.order import OnceInOrder, SampleOrder
from meshwright.data.sources import unigram_nats, warn_of_small_validation
from meshwright.pipeline.values import Microbatch
from tests.support.errors import raises
from tests.support.layouts import microbatch, samples

END = 0
LENGTH = 5
VOCAB = 50
NUM_SAMPLES = 23


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    """Megatron's own builder and no fingerprint: what its preprocess_data.py leaves."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def some_documents() -> list[list[int]]:
    """Documents of 1 to 12 tokens, NUM_SAMPLES windows and 3 tokens over."""
    rng = np.random.default_rng(7)
    stream = rng.integers(1, VOCAB, NUM_SAMPLES * LENGTH + 1 + 3).tolist()
    documents = []
    while stream:
        n = int(rng.integers(0, 12))
        documents.append([*stream[:n], END] if len(stream) > n + 1 else stream[: n + 1])
        del stream[: n + 1]
    return documents


DOCUMENTS = some_documents()
STREAM = [token for document in DOCUMENTS for token in document]


def leave_fingerprint(
    folder: Path, name: str, tokens: int, max_token_id: int, nats: float = 1.0
) -> None:
    """A fingerprint as a preparation leaves it,
    without the hashes (they are not read when training).
    """
    source = SourceSummary(
        description="", documents=1, text_bytes=1, sha256="", vocab_size=9, validation_share=0.0
    )
    split = Split(
        documents=1,
        tokens=tokens,
        max_token_id=max_token_id,
        unigram_entropy_nats=nats,
        unigram_entropy_bits=nats / log(2),
    )
    known = Fingerprint(
        files={}, splits={name: split}, vocab_size=9, end_of_document_id=END, source=source
    )
    (folder / fingerprints.FILE_NAME).write_text(known.model_dump_json())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("corpus") / "train", DOCUMENTS)


def naive_row(number: int, masked: bool) -> tuple[list[int], list[int]]:
    """Tokens and labels of one sample, straight from the list of tokens."""
    start = number * LENGTH
    tokens, labels = STREAM[start : start + LENGTH], STREAM[start + 1 : start + LENGTH + 1]
    if masked:
        labels = [
            IGNORE if token == END else label for token, label in zip(tokens, labels, strict=True)
        ]
    return tokens, labels


def step_of(
    feed: CorpusSource, samples_seen: int, dp: int, chunks: int, micro_batch_size: int
) -> list[list[Microbatch]]:
    """Return a whole step: micro-batches by replica."""
    return [
        [
            microbatch(feed, samples_seen, dp_rank, dp, micro_batch_size, chunks, m)
            for m in range(chunks)
        ]
        for dp_rank in range(dp)
    ]


def rows_of(step: list[list[Microbatch]]) -> list[tuple[int, list[int], list[int]]]:
    """(sample index, tokens, labels) of a step in the order of replicas and micro-batches."""
    return [
        (int(index), tokens.tolist(), labels.tolist())
        for replica in step
        for microbatch in replica
        for tokens, labels, index in zip(*microbatch[:3], strict=True)
    ]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_samples_are_windows_over_the_stream(tmp_path: Path, dtype: type) -> None:
    corpus = Corpus(write(tmp_path / "c", DOCUMENTS, dtype), LENGTH, VOCAB)
    assert corpus.num_samples == NUM_SAMPLES
    for number in range(NUM_SAMPLES):
        window = corpus.sample(number)
        assert window.dtype == np.int64
        assert window.tolist() == STREAM[number * LENGTH : number * LENGTH + LENGTH + 1]


def test_the_last_token_may_be_only_a_label(tmp_path: Path) -> None:
    """2 S tokens hold one sample, 2 S + 1 hold two."""
    for tokens, num_samples in [(6, 1), (10, 1), (11, 2), (15, 2), (16, 3)]:
        corpus = Corpus(write(tmp_path / str(tokens), [[1] * tokens]), LENGTH)
        assert corpus.num_samples == num_samples
        assert corpus.sample(num_samples - 1).shape == (LENGTH + 1,)


@pytest.mark.parametrize("masked", [False, True])
def test_microbatch_matches_the_naive_version(prefix: Path, masked: bool) -> None:
    feed = CorpusSource(
        Corpus(prefix, LENGTH, VOCAB, rules=DocumentRules(eod_id=END, eod_mask_loss=masked)),
        SampleOrder(NUM_SAMPLES, 3),
    )
    got = microbatch(feed, samples_seen=40, dp_rank=1, dp=3, micro_batch_size=2, chunks=4, m=3)
    assert got.inputs.dtype == got.labels.dtype == got.sample_indices.dtype == torch.int64
    assert got.inputs.shape == got.labels.shape == (2, LENGTH)
    first = 40 + 1 * 2 * 4 + 3 * 2
    assert got.sample_indices.tolist() == [first, first + 1]
    for row in range(2):
        expected = naive_row(feed.order(first + row) or 0, masked)
        assert (got.inputs[row].tolist(), got.labels[row].tolist()) == expected


def test_masking_ignores_what_follows_an_end_of_document(prefix: Path) -> None:
    order = OnceInOrder(NUM_SAMPLES)
    plain = samples(CorpusSource(Corpus(prefix, LENGTH), order), 0, NUM_SAMPLES)
    masked = samples(
        CorpusSource(
            Corpus(prefix, LENGTH, rules=DocumentRules(eod_id=END, eod_mask_loss=True)), order
        ),
        0,
        NUM_SAMPLES,
    )
    assert torch.equal(plain.inputs, masked.inputs)
    after_end = plain.inputs == END
    assert 0 < after_end.sum() < after_end.numel()
    assert torch.equal(masked.labels == IGNORE, after_end)
    assert torch.equal(masked.labels[~after_end], plain.labels[~after_end])
    assert (masked.labels == END).any(), "predicting the end of a document itself is trained on"


@settings(max_examples=80, deadline=None)
@given(data=st.data(), samples_seen=st.integers(0, 200), masked=st.booleans())
def test_every_layout_sees_the_same_step(
    prefix: Path, data: st.DataObject, samples_seen: int, masked: bool
) -> None:
    """For any split of a global batch into dp x chunks x micro_batch_size:
    the same samples in the same order.
    """
    dp, chunks, micro_batch_size = data.draw(
        st.tuples(*[st.integers(1, 5)] * 3), label="dp, chunks, micro_batch_size"
    )
    global_batch = dp * chunks * micro_batch_size
    feed = CorpusSource(
        Corpus(prefix, LENGTH, VOCAB, rules=DocumentRules(eod_id=END, eod_mask_loss=masked)),
        SampleOrder(NUM_SAMPLES, 11),
    )
    reference = [
        (index, *naive_row(feed.order(index) or 0, masked))
        for index in range(samples_seen, samples_seen + global_batch)
    ]
    assert rows_of(step_of(feed, samples_seen, dp, chunks, micro_batch_size)) == reference


@pytest.mark.parametrize("global_batch", [1, 4, 6, 23, 40])
def test_epoch_edges_lose_and_double_nothing(prefix: Path, global_batch: int) -> None:
    """Steps that straddle epochs: each run of NUM_SAMPLES indices is every sample once,
    in a new order.
    """
    order = SampleOrder(NUM_SAMPLES, 5)
    feed = CorpusSource(Corpus(prefix, LENGTH), order)
    windows = {tuple(naive_row(number, False)[0]): number for number in range(NUM_SAMPLES)}
    assert len(windows) == NUM_SAMPLES
    seen, samples_seen = [], 0
    while samples_seen < 3 * NUM_SAMPLES:
        step = step_of(feed, samples_seen, dp=1, chunks=global_batch, micro_batch_size=1)
        seen += [windows[tuple(tokens)] for _, tokens, _ in rows_of(step)]
        samples_seen += global_batch
    epochs = [tuple(seen[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]) for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(NUM_SAMPLES)) for epoch in epochs)
    assert len(set(epochs)) == 3


def test_validation_counts_each_sample_once(prefix: Path) -> None:
    corpus = Corpus(prefix, LENGTH, VOCAB)
    feed = CorpusSource(corpus, OnceInOrder(corpus.num_samples))
    for dp, chunks, micro_batch_size in [(1, 1, 8), (2, 2, 2), (4, 2, 1)]:
        steps = validation_steps(corpus.num_samples, global_batch=8, at_most=100)
        assert steps == 3
        rows = [
            row
            for step in range(steps)
            for row in rows_of(step_of(feed, 8 * step, dp, chunks, micro_batch_size))
        ]
        assert [index for index, _, _ in rows] == list(range(24))
        assert [row[1:] for row in rows[:NUM_SAMPLES]] == [
            naive_row(number, False) for number in range(NUM_SAMPLES)
        ]
        assert rows[NUM_SAMPLES][1:] == ([0] * LENGTH, [IGNORE] * LENGTH)
    assert validation_steps(corpus.num_samples, global_batch=8, at_most=2) == 2
    assert validation_steps(corpus.num_samples, global_batch=100, at_most=2) == 1


def test_too_short_for_one_sample(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [[1, 2, 3, 4, 5]])
    with raises("MW-DATA-001", "c", 5, 6):
        Corpus(prefix, 5)
    assert Corpus(prefix, 4).num_samples == 1


def test_token_id_beyond_the_vocabulary_is_found_up_front(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [[1] * 17, [1, 300, 1]])
    with raises("MW-DATA-006", "c", 300, "sample 3", 301):
        Corpus(prefix, LENGTH, vocab_size=300)
    assert Corpus(prefix, LENGTH, vocab_size=301).num_samples == 3
    assert Corpus(prefix, LENGTH).num_samples == 3


def test_token_id_beyond_the_vocabulary_by_the_fingerprint(tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", [[1] * 20])
    leave_fingerprint(tmp_path, "train", tokens=20, max_token_id=99)
    with raises("MW-DATA-006", "train", 99, "fingerprint.json"):
        Corpus(prefix, LENGTH, vocab_size=99)
    assert Corpus(prefix, LENGTH, vocab_size=100).eod_id == END


def test_token_id_beyond_the_vocabulary_that_the_fingerprint_hides(tmp_path: Path) -> None:
    """The check of each batch is there in any case: a fingerprint may be older than the tokens."""
    prefix = write(tmp_path / "train", [[1] * 7 + [60] + [1] * 12])
    leave_fingerprint(tmp_path, "train", tokens=20, max_token_id=1)
    feed = CorpusSource(Corpus(prefix, LENGTH, vocab_size=60), OnceInOrder(3))
    assert samples(feed, 0, 1).inputs.tolist() == [[1] * LENGTH]
    with raises("MW-DATA-006", "train", 60, "sample 1", 5):
        samples(feed, 1, 1)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [[1, 2, -3, 4, 5, 6, 7]], np.int32)
    with raises("MW-DATA-005", "-3", "sample 0"):
        Corpus(prefix, LENGTH, vocab_size=VOCAB)
    with raises("MW-DATA-005", "-3", "sample 0"):
        Corpus(prefix, LENGTH).sample(0)


def test_masking_needs_to_know_the_end_of_document(prefix: Path) -> None:
    with raises("MW-DATA-002"):
        Corpus(prefix, LENGTH, rules=DocumentRules(eod_mask_loss=True))


def test_a_fingerprint_of_another_corpus_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", [[1] * 20])
    leave_fingerprint(tmp_path, "train", tokens=21, max_token_id=1)
    with raises("MW-DATA-007", 21, "train", 20):
        Corpus(prefix, LENGTH)
    leave_fingerprint(tmp_path, "validation", tokens=21, max_token_id=1)
    assert Corpus(prefix, LENGTH).known is None
    (tmp_path / fingerprints.FILE_NAME).write_text('{"schema_version": 2}')
    with raises("MW-DATA-018", "fingerprint.json", "schema_version", 1):
        Corpus(prefix, LENGTH)
    (tmp_path / fingerprints.FILE_NAME).write_text("{")
    with raises("MW-DATA-018", "fingerprint.json"):
        Corpus(prefix, LENGTH)


def test_a_validation_below_one_global_batch_is_named(tmp_path: Path) -> None:
    write(tmp_path / "few", [list(range(3 * LENGTH + 1))])
    source = CorpusSource(Corpus(tmp_path / "few", LENGTH), OnceInOrder(3))
    assert warn_of_small_validation(source, 3) == warn_of_small_validation(None, 8) == ""
    assert "validation has 3 samples, less than one global batch (4)" in warn_of_small_validation(
        source, 4
    )


def test_unigram_entropy_is_that_of_the_fingerprint(tmp_path: Path) -> None:
    uniform = fingerprints.entropy(np.ones(64, dtype=np.int64))
    assert uniform.nats == pytest.approx(log(64)) and uniform.bits == pytest.approx(6)
    write(tmp_path / "uniform", [list(range(64))])
    source = CorpusSource(Corpus(tmp_path / "uniform", LENGTH), OnceInOrder(1))
    assert unigram_nats(source) is None
    leave_fingerprint(tmp_path, "uniform", tokens=64, max_token_id=63, nats=1.25)
    assert unigram_nats(source._replace(corpus=Corpus(tmp_path / "uniform", LENGTH))) == 1.25
