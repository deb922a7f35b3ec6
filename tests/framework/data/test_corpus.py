"""Packing and document boundaries against the naive way; several corpora as one; masks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.data.blend import Blend
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import IGNORE, Corpus, DocumentPacking, DocumentRules
from meshwright.data.indexed import inspect
from meshwright.data.order import BlendOrder, SampleOrder, whole_weights
from meshwright.data.token_files import documents
from tests.support.errors import raises
from tests.support.layouts import samples

DOCUMENTS = st.lists(st.lists(st.integers(1, 49), max_size=9), min_size=1, max_size=12)
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(prefix: Path, documents: list[list[int]], mask: list[int] | None = None) -> Path:
    """By Megatron's own builder; our mask beside it."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document, dtype=np.uint16), [len(document)])
    builder.finalize(f"{prefix}.idx")
    Path(f"{prefix}.mask").unlink(missing_ok=True)
    if mask is not None:
        np.array(mask, dtype=np.uint8).tofile(f"{prefix}.mask")
    return prefix


@QUICK
@given(texts=DOCUMENTS, length=st.integers(1, 8), masked=st.booleans())
def test_windows_with_boundaries(
    tmp_path: Path, texts: list[list[int]], length: int, masked: bool
) -> None:
    """Token by token: what document each belongs to says where one starts and
    which labels count.
    """
    stream = [(token, number) for number, text in enumerate(texts) for token in text]
    if len(stream) <= length:
        return
    mask = [token % 3 > 0 for token, _ in stream]
    prefix = write(tmp_path / "c", texts, [int(m) for m in mask] if masked else None)
    corpus = Corpus(prefix, length, rules=DocumentRules(boundaries=True))
    assert corpus.num_samples == (len(stream) - 1) // length
    for number in range(corpus.num_samples):
        found = corpus.example(number)
        for i in range(length):
            at = number * length + i
            (token, document), (following, of) = stream[at], stream[at + 1]
            counts = of == document and (mask[at + 1] or not masked)
            assert found.tokens[i] == token and found.labels[i] == (following if counts else IGNORE)
            assert found.starts[i] == (i == 0 or stream[at - 1][1] != document)


@QUICK
@given(texts=DOCUMENTS, length=st.integers(1, 12), masked=st.booleans())
def test_whole_documents(tmp_path: Path, texts: list[list[int]], length: int, masked: bool) -> None:
    """Each document is in one sample, whole or cut, in order;
    no sample could have taken the next one too.
    """
    if not any(texts):
        return
    mask = [int(token % 3 > 0) for text in texts for token in text]
    corpus = Corpus(
        write(tmp_path / "c", texts, mask if masked else None),
        length,
        rules=DocumentRules("documents"),
    )
    found: list[list[int]] = []
    texts = [text for text in texts if text]
    for number in range(corpus.num_samples):
        tokens, labels, starts = corpus.example(number)
        places = [*np.flatnonzero(starts).tolist(), length]
        assert places[0] == 0
        room = length
        for begin, end in pairwise(places):
            run, label = tokens[begin:end].tolist(), labels[begin:end].tolist()
            if not any(run):  # what is left
                assert label == [IGNORE] * len(run) and end == length
                continue
            room -= len(run)
            document = texts[len(found)]
            assert run == document[:length]
            expected = [t if not masked or t % 3 > 0 else IGNORE for t in document[1 : length + 1]]
            assert label == [*expected, *[IGNORE] * (len(run) - len(expected))]
            found.append(document)
        if number + 1 < corpus.num_samples:
            assert min(len(texts[len(found)]), length) > room
    assert found == texts
    assert corpus.packed is not None and corpus.packed.num_cut == sum(
        len(text) > length + 1 for text in texts
    )


def test_packing_is_a_function_of_the_lengths() -> None:
    assert DocumentPacking.of(np.array([0, 3, 7, 9, 10]), 5) == ([0, 1, 2, 4], 0)
    assert DocumentPacking.of(np.array([0, 3, 3, 5, 30]), 5) == ([0, 3, 4], 1)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron may write a sequence per sentence: documents are what its document index says."""
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    builder.add_document(np.arange(1, 6), [2, 3])
    builder.add_document(np.array([], dtype=np.int64), [])
    builder.add_document(np.arange(6, 8), [1, 1])
    builder.finalize(str(tmp_path / "c.idx"))
    found = documents(inspect(tmp_path / "c"))
    assert found.all_starts().tolist() == [0, 5, 5, 7]
    assert [found.at(token) for token in range(7)] == [0] * 5 + [2, 2]


def test_a_mask_of_another_corpus(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [[1, 2, 3]], [1, 0])
    with raises("MW-DATA-032", "c.mask", 2, 3):
        Corpus(prefix, 2)


def test_inputs_of_a_feed_with_boundaries(tmp_path: Path) -> None:
    """Past the end of what is read once there are rows that count for nothing,
    one document each.
    """
    corpus = Corpus(
        write(tmp_path / "c", [[1, 2, 3], [4, 5]]), 2, rules=DocumentRules(boundaries=True)
    )
    batch = samples(CorpusSource(corpus, lambda i: i if i < 2 else None), 0, 3)
    assert batch.inputs["tokens"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert batch.inputs["starts"].tolist() == [[True, False], [True, True], [True, False]]
    assert batch.labels.tolist() == [[2, 3], [IGNORE, 5], [IGNORE] * 2]
    assert batch.inputs["starts"].dtype == torch.bool


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(1, 1000), min_size=1, max_size=9), until=st.integers(1, 400))
def test_a_blend_keeps_to_its_weights_at_any_moment(weights: list[int], until: int) -> None:
    """And each set's samples come one after the other, without a gap, from the first on."""
    order = BlendOrder(tuple(SampleOrder(7, k) for k in range(len(weights))), tuple(weights))
    seen: Counter[int] = Counter()
    for n in range(until):
        at, own = order.place(n)
        assert own == seen[at]
        assert order(n) == 7 * at + order.orders[at](own)
        seen[at] += 1
        halvings = (len(weights) - 1).bit_length()
        for k, weight in enumerate(weights):
            assert abs(seen[k] - (n + 1) * weight / sum(weights)) <= halvings / 2 + 1e-9


def test_weights_are_exact() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([3, 1e-3]) == (3000, 1)


def test_samples_of_several_corpora(tmp_path: Path) -> None:
    corpora = [
        Corpus(write(tmp_path / name, [list(range(first, first + 9))]), 2)
        for name, first in (("a", 1), ("b", 20))
    ]
    blend = Blend(corpora, [3, 1])
    assert blend.num_samples == 8
    both = [corpus.example(i).tokens.tolist() for corpus in corpora for i in range(4)]
    assert [blend.example(i).tokens.tolist() for i in range(8)] == both
