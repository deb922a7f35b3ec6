"""Bits per byte: the bytes are those of the text,
also where a tokenizer puts a blank before each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from meshwright.config import RunConfig
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.order import OnceInOrder
from meshwright.data.prepare.records import Form
from meshwright.inference.corpora import count_text
from meshwright.inference.evaluate import check
from tests.framework.data.corpora import END, bytes_tokenizer, made, write_lines
from tests.support.errors import raises

TEXTS = ["a", "two words", "straße 東京", "\n", "z" * 40]


@pytest.fixture(params=[False, True], ids=["plain", "blank"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    file = str(folder / "tokenizer.json")
    found = Tokenizer.from_file(file)
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=request.param, use_regex=False)
    found.save(file)
    return folder


def bytes_counted(out: Path, length: int, **options: Any) -> int | None:
    rules = DocumentRules(
        options.get("packing", "stream"), options.get("document_boundaries", False)
    )
    corpus = Corpus(out / "train", length, rules=rules)
    source = CorpusSource(corpus, OnceInOrder(corpus.num_samples))
    found = count_text(source, str(out / "tokenizer.json"), corpus.num_samples)
    return None if found is None else found.bytes


def test_bytes_of_texts_one_after_the_other(tokenizer: Path, tmp_path: Path) -> None:
    """In windows of one token all are labels but the first of all,
    a blank or a letter of one byte.
    """
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    whole = sum(len(text.encode()) for text in TEXTS)
    has_blank = len(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("a").ids) == 2
    made(tmp_path / "out", tokenizer, file)
    assert bytes_counted(tmp_path / "out", 1) == whole - (not has_blank)
    made(tmp_path / "bos", tokenizer, file, begin_token=END)
    assert bytes_counted(tmp_path / "bos", 1) == whole


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Of as many tokens, so that no id gives it away; the same one, written down anew, is none."""
    tokenizer, other = (
        bytes_tokenizer(tmp_path / "one"),
        bytes_tokenizer(tmp_path / "other", end="<end>"),
    )
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    made(tmp_path / "out", tokenizer, file)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads((tokenizer / "tokenizer.json").read_text()), indent=1))

    def checked(named: Path) -> None:
        prefix = str(tmp_path / "out/train")
        data = {
            "train": prefix,
            "validation": prefix,
            "tokenizer": str(named),
            "sequence_length": 4,
        }
        options = {
            "vocab_size": 300,
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "max_sequence_length": 4,
        }
        tree = {
            "data": data,
            "model": {"options": options},
            "batch": {"micro_batch_size": 1, "chunks": 1},
        }
        check(RunConfig.model_validate(tree), 1)

    checked(tokenizer / "tokenizer.json")
    checked(again)
    with raises("MW-INFERENCE-002", "other/tokenizer.json", "out/train"):
        checked(other / "tokenizer.json")


@pytest.mark.parametrize("boundaries", [False, True])
def test_bytes_of_responses(tokenizer: Path, tmp_path: Path, boundaries: bool) -> None:
    """Encoded by themselves, each with a blank of its own."""
    file = write_lines(
        tmp_path / "a.jsonl", [{"prompt": f"{text}?", "response": text} for text in TEXTS]
    )
    made(tmp_path / "out", tokenizer, file, form=Form.PAIRS)
    found = bytes_counted(
        tmp_path / "out", 100, packing="documents", document_boundaries=boundaries
    )
    assert found == sum(len(text.encode()) for text in TEXTS)
