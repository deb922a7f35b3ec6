"""End tokens of exports: generation stops where the documents of the training corpora ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.data.tokenizer import find_tokenizer
from meshwright_interop.huggingface.end_tokens import add_document_ends
from tests.framework.data.corpora import END, bytes_tokenizer, made, write_lines

END_ID, TURN, TURN_ID = 256, "<|im_end|>", 257
"""Ids of the two tokens that may end a document: after those of the 256 bytes."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer

    folder = bytes_tokenizer(tmp_path / "tokenizer")
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known.add_special_tokens([TURN])
    known.save(str(folder / "tokenizer.json"))
    return folder


def corpus(tmp_path: Path, tokenizer: Path, name: str, end: str) -> str:
    """The prefix of a corpus whose documents end with a token."""
    lines = write_lines(tmp_path / f"{name}.jsonl", [{"text": "hello"}] * 3)
    made(tmp_path / name, tokenizer, lines, end_token=end)
    return str(tmp_path / name / "train")


def config_of(**data: Any) -> RunConfig:
    tree = {
        "run": {"name": "a"},
        "model": {"builder": "meshwright_models.gpt2:build", "options": {"vocab_size": 258}},
        "data": {"sequence_length": 8, **data},
        "train": {"steps": 9},
    }
    return RunConfig.model_validate_json(json.dumps(tree))


def exported(tmp_path: Path, tokenizer: Path, **files: dict[str, Any]) -> Path:
    """A directory as an export writes it."""
    folder = tmp_path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    for name, fields in {"config": {"eos_token_id": None}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


def fields(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_the_end_of_the_documents_is_the_end_of_generation(tokenizer: Path, tmp_path: Path) -> None:
    config = config_of(train=corpus(tmp_path, tokenizer, "one", END))
    folder = exported(
        tmp_path, tokenizer, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    notes = add_document_ends(folder, config.data)
    assert notes == [
        f"eos_token_id = {END_ID}: the documents of the training corpus end with '{END}'"
    ]
    assert (
        fields(folder, "config")["eos_token_id"]
        == fields(folder, "generation_config")["eos_token_id"]
        == END_ID
    )
    assert fields(folder, "tokenizer_config")["eos_token"] == END


@pytest.mark.parametrize("known", [END_ID, [END_ID, 5]], ids=["one", "several"])
def test_another_end_than_the_files_name_is_added_before_them(
    known: Any, tokenizer: Path, tmp_path: Path
) -> None:
    config = config_of(train=corpus(tmp_path, tokenizer, "one", TURN))
    folder = exported(
        tmp_path,
        tokenizer,
        config={"eos_token_id": 3},
        generation_config={"eos_token_id": known, "top_p": 0.5},
        tokenizer_config={"eos_token": {"content": END}},
        special_tokens_map={"eos_token": END, "pad_token": "x"},
    )
    assert add_document_ends(folder, config.data)
    ids = [TURN_ID, *(known if isinstance(known, list) else [known])]
    assert fields(folder, "generation_config") == {"eos_token_id": ids, "top_p": 0.5}
    assert fields(folder, "config")["eos_token_id"] == ids
    assert fields(folder, "special_tokens_map") == {"eos_token": TURN, "pad_token": "x"}


def test_files_that_have_it_stay_as_they_are(tokenizer: Path, tmp_path: Path) -> None:
    config = config_of(train=corpus(tmp_path, tokenizer, "one", TURN))
    folder = exported(tmp_path, tokenizer, generation_config={"eos_token_id": [END_ID, TURN_ID]})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert add_document_ends(folder, config.data) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_corpora_with_different_ends(tokenizer: Path, tmp_path: Path) -> None:
    """Of a mixture, and of a later stage: each of them ends a text."""
    one, other = (
        corpus(tmp_path, tokenizer, name, end) for name, end in (("one", END), ("other", TURN))
    )
    folder = exported(tmp_path, tokenizer)
    add_document_ends(
        folder, config_of(train=[{"path": one, "weight": 1}, {"path": other, "weight": 1}]).data
    )
    assert fields(folder, "config")["eos_token_id"] == [END_ID, TURN_ID]
    folder = exported(tmp_path, tokenizer)
    add_document_ends(folder, config_of(train=other, stages=[{"train": one, "from_step": 5}]).data)
    assert fields(folder, "config")["eos_token_id"] == [TURN_ID, END_ID]


def test_a_tokenizer_is_found_beside_the_corpus_and_in_the_model(
    tokenizer: Path, tmp_path: Path
) -> None:
    """`meshwright sample` of an adapter's run, whose configuration names none."""
    prefix = corpus(tmp_path, tokenizer, "one", END)
    assert find_tokenizer(config_of(train=prefix).data) == tmp_path / "one" / "tokenizer.json"
    elsewhere = config_of(train=str(tmp_path / "moved" / "train")).data
    assert find_tokenizer(elsewhere) is None
    assert find_tokenizer(elsewhere, tokenizer) == tokenizer / "tokenizer.json"
    assert find_tokenizer(config_of(train=prefix, tokenizer="own.json").data, tokenizer) == Path(
        "own.json"
    )
