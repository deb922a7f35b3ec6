"""Tokenizers from anywhere: each text has one encoding, what is lost is told,
and a bad one is an error of one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from meshwright.config import RunConfig
from meshwright.data import fingerprint
from meshwright.data.fingerprint import file_sha256
from meshwright.data.prepare.tokenizer_files import drops_characters
from meshwright.data.same_tokens import check_same_tokens
from meshwright.data.sources import open_sources
from meshwright.data.tokenizer import load
from tests.framework.data.corpora import END, bytes_tokenizer, contents, made, write_lines
from tests.support.errors import raises


def changed(folder: Path, **sections: Any) -> Path:
    """Return the tokenizer of bytes with other sections in its file."""
    file = bytes_tokenizer(folder) / "tokenizer.json"
    parts = json.loads(file.read_text())
    for name, value in sections.items():
        parts[name] = {**parts[name], **value} if isinstance(parts[name], dict) else value
    file.write_text(json.dumps(parts))
    return folder


def merging(folder: Path, merges: list[list[str]]) -> Path:
    """Return the tokenizer of bytes with merges, their tokens after those of the bytes."""
    parts = json.loads((bytes_tokenizer(folder) / "tokenizer.json").read_text())
    ids = {**parts["model"]["vocab"], **{"".join(pair): 300 + i for i, pair in enumerate(merges)}}
    return changed(folder, model={"vocab": ids, "merges": merges})


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "a.jsonl", [{"text": "the quick brown fox jumps over the lazy dog " * 3}] * 20
    )


def test_dropout_of_merges_is_off(lines: Path, tmp_path: Path) -> None:
    pairs = [["t", "h"], ["th", "e"], ["o", "v"], ["ov", "e"], ["q", "u"], ["b", "r"], ["l", "a"]]
    folder = merging(tmp_path / "tokenizer", pairs)
    file = folder / "tokenizer.json"
    plain = load(file).encode("the quick").ids
    changed_parts = json.loads(file.read_text())
    changed_parts["model"]["dropout"] = 0.5
    file.write_text(json.dumps(changed_parts))
    assert any(Tokenizer.from_file(str(file)).encode("the quick").ids != plain for _ in range(50))
    assert all(load(file).encode("the quick").ids == plain for _ in range(50))
    first, second = (made(tmp_path / name, folder, lines).out for name in ("one", "two"))
    assert contents(first)["train.bin"] == contents(second)["train.bin"]


@pytest.mark.parametrize(
    ("model", "drops"),
    [
        (models.BPE(vocab={"h": 0, "e": 1, END: 2}, merges=[]), True),
        (models.BPE(vocab={"h": 0, "e": 1, END: 2, "?": 3}, merges=[], unk_token="?"), False),
        (models.WordLevel({"h": 0, END: 1, "?": 2}, unk_token="?"), False),
    ],
)
def test_a_note_says_that_characters_are_left_out(
    model: Any, drops: bool, lines: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(model)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert drops_characters(folder / "tokenizer.json") == drops
    notes = made(tmp_path / "out", folder, lines, end_token=END).notes
    assert any("has no unknown token and no byte tokens" in note for note in notes) == drops


def test_replacements_that_double_a_text_again_and_again_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for steps, is_refused in ((6, False), (7, True), (26, True)):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * steps)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if is_refused:
            with raises("MW-DATA-097"):
                load(tmp_path / "tokenizer.json")
        else:
            assert load(tmp_path / "tokenizer.json").encode("a").tokens


def test_a_private_file_is_not_copied_to_a_corpus(lines: Path, tmp_path: Path) -> None:
    place = bytes_tokenizer(tmp_path / "bytes")
    (tmp_path / "secret").write_text("key")
    (place / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with raises("MW-DATA-127"):
        made(tmp_path / "out", place, lines)
    assert not (tmp_path / "out").exists()


def test_bytes_have_a_token_each(tmp_path: Path) -> None:
    assert not drops_characters(bytes_tokenizer(tmp_path / "bytes") / "tokenizer.json")
    spelled = Tokenizer(models.BPE(vocab={"<0x68>": 0, END: 1}, merges=[], byte_fallback=True))
    spelled.pre_tokenizer = pre_tokenizers.Whitespace()
    spelled.save(str(tmp_path / "tokenizer.json"))
    assert not drops_characters(tmp_path / "tokenizer.json")


def test_a_panic_of_the_library_is_a_message(tmp_path: Path) -> None:
    folder = changed(
        tmp_path / "tokenizer", normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
    )
    with raises("MW-DATA-097"):
        load(folder / "tokenizer.json")


def test_a_word_without_a_token_names_the_file(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    Tokenizer(models.WordLevel({"h": 0, END: 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer/tokenizer.json")
    )
    for workers in (1, 2):
        with raises("MW-DATA-122", lines):
            made(
                tmp_path / "out", tmp_path / "tokenizer", lines, end_token=END, num_workers=workers
            )


def test_an_id_beyond_int32_is_refused(lines: Path, tmp_path: Path) -> None:
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    changed(folder, model={"vocab": {"h": 2**31, "e": 1}})
    with raises("MW-DATA-123", "2,147,483,648"):
        made(tmp_path / "out", tmp_path / "tokenizer", lines, end_token=END)


def test_corpora_of_a_run_have_the_same_tokens(lines: Path, tmp_path: Path) -> None:
    one = made(
        tmp_path / "one", merging(tmp_path / "t1", [["t", "h"]]), lines, validation_share=0.2
    ).out
    more = made(tmp_path / "more", merging(tmp_path / "t2", [["t", "h"], ["q", "u"]]), lines).out
    other = made(
        tmp_path / "other", merging(tmp_path / "t3", [["q", "u"]]), lines, validation_share=0.2
    ).out
    check_same_tokens([one / "train", more / "train"], str(one / "tokenizer.json"))
    known = fingerprint.read(one)
    assert known is not None and known.files["tokenizer.json"] == file_sha256(
        one / "tokenizer.json"
    )
    different = ("MW-DATA-124", 300, "'th'", "'qu'")
    for prefixes, tokenizer in (([one, other], None), ([one], other), ([more, one, other], one)):
        with raises(*different):
            named = None if tokenizer is None else str(tokenizer / "tokenizer.json")
            check_same_tokens([prefix / "train" for prefix in prefixes], named)

    def config(train: Any, validation: str) -> RunConfig:
        data = {"train": train, "validation": validation, "sequence_length": 16}
        options = {
            "vocab_size": 302,
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "max_sequence_length": 16,
        }
        return RunConfig.model_validate(
            {"model": {"builder": "meshwright_models.gpt2:build", "options": options}, "data": data}
        )

    mixed = [{"path": f"{one}/train", "weight": 1.0}, {"path": f"{other}/train", "weight": 1.0}]
    open_sources(config(f"{one}/train", f"{one}/validation"))
    for train, validation in (
        (mixed, f"{one}/validation"),
        (f"{one}/train", f"{other}/validation"),
    ):
        with raises(*different):
            open_sources(config(train, validation))
    (other / "tokenizer.json").unlink()  # not beside the corpus: nothing to compare
    check_same_tokens([one / "train", other / "train"], None)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("tokenizer.model", "sentencepiece"),
        ("spiece.model", "sentencepiece"),
        ("cl100k_base.tiktoken", "tiktoken"),
        ("vocab.json", "AutoTokenizer"),
    ],
)
def test_tokenizer_files_of_other_libraries_come_with_their_conversion(
    name: str, how: str, lines: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / name).write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    for place in (folder, folder / name):
        with raises("MW-DATA-128", name, how):
            made(tmp_path / "out", place, lines)
