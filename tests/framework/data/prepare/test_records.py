"""What a record becomes: which tokens of pairs and conversations count,
and what `data show` makes of them.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.data.corpus import Corpus
from meshwright.data.prepare.records import Form, RecordKeys
from meshwright.data.prepare.sample_text import show, splits_of
from meshwright.data.span_corruption import open_corpus
from meshwright_launch.cli import main
from tests.framework.data.corpora import END, bytes_tokenizer, made, write_lines
from tests.support.errors import raises

PAIRS = [
    {"prompt": "2+2=", "response": "4"},
    {"prompt": "", "response": "straße 東京"},
    {"prompt": "é:", "response": "!"},
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def counted(out: Path, split: str = "train") -> list[tuple[str, bool]]:
    """Runs of text of a corpus, with whether they count."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokens, mask = (
        np.fromfile(out / f"{split}.bin", np.uint16),
        np.fromfile(out / f"{split}.mask", np.uint8),
    )
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(mask)]
    return [
        (tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(mask[a]))
        for a, b in pairwise(edges)
    ]


def test_pairs(tokenizer: Path, tmp_path: Path) -> None:
    outcome = made(
        tmp_path / "out", tokenizer, write_lines(tmp_path / "a.jsonl", PAIRS), form=Form.PAIRS
    )
    assert counted(tmp_path / "out") == [
        ("2+2=", False), (f"4{END}straße 東京{END}", True), ("é:", False), (f"!{END}", True),
    ]  # fmt: skip
    assert outcome.fingerprint.splits["train"].counting == 1 + 14 + 1 + 3
    assert "labels" in str(outcome) and "train.mask" in outcome.fingerprint.files


def test_without_its_mask_a_corpus_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    """Otherwise a copy without it would be trained on prompts too, without a word."""
    out = tmp_path / "out"
    made(out, tokenizer, write_lines(tmp_path / "a.jsonl", PAIRS), form=Form.PAIRS)
    with raises("MW-DATA-093", "train.mask"):
        open_corpus(out / "train", 8, 300)
    (out / "train.mask").unlink()
    with raises("MW-DATA-008", "train.mask", 19, 26):
        Corpus(out / "train", 4)


def test_the_entropy_of_a_corpus_is_that_of_its_labels(tokenizer: Path, tmp_path: Path) -> None:
    """What a loss on responses is held against: -sum p ln p over what the mask lets through,
    counted by hand.
    """
    out = tmp_path / "out"
    pairs = [{"prompt": "never a label " * 9, "response": "aab"}] * 20
    outcome = made(out, tokenizer, write_lines(tmp_path / "a.jsonl", pairs), form=Form.PAIRS)
    # of four labels two are a, one b, one the end
    by_hand = -(0.5 * log(0.5) + 2 * 0.25 * log(0.25))
    assert outcome.fingerprint.splits["train"].unigram_entropy_nats == pytest.approx(
        by_hand, rel=1e-12
    )


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}]
)
def test_a_turn_that_does_not_count_is_context(
    flag: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    talk = [
        turn("user", "p"),
        turn("assistant", "a", **flag),
        turn("user", "q"),
        turn("assistant", "b", weight=1),
    ]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    made(tmp_path / "out", tokenizer, lines, form=Form.MESSAGES)
    context = f"<|user|>\np\n<|assistant|>\na{END}<|user|>\nq\n<|assistant|>\n"
    assert counted(tmp_path / "out") == [(context, False), (f"b{END}", True)]


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (turn("assistant", "a", weight=0.5), "weight = 0.5 in message 2"),
        (turn("assistant", "a", train="no"), "train = 'no' in message 2"),
        (turn("tool", "a", train=True), "train = True in message 2"),
        (turn("assistant", "a", weight=0), "'assistant'"),
        (turn("assistant", "", tool_calls=[{"id": "1"}]), "'tool_calls' in message 2"),
        (turn("assistant", "a", train_detail=[{"begin_offset": 0}]), "'train_detail' in message 2"),
    ],
)
def test_what_a_turn_says_is_not_left_out_without_a_word(
    message: dict[str, Any], value: str, tokenizer: Path, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": [turn("user", "p"), message]}])
    with raises("MW-DATA-050", value):
        made(tmp_path / "out", tokenizer, lines, form=Form.MESSAGES)


def test_absent_fields_of_rows_are_nulls(tokenizer: Path, tmp_path: Path) -> None:
    """A parquet column has all fields for each message."""
    talk = [
        turn("user", "p", weight=None, tool_calls=None),
        turn("assistant", "a", weight=None, tool_calls=[]),
    ]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    made(tmp_path / "out", tokenizer, lines, form=Form.MESSAGES)
    assert counted(tmp_path / "out")[-1] == (f"a{END}", True)


@pytest.mark.parametrize(
    ("record", "form", "value"),
    [
        ({"content": "a", "url": "b"}, Form.TEXT, "--text-key content"),
        ({"page": "a"}, Form.TEXT, "--text-key KEY"),
        ({"prompt": "a", "completion": "b"}, Form.PAIRS, "--response-key completion"),
        ({"instruction": "a", "output": "b"}, Form.PAIRS, "--prompt-key instruction"),
        ({"conversations": []}, Form.MESSAGES, "'conversations'"),
    ],
)
def test_a_missing_key_comes_with_the_option_that_names_it(
    record: dict[str, Any], form: Form, value: str, tokenizer: Path, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [record])
    with raises("MW-DATA-050", value):
        made(tmp_path / "out", tokenizer, lines, form=form)
    with raises("MW-DATA-040", value):
        made(tmp_path / "out", tokenizer, lines, form=form, skip_broken=True)


def test_pairs_under_other_keys(tokenizer: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"instruction": "2+2=", "output": "4"}])
    keys = RecordKeys(prompt="instruction", response="output")
    made(tmp_path / "out", tokenizer, lines, form=Form.PAIRS, keys=keys)
    assert counted(tmp_path / "out") == [("2+2=", False), (f"4{END}", True)]
    with raises("MW-DATA-044", "response_key", "'output'", "'response'"):
        made(
            tmp_path / "out",
            tokenizer,
            lines,
            form=Form.PAIRS,
            keys=keys._replace(response="response"),
        )


