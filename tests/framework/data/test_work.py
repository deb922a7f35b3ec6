"""Rows of equal work: lengths of documents, and the deal."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.context_parallel.balance import seen_keys
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.order import OnceInOrder
from meshwright.data.work import by_index, deal, keys_seen, replica_excess


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 0 to 60 tokens, some of them empty."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import ones

    folder, draw = tmp_path_factory.mktemp("mixed"), random.Random(3)
    builder = IndexedDatasetBuilder(str(folder / "mixed.bin"), dtype=np.uint16)
    for _ in range(200):
        length = draw.choice([1, 2, 3, 5, 8, 20, 32, 33, 60])
        builder.add_document(ones(length), [length])
    builder.finalize(str(folder / "mixed.idx"))
    return folder / "mixed"


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_lengths_are_those_of_the_samples(prefix: Path, packing: str) -> None:
    """Without reading tokens: as the starts that the model gets."""
    corpus = Corpus(prefix, 32, rules=DocumentRules(packing, boundaries=True))  # type: ignore[arg-type]
    source = CorpusSource(corpus, OnceInOrder(corpus.num_samples))
    rows = range(corpus.num_samples + 2)
    expected = [seen_keys(corpus.example(n).starts).sum() for n in range(corpus.num_samples)]
    assert source.work(rows).tolist() == [*expected, 0, 0]
    assert len(set(expected)) > 10
    for number in range(corpus.num_samples):
        assert sum(corpus.document_lengths(number)) == 32


def test_samples_without_boundaries_have_equal_work(prefix: Path) -> None:
    corpus = Corpus(prefix, 32)
    assert corpus.document_lengths(3) == [32] and keys_seen([32]) == 32 * 33 // 2


@settings(max_examples=60, deadline=None)
@given(
    dp=st.integers(1, 5),
    chunks=st.integers(1, 5),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_each_row_is_dealt_once(dp: int, chunks: int, size: int, seed: int) -> None:
    """And the micro-batches are the same for all layouts of as many."""
    work = np.random.default_rng(seed).integers(0, 50, dp * chunks * size) ** 2
    dealt = deal(work, dp, chunks, size)
    assert dealt.shape == (dp, chunks, size)
    assert sorted(dealt.flatten().tolist()) == list(range(dp * chunks * size))

    def sets(found: np.ndarray) -> set[frozenset[int]]:
        return {frozenset(rows) for rows in found.reshape(-1, size).tolist()}

    assert (
        sets(dealt) == sets(deal(work, 1, dp * chunks, size)) == sets(deal(work, chunks, dp, size))
    )


def test_replicas_get_equal_work() -> None:
    """Documents of very different lengths: a few per cent in place of a third."""
    draw = np.random.default_rng(7)
    by_order, by_work = [], []
    for _ in range(20):
        lengths = draw.choice([64, 128, 512, 2048, 8192], size=(64, 400))
        work = np.array([keys_seen(_filled(row.tolist(), 8192)) for row in lengths])
        by_order.append(replica_excess(work, by_index(64, 8, 8)))
        by_work.append(replica_excess(work, deal(work, 8, 8, 1)))
    assert np.mean(by_order) > 0.15 and np.mean(by_work) < 0.03


def _filled(lengths: list[int], total: int) -> list[int]:
    """Return as many lengths as fill a sample, the last one cut."""
    found: list[int] = []
    for length in lengths:
        found.append(min(length, total - sum(found)))
        if sum(found) == total:
            break
    return found
