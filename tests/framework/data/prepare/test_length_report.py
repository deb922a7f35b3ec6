"""Lengths of documents, and the balance of the ranks that share them:
counted anew from the documents themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.context_parallel.order import contiguous, documents, zigzag
from meshwright.data import indexed
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.prepare import length_report
from meshwright.data.prepare.length_report import (
    ContextReport,
    describe_balance,
    describe_lengths,
    document_lengths,
)
from tests.support.errors import raises
from tests.support.seen_keys import keys_seen

LENGTHS = [3, 300, 40, 1, 500, 7, 120, 60]
S = 256


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    prefix = tmp_path / "mixed"
    indexed.write(prefix, [np.full(length, 5) for length in LENGTHS], 100)
    return Corpus(prefix, S, rules=DocumentRules("stream", boundaries=True))


def test_lengths_are_those_of_the_documents(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document_lengths(corpus.documents).tolist() == LENGTHS
    assert (
        describe_lengths(corpus.documents, S)
        == "tokens of a document: 1 to 500, 10 % 1, median 40, 90 % 300; 2 longer than a sample,"
        " with 77.6% of the tokens"
    )
    monkeypatch.setattr(length_report, "MAX_BLOCKS", 2)
    monkeypatch.setattr(length_report, "BLOCK", 2)
    assert document_lengths(corpus.documents).tolist() == [3, 300, 7, 120]
    assert "of 4 documents" in describe_lengths(corpus.documents, S)


def test_balance_is_that_of_the_samples(corpus: Corpus) -> None:
    """Ranks meet in each sample, so that the busiest of each counts."""
    starts = np.cumsum([0, *LENGTHS])
    busiest: dict[str, int] = dict.fromkeys(("contiguous", "zigzag", "documents"), 0)
    total = 0
    for number in range(corpus.num_samples):
        own = [0, *(int(at - number * S) for at in starts if number * S < at < (number + 1) * S)]
        seen = keys_seen(S, own)
        total += sum(seen)
        for name, ranks in (
            ("contiguous", contiguous(S, 4)),
            ("zigzag", zigzag(S, 4)),
            ("documents", documents(S, 4, own)),
        ):
            busiest[name] += max(sum(seen[place] for place in places) for places in ranks)
    (line,) = describe_balance(corpus, ContextReport(4))
    for name, load in busiest.items():
        assert f"{4 * load / total - 1:.1%} {name}" in line, (name, line)
    (alone,) = describe_balance(corpus, ContextReport(4, "zigzag"))
    assert "contiguous" not in alone
    assert describe_balance(corpus, ContextReport()) == []
    (whole,) = describe_balance(corpus, ContextReport(4, "zigzag", boundaries=False))
    assert whole.endswith(
        "over whole samples: the busiest rank sees more keys than the mean by 0.0% zigzag"
    )
    with raises("MW-DATA-120", "cp = 3", "255 or 258"):
        describe_balance(corpus, ContextReport(3))