def test_a_key_without_effect_is_refused(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", PAIRS)
    words = [
        "data",
        "prepare",
        str(lines),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--format", "pairs", "--text-key", "body"]) == 2
    assert "--text-key body has no effect with --format pairs" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_that_is_not_used_is_named(place: str, tmp_path: Path) -> None:
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    (folder / place).write_text('{"chat_template": "x", "eos_token": "</s>"}')
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": TALK}])
    outcome = made(tmp_path / "out", folder, lines, form=Form.MESSAGES)
    assert f"not with the chat template in {folder / place}" in str(outcome)
    text = made(tmp_path / "text", folder, write_lines(tmp_path / "b.jsonl", [{"text": "a"}]))
    assert "chat template" not in str(text)


def test_messages_from_lines_and_rows_and_any_number_of_workers(
    tokenizer: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"messages": TALK}, {"messages": TALK[1:3]}] * 5
    write_lines(tmp_path / "a.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    talk = [
        ("<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n", False), (f"Hello{END}", True),
        ("<|user|>\nBye\n<|assistant|>\n", False), (f"See you{END}", True),
        ("<|user|>\nHi\n<|assistant|>\n", False), (f"Hello{END}", True),
    ]  # fmt: skip
    for number, (name, workers) in enumerate([("a.jsonl", 1), ("a.jsonl", 3), ("a.parquet", 2)]):
        out = tmp_path / f"out{number}"
        made(out, tokenizer, tmp_path / name, form=Form.MESSAGES, num_workers=workers)
        assert counted(out) == talk * 5


@pytest.mark.parametrize(
    ("form", "record", "value"),
    [
        (Form.PAIRS, {"prompt": "a"}, "1 has no key 'response'"),
        (Form.PAIRS, {"prompt": "a", "response": ""}, "1 has an empty 'response'"),
        (Form.PAIRS, {"prompt": ["a"], "response": "b"}, "1 has a list as 'prompt'"),
        (Form.MESSAGES, {"messages": []}, "1 has no list of messages"),
        (Form.MESSAGES, {"messages": [{"role": "user"}]}, "'content' in message 1"),
        (Form.MESSAGES, {"messages": TALK[:2]}, "1 has no message of the 'assistant'"),
        (Form.MESSAGES, {"messages": [{"role": "assistant", "content": ""}]}, "1 has no text"),
        (
            Form.MESSAGES,
            {"messages": [*TALK, {"role": "user", "content": 5}]},
            "'content of message 6'",
        ),
    ],
)
def test_what_is_wrong_with_a_pair(
    tokenizer: Path, tmp_path: Path, form: Form, record: Any, value: str
) -> None:
    with raises("MW-DATA-050", value):
        made(tmp_path / "out", tokenizer, write_lines(tmp_path / "a.jsonl", [record]), form=form)


def test_show(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line: counts, where documents begin, what does not count in braces."""
    source, out = write_lines(tmp_path / "a.jsonl", PAIRS), str(tmp_path / "out")
    words = [
        "data",
        "prepare",
        str(source),
        "--format",
        "pairs",
        "--validation-share",
        "0",
        "--workers",
        "1",
    ]
    assert main([*words, "--tokenizer", str(tokenizer), "--out", out]) == 0
    assert "train       3 documents" in capsys.readouterr().out
    assert main(["data", "show", out, "--packing", "documents", "--sequence-length", "22"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"{out}/train: 3 documents, 26 tokens, 19 of them labels",
        '  as samples of 22 tokens, packing = "documents": 2',
        "  tokens of a document: 5 to 15, 10 % 5, median 6, 90 % 6; none is longer than a sample",
        "--- sample 0: 21 tokens, 16 labels, 2 documents",
        f"[document] {{2+2=}}4{END}",
        f"[document] straße 東京{END}",
        "--- sample 1: 5 tokens, 2 labels, 1 documents",
        f"[document] {{é:}}!{END}",
    ]
    assert main(["data", "show", str(tmp_path / "nothing")]) == 2
    assert "there is no corpus at" in capsys.readouterr().err


def test_show_of_a_damaged_corpus_and_of_another_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    made(tmp_path / "out", tokenizer, write_lines(tmp_path / "a.jsonl", [{"text": "some text"}]))
    [prefix] = splits_of(tmp_path / "out")
    small = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    from tokenizers import models

    small.model = models.BPE(vocab={"a": 0}, merges=[])
    small.save(str(tmp_path / "small.json"))
    with raises("MW-DATA-089", "small.json"):
        show(prefix, tmp_path / "small.json", 1, 8, "stream")
    (tmp_path / "out/train.bin").write_bytes(b"cut")
    with raises("MW-DATA-028", "train.bin", "3 bytes", "10 uint16"):
        show(prefix, tokenizer / "tokenizer.json", 1, 8, "stream")
