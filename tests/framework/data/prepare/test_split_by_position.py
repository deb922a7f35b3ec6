"""Corpora of few documents: shares of the text that are as asked for,
and a baseline that no small split flatters.
"""

from __future__ import annotations

import gzip
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from meshwright.data import fingerprint as fingerprints
from meshwright.data.corpus import Corpus
from meshwright.data.prepare import readers
from meshwright.data.prepare.finish import Outcome
from meshwright.data.prepare.input_files import list_files
from meshwright.data.prepare.publish import publish
from meshwright.data.prepare.readers import count_records
from meshwright.data.prepare.records import Form
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.data.splits import FEW_DOCUMENTS, SplitRule, owed_tokens, part_of_document
from tests.framework.data.corpora import (
    END,
    bytes_tokenizer,
    contents,
    documents_in,
    made,
    write_lines,
)
from tests.support.errors import raises


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def shares_of(outcome: Outcome) -> dict[str, float]:
    """Return the share of the tokens that each split has."""
    splits = outcome.fingerprint.splits
    total = sum(split.tokens for split in splits.values())
    return {name: split.tokens / total for name, split in splits.items()}


def prepared(out: Path, tokenizer: Path, *sources: Path, **changes: Any) -> Outcome:
    """A corpus as the command line prepares it: the rule follows from the number of documents."""
    return made(
        out, tokenizer, *sources, **{"split": SplitRule.AUTO, "validation_share": 0.05, **changes}
    )


def test_thirty_uneven_documents_have_the_share_that_was_asked_for(
    tokenizer: Path, tmp_path: Path
) -> None:
    """By documents, one or two short ones would be the whole validation."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"{i} some words\n" * (20 if i % 10 else 4000))
    outcome = prepared(tmp_path / "out", tokenizer, folder, test_share=0.1)
    assert shares_of(outcome) == pytest.approx(
        {"train": 0.85, "validation": 0.05, "test": 0.1}, abs=1e-3
    )
    assert "split       by position" in str(outcome)


def test_one_text_has_a_validation_split(tokenizer: Path, tmp_path: Path) -> None:
    text = "".join(f"line {i} of the only text\n" for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    prepared(tmp_path / "out", tokenizer, tmp_path / "book.txt")
    found = documents_in(tmp_path / "out")
    assert [len(texts) for texts in found.values()] == [1, 1]
    assert found["train"][0] + found["validation"][0] == text, (
        "each token is in one split, and none is lost"
    )
    assert len(found["validation"][0]) == pytest.approx(0.05 * len(text), abs=2)


def test_the_bytes_depend_neither_on_blocks_nor_on_workers(tokenizer: Path, tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "a.jsonl", [{"text": f"{i} " * (7 * i % 301)} for i in range(200)]
    )
    one = prepared(tmp_path / "one", tokenizer, lines, block_bytes=1 << 20)
    other = prepared(tmp_path / "other", tokenizer, lines, block_bytes=97, num_workers=3)
    bins = [
        {name: raw for name, raw in contents(each.out).items() if name.endswith((".bin", ".idx"))}
        for each in (one, other)
    ]
    assert bins[0] == bins[1] and "validation.bin" in bins[0]


def test_a_conversation_is_never_cut(tokenizer: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"question {i}? ", "response": "yes " * (i % 9 + 1)} for i in range(120)]
    outcome = prepared(
        tmp_path / "out", tokenizer, write_lines(tmp_path / "a.jsonl", pairs), form=Form.PAIRS
    )
    found = documents_in(tmp_path / "out")
    whole = [record["prompt"] + record["response"] for record in pairs]
    assert sorted(found["train"] + found["validation"]) == sorted(whole)
    assert shares_of(outcome)["validation"] == pytest.approx(0.05, abs=0.01)


def test_many_documents_are_split_as_wholes(tokenizer: Path, tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(FEW_DOCUMENTS)]
    )
    outcome = prepared(tmp_path / "out", tokenizer, lines, block_bytes=1 << 20)
    assert outcome.fingerprint.source.split == "documents"
    found = documents_in(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(
        f"document {i}" for i in range(FEW_DOCUMENTS)
    )


def test_a_corpus_of_an_older_version_stays_as_it_is(tokenizer: Path, tmp_path: Path) -> None:
    """The same command again finds it complete, although it would split a new one by position."""
    lines = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(90)])
    made(tmp_path / "out", tokenizer, lines, validation_share=0.2)
    path = tmp_path / "out" / fingerprints.FILE_NAME
    fields = json.loads(path.read_text())
    del fields["source"]["split"], fields["prepared"]["split"]
    path.write_text(json.dumps(fields))
    assert not prepared(tmp_path / "out", tokenizer, lines, validation_share=0.2).built
    with raises("MW-DATA-044", "split", "'documents'", "'position'"):
        prepared(tmp_path / "out", tokenizer, lines, validation_share=0.2, split=SplitRule.POSITION)
    assert prepared(
        tmp_path / "out",
        tokenizer,
        lines,
        validation_share=0.2,
        split=SplitRule.POSITION,
        replace=True,
    ).built


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_files_with_a_tokenizer_of_their_own_too(tmp_path: Path, share: float) -> None:
    (tmp_path / "book.txt").write_text(
        "".join(f"Zeile {i} über Straßen, 東京\n" for i in range(900))
    )
    outcome = prepare_files([tmp_path / "book.txt"], tmp_path / "out", 300, share)
    assert shares_of(outcome)["validation"] == pytest.approx(share, abs=0.01)
    assert not prepare_files([tmp_path / "book.txt"], tmp_path / "out", 300, share).built


def test_the_baseline_has_the_frequencies_of_the_training_text(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Validation is `b`s alone: their own entropy is near 0,
    which no model reaches that saw mostly `a`s.
    """
    (tmp_path / "text.txt").write_text("a" * 950 + "b" * 50)
    outcome = prepared(tmp_path / "out", tokenizer, tmp_path / "text.txt")
    known = outcome.fingerprint
    train, validation = (
        np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16) for name in ("train", "validation")
    )
    size, kinds = known.vocab_size, len(set(train.tolist()))
    frequency = {t: ((train == t).sum() + kinds / size) / (len(train) + kinds) for t in range(size)}
    assert sum(frequency.values()) == pytest.approx(1.0)
    by_hand = -sum(log(frequency[int(token)]) for token in validation) / len(validation)
    assert known.unigram_baseline_nats("validation") == pytest.approx(by_hand, rel=1e-12)
    assert known.splits["validation"].unigram_entropy_nats < 0.2 < 3 < by_hand
    assert known.unigram_baseline_nats("train") == known.splits["train"].unigram_entropy_nats
    opened = Corpus(tmp_path / "out" / "validation", 8).known
    assert opened is not None and opened.unigram_baseline_nats == pytest.approx(by_hand)


