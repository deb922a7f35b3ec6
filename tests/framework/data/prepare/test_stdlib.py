"""Preparing a corpus: the text comes back out, the same files give the same bytes,
a killed run leaves no half.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from meshwright.data import fingerprint as fingerprints
from meshwright.data import tokenizer
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.prepare import sources
from meshwright.data.prepare.finish import Outcome
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.data.splits import SplitRule
from tests.support.errors import raises

VOCAB = 300


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 small files in two folders, an empty one, a hidden one;
    one that spells out the special token.
    """
    folder = tmp_path_factory.mktemp("texts")
    (folder / "sub").mkdir()
    for i in range(30):
        name = f"sub/{i}.txt" if i % 3 else f"{i}.txt"
        (folder / name).write_text(
            f"Document {i}: straße, 東京, \ttabs\r\n" + f"the cat sat on mat {i}\n" * (i + 1)
        )
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("not for training")
    (folder / "spelled.txt").write_text("a <|endoftext|> b")
    return folder


@pytest.fixture(scope="module")
def prepared(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return prepare_files(
        [texts], tmp_path_factory.mktemp("out") / "corpus", VOCAB, 0.2, split=SplitRule.DOCUMENTS
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_text_is_in_one_split_and_comes_back(texts: Path, prepared: Outcome) -> None:
    assert prepared.built
    bpe = tokenizer.load(prepared.out / "tokenizer.json")
    found = []
    for split in ("train", "validation"):
        dataset = IndexedDataset(str(prepared.out / split))
        for i in range(len(dataset)):
            ids = dataset[i].tolist()
            assert ids.count(0) == 1 and ids[-1] == 0, "the end of document, once, at the end"
            found.append(bpe.decode(ids[:-1]))
    expected = [document.text() for document in sources.files([texts]).documents]
    assert len(expected) == 31
    assert Counter(found) == Counter(expected)


def test_fingerprint_tells_the_truth(prepared: Outcome) -> None:
    known = fingerprints.read(prepared.out)
    assert known == prepared.fingerprint
    assert known is not None and set(known.splits) == {"train", "validation"}
    assert set(known.files) == {
        "train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.json",
    }  # fmt: skip
    for name, digest in known.files.items():
        assert fingerprints.file_sha256(prepared.out / name) == digest
    assert known.end_of_document_id == 0
    assert (
        known.vocab_size
        == tokenizer.load(prepared.out / "tokenizer.json").get_vocab_size()
        <= VOCAB
    )
    for split, told in known.splits.items():
        tokens = np.fromfile(prepared.out / f"{split}.bin", np.uint16).tolist()
        assert (told.tokens, told.max_token_id) == (len(tokens), max(tokens))
        assert told.documents == tokens.count(0)
        naive = -sum(n / len(tokens) * log(n / len(tokens)) for n in Counter(tokens).values())
        assert told.unigram_entropy_nats == pytest.approx(naive)
        assert told.unigram_entropy_bits == pytest.approx(naive / log(2))
    corpus = Corpus(
        prepared.out / "train", 16, known.vocab_size, rules=DocumentRules(eod_mask_loss=True)
    )
    assert corpus.eod_id == 0
    assert "train" in str(prepared) and f"{known.splits['train'].tokens:,} tokens" in str(prepared)


def test_again_does_nothing_and_says_so(texts: Path, prepared: Outcome) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.out.iterdir()}
    again = prepare_files([texts], prepared.out, VOCAB, 0.2)
    assert not again.built and again.fingerprint == prepared.fingerprint
    assert "nothing to do" in str(again)
    assert {path: path.stat().st_mtime_ns for path in prepared.out.iterdir()} == before


@pytest.mark.torture
def test_killed_leaves_no_half_and_a_new_process_gives_the_same_bytes(
    texts: Path, prepared: Outcome, tmp_path: Path
) -> None:
    """SIGKILL between the splits, in a process with another hash seed;
    then the whole in a third process.
    """
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom meshwright.data.prepare.stdlib"
        " import prepare_files\ndef say(line):\n    if line.startswith(sys.argv[3]):"
        " os.kill(os.getpid(), signal.SIGKILL)\nprepare_files([Path(sys.argv[1])],"
        f" Path(sys.argv[2]), {VOCAB}, 0.2, say=say)\n"
    )
    out = tmp_path / "corpus"
    killed = subprocess.run(
        [sys.executable, "-c", code, str(texts), str(out), "writing validation"], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [path.name for path in tmp_path.glob(".corpus.partial.*/train.idx")] == ["train.idx"]
    whole = subprocess.run([sys.executable, "-c", code, str(texts), str(out), "never"], check=False)
    assert whole.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"], (
        "what the killed process left is gone"
    )
    assert contents(out) == contents(prepared.out)


