"""`meshwright data prepare --chat-template`: where the template comes from, lengths,
places of errors, and the corpus that a run reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import fingerprint as fingerprints
from meshwright.data.corpus import IGNORE, Corpus, DocumentRules
from meshwright.data.prepare.chat import template
from meshwright.data.prepare.chat.template import open_chat_template
from meshwright.data.prepare.records import Form
from meshwright_launch.cli import main
from tests.framework.data.corpora import END, bytes_tokenizer, contents, made, write_lines
from tests.framework.data.prepare import chats
from tests.framework.data.prepare.chats import CALLING, ONE, RECORDS, SEVERAL, TOOLS, turn
from tests.framework.data.prepare.test_chat_templates import (
    documents,
    rendered,
    transformers_tokenizer,
)
from tests.framework.data.prepare.test_preparation import in_a_fork
from tests.framework.data.prepare.test_records import counted
from tests.framework.data.prepare.test_tokenizers import merging
from tests.support.errors import raises
from tests.support.marks import long_row

SIMPLE = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}\n" + SIMPLE


def chat_folder(place: Path, text: str = SIMPLE, **settings: Any) -> Path:
    """Return a tokenizer of bytes with a template beside it."""
    folder = bytes_tokenizer(place, config={"eos_token": END, **settings})
    (folder / "chat_template.jinja").write_text(text)
    return folder


def prepared(out: Path, folder: Path, *sources: Path, **changes: Any) -> Any:
    usual = {"form": Form.MESSAGES, "chat_template": "tokenizer"}
    return made(out, folder, *sources, **{**usual, **changes})


def test_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data show` puts in braces what does not count."""
    folder = chat_folder(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": SEVERAL}, {"messages": ONE}])
    out = str(tmp_path / "out")
    words = ["data", "prepare", str(lines), "--format", "messages", "--chat-template", "tokenizer"]
    words += ["--tokenizer", str(folder), "--out", out, "--validation-share", "0"]
    assert main([*words, "--workers", "1", "--max-tokens", "60"]) == 0
    said = capsys.readouterr().out
    assert "train       2 documents" in said and "warning" not in said
    assert "cut         1 conversation, to the turns that fit 60 tokens" in said
    assert main([*words, "--workers", "2", "--max-tokens", "60"]) == 0
    assert "already complete" in capsys.readouterr().out
    show = ["data", "show", out, "--packing", "documents", "--sequence-length", "100"]
    assert main(show) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "[document] {user:What is 2+2?",
        "",
        "",
        f"assistant:}}Four, straße 東京.{END}",
        "[document] {user:Hi",
        f"assistant:}}Hello there.{END}",
    ]
    assert counted(Path(out)) == [
        ("user:What is 2+2?\n\n\nassistant:", False),
        (f"Four, straße 東京.{END}", True),
        ("user:Hi\nassistant:", False),
        (f"Hello there.{END}", True),
    ]


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        (["--format", "pairs", "--chat-template", "tokenizer"], "MW-DATA-137", "pairs"),
        (["--chat-template", "tokenizer"], "MW-DATA-137", "--format text"),
        (["--format", "messages", "--max-tokens", "9"], "MW-DATA-136", "--max-tokens 9"),
        (
            ["--format", "messages", "--chat-template", "tokenizer", "--bos", "a"],
            "MW-DATA-138",
            "--bos a",
        ),
        (["--format", "messages", "--chat-template", "none.jinja"], "MW-DATA-134", "none.jinja"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str],
    code: str,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = chat_folder(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": ONE}])
    place = ["--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(lines), *place, *words]) == 2
    said = capsys.readouterr().err
    assert code in said and value in said and "Traceback" not in said


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    """As for transformers: a file before tokenizer_config.json, `tool_use` where there are tools;
    special tokens as texts and as objects.
    """
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    file = folder / "tokenizer.json"
    with raises("MW-DATA-133", str(file)):
        open_chat_template("tokenizer", file)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {
        "chat_template": named,
        "bos_token": {"content": "<a>"},
        "eos_token": "<b>",
        "pad_token": None,
        "add_bos_token": True,
        "image_token": "<i>",
        "extra_special_tokens": {"audio_token": "<o>"},
    }
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<c>"}}')
    found = open_chat_template("tokenizer", file)
    assert found.texts == {"tool_use": "T", "default": "D"}
    specials = {"bos_token": "<a>", "image_token": "<i>", "audio_token": "<o>"}
    assert found.specials == {**specials, "eos_token": "<c>"}
    config.write_text(json.dumps({**settings, "added_tokens_decoder": {}}))
    assert open_chat_template("tokenizer", file).specials == {**specials, "eos_token": "<b>"}
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert open_chat_template("tokenizer", file).texts == {"default": "J"}
    (folder / "chat_template.jinja").write_text("F")
    assert open_chat_template("tokenizer", file).texts == {"default": "F"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert open_chat_template("tokenizer", file).texts == {"default": "F", "tool_use": "U"}
    own = tmp_path / "own.jinja"
    own.write_text("O")
    assert open_chat_template(str(own), file).texts == {"default": "O"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[]", "MW-DATA-134"),
        ('{"chat_template": 5}', "MW-DATA-134"),
        ('{"chat_template": [5]}', "MW-DATA-134"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', "MW-DATA-135"),
        ('{"chat_template": "' + "x" * (template.MAX_TEMPLATE_BYTES + 1) + '"}', "MW-DATA-134"),
        ("{", "MW-DATA-134"),
    ],
)
def test_files_of_a_template_that_are_none(content: str, code: str, tmp_path: Path) -> None:
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.json").write_text(content)
    with raises(code, "chat_template.json"):
        open_chat_template("tokenizer", folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with raises("MW-DATA-134", "chat_template.jinja"):
        open_chat_template("tokenizer", folder / "tokenizer.json")


def test_named_templates_are_chosen_by_the_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": SIMPLE},
        {"name": "tool_use", "template": "T" + SIMPLE},
    ]
    folder = bytes_tokenizer(
        tmp_path / "tokenizer",
        config={
            "eos_token": END,
            "chat_template": named,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    records: list[dict[str, Any]] = [
        {"messages": ONE},
        {"messages": ONE, "tools": TOOLS},
        {"messages": ONE, "tools": []},
        {"messages": ONE, "tools": json.dumps(TOOLS)},
    ]
    prepared(tmp_path / "out", folder, write_lines(tmp_path / "a.jsonl", records))
    found = documents(tmp_path / "out").ids
    theirs = transformers_tokenizer(folder)
    assert found[:3] == [rendered(theirs, record)["input_ids"] for record in records[:3]]
    assert found[3] == found[1] == found[2] and len(found[1]) == len(found[0]) + 1


def test_a_corpus_has_the_template_that_it_was_written_with(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": ONE}])
    own = tmp_path / "own.jinja"
    own.write_text("own:" + SIMPLE)
    prepared(tmp_path / "out", folder, lines, chat_template=str(own))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "own:" + SIMPLE
    assert fingerprints.damaged_files(tmp_path / "out", fingerprint_of(tmp_path / "out")) == []
    for changes in ({"chat_template": "tokenizer"}, {"chat_template": None}):
        with raises("MW-DATA-044", "chat_template"):
            prepared(tmp_path / "out", folder, lines, chat_template=changes["chat_template"])
    own.write_text("other:" + SIMPLE)
    with raises("MW-DATA-044", "chat_template"):
        prepared(tmp_path / "out", folder, lines, chat_template=str(own))


def fingerprint_of(out: Path) -> fingerprints.Fingerprint:
    known = fingerprints.read(out)
    assert known is not None
    return known


def test_a_date_is_that_of_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a resumed corpus would have two dates, and the same command would not find it done."""
    from meshwright.data.prepare.chat import opening

    folder = chat_folder(tmp_path / "tokenizer", DATED)
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": ONE}] * 3)
    now = iter(["2026-11-30T09:08:07", "2027-01-01T00:00:00", "2027-01-02T00:00:00"])
    monkeypatch.setattr(opening, "now_to_the_second", lambda: next(now))
    assert prepared(tmp_path / "out", folder, lines).built
    assert counted(tmp_path / "out")[0] == ("2026-11-30 09:08:07\nuser:Hi\nassistant:", False)
    assert not prepared(tmp_path / "out", folder, lines).built
    assert not prepared(tmp_path / "out", folder, lines).built
    assert next(now) == "2027-01-01T00:00:00"  # no other date was asked for
    # stopped in the middle: the rest gets the date of the beginning
    broken = write_lines(tmp_path / "b.jsonl", [{"messages": ONE}] * 3 + [{"messages": []}])
    with raises("MW-DATA-050", ":4"):
        prepared(tmp_path / "two", folder, broken)
    prepared(tmp_path / "two", folder, broken, skip_broken=True)
    assert {text for text, counts in counted(tmp_path / "two") if not counts} == {
        "2027-01-02 00:00:00\nuser:Hi\nassistant:"
    }
    known = fingerprint_of(tmp_path / "two").prepared
    assert known is not None and known.chat_date == "2027-01-02T00:00:00"


def test_conversations_are_cut_after_the_last_answer_that_fits(tmp_path: Path) -> None:
    """Those of which none fits are left out and counted; neither is an error."""
    folder = chat_folder(tmp_path / "tokenizer")
    talk = [each for n in range(9) for each in (turn("user", f"q{n}"), turn("assistant", f"a{n}"))]
    talk.append(turn("user", "bye"))
    long = [turn("user", "x" * 500), turn("assistant", "y")]
    records = [{"messages": talk}, {"messages": long}, {"messages": ONE}]
    lines = write_lines(tmp_path / "a.jsonl", records)
    each = len("user:q0\nassistant:a0") + 1
    for limit, turns in ((each * 3, 3), (each * 4 - 1, 3), (each * 9 + 8, 9), (each * 9 + 9, 9)):
        out = tmp_path / f"out{limit}"
        outcome = prepared(out, folder, lines, max_tokens=limit)
        ids, masks = documents(out)
        assert len(ids) == 2 and len(ids[0]) == each * turns + 9 * (limit == each * 9 + 9)
        assert sum(masks[0]) == turns * 3 and masks[0][each * turns - 1]
        known = outcome.fingerprint.prepared
        assert (known.cut, known.too_long, known.empty) == (int(limit < each * 9 + 9), 1, 0)
        assert outcome.fingerprint.source.documents == 2
        assert "too long    1 conversation, left out" in str(outcome)
    with raises("MW-DATA-040", "3 longer than --max-tokens 5"):
        prepared(tmp_path / "none", folder, lines, max_tokens=5)


def test_a_cut_conversation_is_rendered_as_one_that_ends_there(tmp_path: Path) -> None:
    """Qwen3 writes the reasoning of the last answer alone: that of the one that is kept."""
    folder = chats.folder_of("qwen3", tmp_path)
    talk = [
        turn("user", "Hi"),
        turn("assistant", "Hello", reasoning_content="first"),
        turn("user", "Bye " * 40),
        turn("assistant", "See you", train=False),
        turn("user", "?"),
        turn("assistant", "!"),
    ]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    prepared(tmp_path / "out", folder, lines, max_tokens=120)
    short = write_lines(tmp_path / "b.jsonl", [{"messages": talk[:2]}])
    prepared(tmp_path / "short", folder, short)
    assert documents(tmp_path / "out") == documents(tmp_path / "short")
    assert "first" in counted_text(tmp_path / "out", transformers_tokenizer(folder))


def counted_text(out: Path, tokenizer: Any) -> str:
    ids, masks = documents(out)
    counting = [one for one, counts in zip(ids[0], masks[0], strict=True) if counts]
    return str(tokenizer.decode(counting))


@pytest.mark.parametrize(
    ("record", "value"),
    [
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "no 'content' in message 1"),
        ({"messages": [turn("user", "a")]}, "no message of the 'assistant' that counts"),
        ({"messages": [turn("user", "a"), turn("assistant", "b", weight=0)]}, "that counts"),
        ({"messages": [turn("user", "a", train=True), *ONE]}, "train = True in message 1"),
        ({"messages": [*ONE, turn("assistant", "b", train_detail=[1])]}, "'train_detail'"),
        ({"messages": [*ONE, {"role": "assistant", "tool_calls": {"a": 1}}]}, "no list"),
        ({"messages": [*ONE, turn("user", 5)]}, "no text as 'content' of message 3"),  # type: ignore[arg-type]
        ({"messages": ONE, "tools": "["}, "'tools' as a text that is not valid JSON"),
        ({"messages": ONE, "tools": [5]}, "'tools' that are no list of objects"),
        ({"messages": ONE, "chat_template_kwargs": [5]}, "that are no object"),
        (
            {"messages": ONE, "chat_template_kwargs": {"messages": 5}},
            "'messages' in 'chat_template_kwargs'",
        ),
        ({"messages": [turn("user", "\ud800"), ONE[1]]}, "half of a surrogate pair"),
        ({"messages": [turn("user", ""), turn("assistant", "")]}, "writes no text"),
        ({"conversations": ONE}, "write 'conversations' as messages"),
        # of the template
        ({"messages": CALLING}, "chat_template.jinja badly: it"),
    ],
)
def test_a_record_that_does_not_fit_is_named(record: Any, value: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", SIMPLE.replace("eos_token if", "'' if"))
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'messages': ONE})}\n\n{json.dumps(record)}\n")
    with raises("MW-DATA-050", f"{path}:3", value):
        prepared(tmp_path / "out", folder, path)
    outcome = prepared(tmp_path / "out", folder, path, skip_broken=True)
    assert outcome.fingerprint.prepared.skipped == 1
    assert len(documents(tmp_path / "out").ids) == 1


def test_any_number_of_workers_and_rows_give_the_same_tokens(tmp_path: Path) -> None:
    """A parquet file has a null for each field that a message lacks, and tools as a text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = chats.folder_of("qwen3", tmp_path)
    records = [RECORDS[kind] for kind in ("calling", "several", "system", "one")] * 20
    lines = write_lines(tmp_path / "a.jsonl", records)
    prepared(tmp_path / "one", folder, lines, num_workers=1)
    prepared(tmp_path / "three", folder, lines, num_workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    rows = [{**each, "tools": json.dumps(each["tools"]) if "tools" in each else None}
            for each in records]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    prepared(tmp_path / "rows", folder, tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    prepared(tmp_path / "tables", folder, tmp_path / "b.parquet")
    pq.write_table(pa.table({"messages": [each["messages"] for each in records[1:2]]}),
                   tmp_path / "c.parquet")  # fmt: skip
    prepared(tmp_path / "bare", folder, tmp_path / "c.parquet")
    whole = documents(tmp_path / "one")
    assert documents(tmp_path / "rows") == documents(tmp_path / "tables") == whole
    assert documents(tmp_path / "bare") == (whole.ids[1:2], whole.masks[1:2])


def test_arguments_of_other_calls_in_a_table_are_not_written(tmp_path: Path) -> None:
    """A column of calls has the arguments of all of them, nulls in most."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = chats.folder_of("qwen3", tmp_path)
    records = []
    for name in ("a", "b"):
        call = {"type": "function", "function": {"name": "add", "arguments": {name: 1}}}
        records.append({"messages": [turn("user", "1"), turn("assistant", "", tool_calls=[call])]})
    prepared(tmp_path / "lines", folder, write_lines(tmp_path / "a.jsonl", records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    prepared(tmp_path / "rows", folder, tmp_path / "a.parquet")
    assert documents(tmp_path / "rows") == documents(tmp_path / "lines")


def test_a_run_reads_whole_conversations_and_their_labels(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": SEVERAL}, {"messages": ONE}] * 2)
    prepared(tmp_path / "out", folder, lines)
    ids, masks = documents(tmp_path / "out")
    length = len(ids[0]) + len(ids[1])
    corpus = Corpus(tmp_path / "out" / "train", length, rules=DocumentRules("documents", True))
    assert corpus.num_samples == 2
    for number in range(2):
        example = corpus.example(number)
        assert example.tokens.tolist() == ids[0] + ids[1]
        assert np.flatnonzero(example.starts).tolist() == [0, len(ids[0])]
        expected = []
        for document, mask in zip(ids[:2], masks[:2], strict=True):
            following = zip(document[1:], mask[1:], strict=True)
            expected += [token if counts else IGNORE for token, counts in following] + [IGNORE]
        assert example.labels.tolist() == expected


def test_a_template_that_closes_no_turn_is_named(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": ONE}])
    open_ended = chat_folder(tmp_path / "open", SIMPLE.replace("eos_token", "'\\n'"))
    said = str(prepared(tmp_path / "out", open_ended, lines))
    assert "warning: nothing follows an answer in the chat template" in said
    closed = str(prepared(tmp_path / "two", chat_folder(tmp_path / "closed"), lines))
    assert "warning" not in closed


def test_special_tokens_in_a_message_are_tokens_as_for_transformers(tmp_path: Path) -> None:
    folder = chats.folder_of("chatml", tmp_path)
    record = {"messages": [turn("user", "What is <|im_end|>?"), turn("assistant", "<think>x</s>")]}
    prepared(tmp_path / "out", folder, write_lines(tmp_path / "a.jsonl", [record]))
    theirs = rendered(transformers_tokenizer(folder), record)
    assert documents(tmp_path / "out").ids == [theirs["input_ids"]]


@pytest.mark.parametrize(
    ("merge", "first"), [([":", "H"], "ello there."), (["Ġ", "t"], "Hello there.")]
)
def test_a_token_that_joins_prompt_and_answer_does_not_count(
    merge: list[str], first: str, tmp_path: Path
) -> None:
    folder = merging(tmp_path / "tokenizer", [merge])
    (folder / "chat_template.jinja").write_text(SIMPLE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    prepared(tmp_path / "out", folder, write_lines(tmp_path / "a.jsonl", [{"messages": ONE}]))
    assert counted(tmp_path / "out")[1] == (f"{first}{END}", True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, long_row(2)])
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    """What a kill leaves is resumed: tokens and masks are those of one go."""
    draw = random.Random(seed)
    folder = chat_folder(tmp_path / "tokenizer")
    records = [
        {"messages": SEVERAL if draw.random() < 0.5 else ONE} for _ in range(draw.randint(150, 250))
    ]
    lines = write_lines(tmp_path / "a.jsonl", records)
    usual: dict[str, Any] = {"validation_share": 0.2, "max_tokens": 60, "commit_every_s": 0.0}
    prepared(tmp_path / "once", folder, lines, **usual)
    out, kills = tmp_path / "out", 0
    for _ in range(20):
        process = in_a_fork(lambda: prepared(out, folder, lines, num_workers=2, **usual))
        process.join(draw.uniform(0.05, 0.3))
        if process.exitcode == 0:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        kills += 1
    assert kills >= 2
    prepared(out, folder, lines, **usual)
    assert contents(out) == contents(tmp_path / "once")