def test_an_older_fingerprint_has_the_entropy_of_its_training_split_as_baseline(
    tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a" * 950 + "b" * 50)
    known = prepared(tmp_path / "out", tokenizer, tmp_path / "text.txt").fingerprint
    old = {
        name: split.model_copy(update={"unigram_baseline_nats": None})
        for name, split in known.splits.items()
    }
    known = known.model_copy(update={"splits": old})
    assert known.unigram_baseline_nats("validation") == known.splits["train"].unigram_entropy_nats


def test_records_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n{}\n{}")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 5))
    (tmp_path / "c.txt").write_text("one\ntwo\n")
    files = list_files([tmp_path])
    assert count_records(files, ("text",), 100) == 9
    assert count_records(files, ("text",), 4) == 4


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.floats(0.0, 0.9))
def test_a_split_never_has_more_than_its_share(lengths: list[int], share: float) -> None:
    seen = given_tokens = 0
    for length in lengths:
        seen += length
        part = part_of_document(length, owed_tokens(share, seen, given_tokens), may_cut=True)
        assert 0 <= part <= length
        given_tokens += part
        assert given_tokens <= share * seen


def test_a_line_without_an_end_is_not_counted_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file of zeros has no line feed:
    counting ends where the line is too long to be read.
    """
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    path = tmp_path / "zeros.jsonl.gz"
    path.write_bytes(gzip.compress(b"\0" * 10**6))
    plain, read = gzip.GzipFile.read, 0

    def counting(stream: gzip.GzipFile, size: int | None = -1) -> bytes:
        nonlocal read
        content = plain(stream, size)
        read += len(content)
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", counting)
    assert count_records(list_files([path]), ("text",), 1000) == 1
    assert 1000 < read < 2000


def test_a_part_begins_and_ends_as_a_document(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a line of the only text\n" * 200)
    made(
        tmp_path / "out",
        tokenizer,
        tmp_path / "book.txt",
        split=SplitRule.AUTO,
        validation_share=0.1,
        begin_token=END,
    )
    end = len(pre_tokenizers.ByteLevel.alphabet())
    for name in ("train", "validation"):
        tokens = np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16)
        assert tokens[0] == tokens[-1] == end and (tokens == end).sum() == 2


def test_a_replacement_survives_one_that_was_killed(tmp_path: Path) -> None:
    """Between the rename of a linked folder and the removal of the link."""
    out, aside, elsewhere = tmp_path / "out", tmp_path / "aside", tmp_path / "elsewhere"
    for folder in (out, aside, elsewhere):
        folder.mkdir()
        (folder / "train.bin").write_text(folder.name)
    (tmp_path / "aside.old").symlink_to(elsewhere)
    publish(aside, out)
    assert (out / "train.bin").read_text() == "aside" and (
        elsewhere / "train.bin"
    ).read_text() == "elsewhere"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]