def test_damage_is_built_again(texts: Path, prepared: Outcome, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    for spoil in ("train.bin", "tokenizer.json", "fingerprint.json"):
        prepare_files([texts], out, VOCAB, 0.2, split=SplitRule.DOCUMENTS)
        (out / spoil).write_bytes(b"spoiled")
        again = prepare_files([texts], out, VOCAB, 0.2, split=SplitRule.DOCUMENTS)
        assert again.built
        assert contents(out) == contents(prepared.out)
    (out / "validation.idx").unlink()
    assert prepare_files([texts], out, VOCAB, 0.2, split=SplitRule.DOCUMENTS).built
    assert contents(out) == contents(prepared.out)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_another_corpus_is_not_overwritten_unasked(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    prepare_files([texts], out, 280, 0.2)
    before = contents(out)
    with raises("MW-DATA-083", "vocab_size=280", "vocab_size=300"):
        prepare_files([texts], out, VOCAB, 0.2)
    assert contents(out) == before
    assert prepare_files([texts], out, VOCAB, 0.2, replace=True).built
    assert contents(out) != before


def test_other_files_are_never_touched(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with raises("MW-DATA-042", "thesis.txt"):
        prepare_files([texts], tmp_path, VOCAB, replace=True)
    with raises("MW-DATA-041"):
        prepare_files([texts], tmp_path / "thesis.txt", VOCAB)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "train.bin").write_bytes(b"theirs")
    with raises("MW-DATA-082", "fingerprint.json"):
        prepare_files([texts], tmp_path / "theirs", VOCAB)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"
    assert contents(tmp_path / "theirs") == {"train.bin": b"theirs"}


def test_split_is_by_name_and_not_by_order(texts: Path, tmp_path: Path) -> None:
    """More files, another root folder, another order of paths: no document changes its split."""
    listed = sorted(path for path in texts.rglob("*.txt"))
    one = sources.split(sources.files(listed, root=texts), 0.3, SplitRule.DOCUMENTS)
    other = sources.split(sources.files(listed[::-1], root=texts), 0.3, SplitRule.DOCUMENTS)
    fewer = sources.split(sources.files(listed[:20], root=texts), 0.3, SplitRule.DOCUMENTS)
    assert one == other
    validation = {part.document.name for part in one.validation}
    assert 0 < len(validation) < 20
    assert {part.document.name for part in fewer.validation} == validation & {
        part.document.name for part in (*fewer.train, *fewer.validation)
    }


def test_share_of_validation(texts: Path) -> None:
    source = sources.files([texts])
    assert sources.split(source, 0.0, SplitRule.DOCUMENTS).validation == ()
    assert len(sources.split(source, 1e-9, SplitRule.DOCUMENTS).validation) == 1, (
        "asked for some, so there is one"
    )
    assert len(sources.split(source, 0.999999, SplitRule.DOCUMENTS).train) >= 1
    for share in (-0.1, 1.0):
        with raises("MW-DATA-075", f"validation_share={share}"):
            sources.split(source, share, SplitRule.DOCUMENTS)


def test_no_validation(texts: Path, tmp_path: Path) -> None:
    summary = prepare_files(
        [texts / "1.txt" if (texts / "1.txt").exists() else texts / "0.txt"],
        tmp_path / "c",
        VOCAB,
        0.0,
    )
    assert set(summary.fingerprint.splits) == {"train"}
    assert sorted(contents(tmp_path / "c")) == [
        "fingerprint.json",
        "tokenizer.json",
        "train.bin",
        "train.idx",
    ]
    with raises("MW-DATA-076", "0.txt"):
        prepare_files([texts / "0.txt"], tmp_path / "d", VOCAB, 0.5, split=SplitRule.DOCUMENTS)


def test_text_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("straße".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, code, values in (
        ("latin.txt", "MW-DATA-077", ("latin.txt", "0xdf", 4)),
        ("nowhere.txt", "MW-DATA-071", ("nowhere.txt",)),
        ("empty.txt", "MW-DATA-074", (1,)),
    ):
        with raises(code, *values):
            prepare_files([tmp_path / name], tmp_path / "out", VOCAB)
    with raises("MW-DATA-072"):
        prepare_files([], tmp_path / "out", VOCAB)
    assert not (tmp_path / "out").exists()


def test_vocabulary_out_of_range(texts: Path, tmp_path: Path) -> None:
    with raises("MW-DATA-094", 256, 257):
        prepare_files([texts], tmp_path / "out", 256)
    with raises("MW-DATA-125", "999,999,999", "4,194,304"):
        prepare_files([texts], tmp_path / "out", 999_999_999)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_file_missing_or_wrong(tmp_path: Path) -> None:
    with raises("MW-DATA-095", "tokenizer.json"):
        tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "none"}))
    with raises("MW-DATA-097", "tokenizer.json"):
        tokenizer.load(tmp_path / "tokenizer.json")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    [document] = sources.files([tmp_path / "a.txt"]).documents
    (tmp_path / "a.txt").write_text("two")
    with raises("MW-DATA-069", "a.txt"):
        document.text()


def test_standard_library_is_a_source() -> None:
    """Only the listing: the whole preparation is what the demo runs."""
    source = sources.stdlib()
    names = [document.name for document in source.documents]
    assert {"os.py", "asyncio/events.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names) and len(names) > 300
    assert not [
        name
        for name in names
        if {"test", "tests", "site-packages", "idle_test"} & set(name.split("/"))
    ]
    assert source == sources.stdlib()
