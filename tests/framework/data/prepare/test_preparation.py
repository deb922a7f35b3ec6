"""`data prepare`: nothing lost, nothing twice, the same bytes for any number of workers,
however often it is killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.data import fingerprint, indexed
from meshwright.data.prepare import finish, preparation
from meshwright.data.prepare.preparation import Progress
from meshwright.data.prepare.records import Form, RecordKeys
from meshwright.data.prepare.work_folder import WorkFolder
from meshwright.data.prepare.workers import ordered_map
from meshwright.data.splits import split_of
from meshwright.errors import DataError
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


TEXTS = [
    "one",
    "",
    "line\nfeed",
    "carriage\r\nreturn",
    "straße 東京 🎈",
    "\x00\ufeff",
    END,
    "x" * 300,
    " ",
    "two",
] * 4

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=90) | st.sampled_from(TEXTS)


@pytest.mark.long
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(st.lists(TEXT, max_size=12), min_size=1, max_size=3),
    ending=st.sampled_from(["\n", "\r\n", "\n\n", " \n\t\n"]),
    closed=st.booleans(),
    mark=st.booleans(),
    packed=st.lists(st.booleans(), min_size=3, max_size=3),
    block_bytes=st.integers(1, 200),
    workers=st.integers(1, 3),
)
def test_every_text_comes_back_once_in_order(
    tokenizer: Path,
    tmp_path: Path,
    texts: list[list[str]],
    ending: str,
    closed: bool,
    mark: bool,
    packed: list[bool],
    block_bytes: int,
    workers: int,
) -> None:
    """Whatever the texts, line ends, blank lines, byte-order marks,
    sizes of blocks and numbers of workers.
    """
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    files = []
    for number, (some, gz) in enumerate(zip(texts, packed, strict=False)):
        file = tmp_path / f"{number}.jsonl{'.gz' * gz}"
        files.append(
            write_lines(
                file, [{"text": t} for t in some], ending=ending, last=ending if closed else ""
            )
        )
        if mark and not gz:
            file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    expected = [text for some in texts for text in some if text]
    options: dict[str, Any] = {
        "block_bytes": block_bytes,
        "num_workers": workers,
        "validation_share": 0.3,
    }
    if not expected:
        with raises("MW-DATA-040"):
            made(tmp_path / "out", tokenizer, *files, **options)
        return
    numbers = np.flatnonzero([bool(text) for some in texts for text in some])
    splits = split_of(numbers, 1234, 0.3, 0.0)
    if not (splits == 0).any():
        return  # nothing to train on; refused, as above
    outcome = made(tmp_path / "out", tokenizer, *files, **options)
    found = documents_in(tmp_path / "out")
    assert found["train"] == [
        text for text, split in zip(expected, splits, strict=True) if split == 0
    ]
    assert found.get("validation", []) == [
        text for text, split in zip(expected, splits, strict=True) if split == 1
    ]
    prepared = outcome.fingerprint.prepared
    assert prepared is not None
    assert (prepared.records, prepared.empty) == (
        sum(map(len, texts)),
        sum(map(len, texts)) - len(expected),
    )
    assert outcome.fingerprint.source.text_bytes == sum(len(text.encode()) for text in expected)
    one = made(tmp_path / "one", tokenizer, *files, validation_share=0.3, block_bytes=1 << 20)
    wanted = one.fingerprint.model_copy(
        update={"source": outcome.fingerprint.source}
    )  # blocks are in the source's hash
    assert outcome.fingerprint == wanted


def a_source(folder: Path) -> list[Path]:
    """Return all kinds of files, with what is hard about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    records = [{"text": f"{i} {text}", "n": i} for i, text in enumerate(TEXTS)]
    write_lines(folder / "a.jsonl", records)
    write_lines(folder / "b.jsonl.gz", records[::-1], ending="\r\n", last="")
    pq.write_table(pa.table({"n": [1] * 90, "text": [f"row {i}" * (i % 4) for i in range(90)]}), folder / "c.parquet",
                   row_group_size=37)  # fmt: skip
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / f"texts/{i}.txt").write_bytes(f"text {i}\r\n{'ß' * i}".encode() if i % 4 else b"")
    return [folder / "a.jsonl", folder / "b.jsonl.gz", folder / "c.parquet", folder / "texts"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return a_source(tmp_path_factory.mktemp("source") / "all")


@pytest.fixture(scope="module")
def whole(source: list[Path], tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared at one go, by one worker."""
    out = tmp_path_factory.mktemp("whole") / "corpus"
    made(out, tokenizer, *source, validation_share=0.1, test_share=0.2)
    return out


def test_all_kinds_of_files(source: list[Path], whole: Path) -> None:
    expected = [f"{i} {text}" for i, text in enumerate(TEXTS)]
    expected += expected[::-1] + [f"row {i}" * (i % 4) for i in range(90)]
    names = sorted(f"{i}.txt" for i in range(12))
    expected += [(source[3] / name).read_bytes().decode() for name in names]
    found = documents_in(whole)
    assert sorted(text for texts in found.values() for text in texts) == sorted(
        filter(None, expected)
    )
    splits = split_of(np.arange(len(expected)), 1234, 0.1, 0.2)
    for number, name in enumerate(("train", "validation", "test")):
        assert found[name] == [
            text for text, split in zip(expected, splits, strict=True) if split == number and text
        ]
    known = fingerprint.read(whole)
    assert known is not None and known.prepared is not None
    assert {Path(file.path).name: file.num_bytes for file in known.prepared.files} == {
        path.name: path.stat().st_size
        for each in source
        for path in ([each] if each.is_file() else each.iterdir())
    }
    for name, split in known.splits.items():
        tokens = np.fromfile(whole / f"{name}.bin", np.uint16)
        assert (split.tokens, split.max_token_id, split.documents) == (
            len(tokens), tokens.max(), (tokens == known.end_of_document_id).sum(),
        )  # fmt: skip


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_gives_the_same_bytes(
    source: list[Path], whole: Path, tokenizer: Path, tmp_path: Path, workers: int
) -> None:
    made(
        tmp_path / "corpus",
        tokenizer,
        *source,
        validation_share=0.1,
        test_share=0.2,
        num_workers=workers,
    )
    assert contents(tmp_path / "corpus") == contents(whole)


def tokens_of(folder: Path) -> dict[str, bytes]:
    """Return every file but the fingerprint."""
    return {name: raw for name, raw in contents(folder).items() if name != fingerprint.FILE_NAME}


REFUSED = 7


def in_a_fork(work: Callable[[], Any]) -> multiprocessing.Process:
    """Start a process that does it, quietly, and leaves with 0 when it could."""

    def quietly() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(DataError):
            work()
            os._exit(0)
        os._exit(REFUSED)

    process = multiprocessing.get_context("fork").Process(target=quietly)
    process.start()
    return process


@pytest.mark.long
def test_killed_before_and_after_every_thing_that_is_written(
    source: list[Path], whole: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """SIGKILL at the n-th moment of all those at which something is written, for n = 1, 2, ...:
    each run goes on where the one before was killed, then all over again from another beginning;
    the end is always the same.
    """
    out, kills = tmp_path / "corpus", 0
    for step in (1, 3, 11):
        n = 0
        while True:
            n += step

            def doomed(n: int = n) -> None:
                passed = 0

                def dies(function: Callable[..., Any]) -> Callable[..., Any]:
                    def wrapped(*args: Any, **kwargs: Any) -> Any:
                        nonlocal passed
                        passed += 1
                        if passed == n:
                            os.kill(os.getpid(), signal.SIGKILL)
                        result = function(*args, **kwargs)
                        passed += 1
                        if passed == n:
                            os.kill(os.getpid(), signal.SIGKILL)
                        return result

                    return wrapped

                from meshwright.data.prepare import work_folder

                for owner, name in (
                    (WorkFolder, "append"), (WorkFolder, "commit"), (WorkFolder, "remove"),
                    (work_folder, "write_atomic"), (indexed, "write_index"), (finish.shutil, "copyfile"),
                    (preparation, "publish"),
                ):  # fmt: skip
                    setattr(owner, name, dies(getattr(owner, name)))
                made(
                    out,
                    tokenizer,
                    *source,
                    validation_share=0.1,
                    test_share=0.2,
                    block_bytes=1500,
                    commit_every_s=0.0,
                )

            process = in_a_fork(doomed)
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            kills += 1
        # blocks are of another size, and so is the hash of the sources
        assert tokens_of(out) == tokens_of(whole)
        assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
        shutil.rmtree(out)
    assert kills > 20


@pytest.mark.long
def test_killed_at_random_moments_with_workers_that_go_too(
    source: list[Path], whole: Path, tokenizer: Path, tmp_path: Path, seed: int
) -> None:
    """SIGKILL of the whole at random times; no worker outlives it,
    and the last run's bytes are those of one go.
    """
    rng = random.Random(seed)
    out, num_children = tmp_path / "corpus", 0
    for _ in range(30):
        process = in_a_fork(
            lambda: made(
                out,
                tokenizer,
                *source,
                validation_share=0.1,
                test_share=0.2,
                num_workers=2,
                commit_every_s=0.0,
            )
        )
        process.join(rng.uniform(0.03, 0.12))
        left = children_of(process.pid or 0)
        num_children += len(left)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        until_s = time.monotonic() + 5
        while any(map(lives, left)) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not any(map(lives, left))
        if process.exitcode == 0:
            break
    assert num_children >= 2
    made(out, tokenizer, *source, validation_share=0.1, test_share=0.2)
    assert contents(out) == contents(whole)


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_it_goes_on_and_does_not_begin_again(
    source: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: what was done is not read again, and the second call says so."""
    seen: list[Progress] = []

    def interrupt(now: Progress) -> None:
        seen.append(now)
        if len(seen) == 20:
            raise KeyboardInterrupt

    options = preparation.Options(
        source, tokenizer, tmp_path / "corpus", num_workers=1, block_bytes=64
    )
    with pytest.raises(KeyboardInterrupt):
        preparation.prepare(options, interrupt)
    later: list[Progress] = []
    preparation.prepare(options, later.append)
    assert later[0].resumed and later[0].documents >= seen[-1].documents > 0
    assert later[-1].source_bytes == later[-1].total_bytes


def test_interrupted_in_the_middle_of_a_block(
    source: list[Path],
    whole: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C when a block's documents are in one split and not yet in the other:
    that block is done again.
    """
    out, append, calls = tmp_path / "corpus", WorkFolder.append, 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        append(*args)
        calls += 1
        if calls % 5 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(WorkFolder, "append", interrupted)
    for _ in range(100):
        with contextlib.suppress(KeyboardInterrupt):
            made(
                out,
                tokenizer,
                *source,
                validation_share=0.1,
                test_share=0.2,
                block_bytes=500,
                commit_every_s=0.0,
            )
            break
    assert tokens_of(out) == tokens_of(whole) and calls > 50


def test_the_index_is_what_megatron_writes(whole: Path, tmp_path: Path) -> None:
    tokens = np.fromfile(whole / "train.bin", np.uint16)
    known = fingerprint.read(whole)
    assert known is not None
    builder = IndexedDatasetBuilder(str(tmp_path / "train.bin"), dtype=np.uint16)
    for document in np.split(tokens, np.flatnonzero(tokens == known.end_of_document_id) + 1)[:-1]:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "train.idx"))
    assert (tmp_path / "train.idx").read_bytes() == (whole / "train.idx").read_bytes()
    assert (tmp_path / "train.bin").read_bytes() == (whole / "train.bin").read_bytes()


def test_again_does_nothing_and_damage_is_built_again(tokenizer: Path, tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out"
    first = made(out, tokenizer, file)
    assert first.built and not made(out, tokenizer, file).built
    before = contents(out)
    (out / "train.bin").write_bytes(b"spoiled")
    assert made(out, tokenizer, file).built and contents(out) == before
    (out / "fingerprint.json").write_bytes(before["fingerprint.json"][:40])
    (out / "notes").touch()
    with raises("MW-DATA-042"):
        made(out, tokenizer, file)
    (out / "notes").unlink()
    assert made(out, tokenizer, file).built and contents(out) == before


def test_changed_sources_are_refused_with_what_changed(tokenizer: Path, tmp_path: Path) -> None:
    file, other, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out"
    write_lines(file, [{"text": "one"}])
    write_lines(other, [{"text": "two" * 30}, "broken"])
    with raises("MW-DATA-050", "b.jsonl:2"):
        made(out, tokenizer, file, other)
    write_lines(other, [{"text": "two"}])
    half: list[tuple[tuple[Path, ...], dict[str, Any], tuple[object, ...]]] = [
        ((file, other), {}, ("b.jsonl", 112, 16)),
        ((file,), {}, ("b.jsonl",)),
        ((file, other), {"seed": 5}, ("seed", 1234, 5)),
        ((file, other), {"keys": RecordKeys("body")}, ("text_key", "'text'", "'body'")),
    ]
    for sources, changes, values in half:
        with raises("MW-DATA-084", *values):
            made(out, tokenizer, *sources, **changes)
    made(out, tokenizer, file, other, replace=True)
    assert documents_in(out) == {"train": ["one", "two"]}
    write_lines(file, [{"text": "owe"}])
    os.utime(file, ns=(1, 1))
    with raises("MW-DATA-044", "a.jsonl"):
        made(out, tokenizer, file, other)
    made(out, tokenizer, file, other, replace=True)
    with raises("MW-DATA-044", "files"):
        made(out, tokenizer, other, file)
    assert documents_in(out) == {"train": ["owe", "two"]}


def test_what_nobody_has_read_yet_may_be_mended(tokenizer: Path, tmp_path: Path) -> None:
    """A broken line in the second file: the first is not read again when the second is whole."""
    file, other, third, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "out"))
    write_lines(file, [{"text": "one"}])
    write_lines(other, ["broken"])
    with raises("MW-DATA-050", "b.jsonl:1"):
        made(out, tokenizer, file, other)
    write_lines(other, [{"text": "two"}])
    write_lines(third, [{"text": "three"}])
    seen: list[Progress] = []
    preparation.prepare(
        preparation.Options(
            [file, other, third], tokenizer, out, num_workers=1, validation_share=0.0
        ),
        seen.append,
    )
    assert seen[0].resumed and documents_in(out) == {"train": ["one", "two", "three"]}
    fresh = made(tmp_path / "fresh", tokenizer, file, other, third)
    assert tokens_of(out) == tokens_of(fresh.out)


BROKEN = {
    b'{"text": "a"}\n{"text": "b"\n': ("a.jsonl:2", "column 13"),
    b'{"text": "a"}\n\n\n{"txt": "b"}\n': ("a.jsonl:4", "'text'", "'txt'"),
    b'{"text": 5}\n': ("a.jsonl:1", "'text'", "number"),
    b'{"text": null}\n': ("a.jsonl:1", "'text'", "null"),
    b'{"text": "a"}\n{"text": "\xe9"}\n': ("a.jsonl:2", "0xe9", 10),
    b'{"text": "\\ud83d"}\n': ("a.jsonl:1", "'text'"),
    b"[" * 100_000 + b"\n": ("a.jsonl:1",),
    b'["text"]\n': ("a.jsonl:1", "list", "'text'"),
}


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: raw[:20])
def test_broken_lines_are_named(tokenizer: Path, tmp_path: Path, raw: bytes) -> None:
    """Refused with file and line, however the file is cut into blocks; or left out,
    counted and listed.
    """
    good = b'{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "b.jsonl").write_bytes(good)
    for block_bytes in (5 if len(raw) < 100 else 5000, 1 << 20):
        with raises("MW-DATA-050", *BROKEN[raw]):
            made(
                tmp_path / f"out{block_bytes}",
                tokenizer,
                tmp_path / "a.jsonl",
                block_bytes=block_bytes,
            )
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    outcome = made(tmp_path / "out", tokenizer, *files, skip_broken=True)
    assert outcome.fingerprint.prepared is not None and outcome.fingerprint.prepared.skipped == 1
    assert documents_in(tmp_path / "out")["train"] == (
        ["a"] if raw.startswith(b'{"text": "a"}') else []
    ) + ["good"]
    [line] = (tmp_path / "out/skipped.txt").read_text().splitlines()
    assert line.startswith(str(tmp_path / "a.jsonl:")) and "1 broken ones" in str(outcome)


def test_skipping_goes_on_after_a_refusal(tokenizer: Path, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", [{"text": f"{i}"} if i % 7 else {} for i in range(1, 60)]
    )
    with raises("MW-DATA-050", "a.jsonl:7", "'text'"):
        made(tmp_path / "out", tokenizer, file)
    made(tmp_path / "out", tokenizer, file, skip_broken=True)
    assert documents_in(tmp_path / "out")["train"] == [f"{i}" for i in range(1, 60) if i % 7]
    assert len((tmp_path / "out/skipped.txt").read_text().splitlines()) == 8


def test_killed_after_publishing_and_damaged_since(tokenizer: Path, tmp_path: Path) -> None:
    """What is left of the work says that all is done, and its files are gone:
    it is no state to go on from.
    """
    file, out = (
        write_lines(tmp_path / "a.jsonl", [{"text": f"{i}"} for i in range(40)]),
        tmp_path / "out",
    )

    def doomed() -> None:
        WorkFolder.remove = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        made(out, tokenizer, file)

    process = in_a_fork(doomed)
    process.join()
    left = tmp_path / ".out.preparing"
    assert process.exitcode == -signal.SIGKILL and left.is_dir()
    shutil.copytree(left, tmp_path / "kept")
    assert not made(out, tokenizer, file).built and not left.exists()
    shutil.copytree(tmp_path / "kept", left)
    (out / "train.bin").write_bytes(b"damaged")
    assert made(out, tokenizer, file).built and not left.exists()
    assert documents_in(out) == {"train": [f"{i}" for i in range(40)]}


def test_replace_begins_anew_where_it_cannot_go_on(tokenizer: Path, tmp_path: Path) -> None:
    """Its own advice: after broken records that were left out,
    and after a file of the work was cut.
    """
    records: list[Any] = [{"text": f"{i}"} if i % 7 else {} for i in range(60)]
    file, out = write_lines(tmp_path / "a.jsonl", records), tmp_path / "out"
    last = write_lines(tmp_path / "b.jsonl.gz", [{"text": "last"}])
    last.write_bytes(last.read_bytes()[:-9])
    with raises("MW-DATA-058", "b.jsonl.gz"):
        made(out, tokenizer, file, last, skip_broken=True)
    with raises("MW-DATA-084", 9):
        made(out, tokenizer, file)
    with raises("MW-DATA-050", "a.jsonl:1", "'text'"):
        made(out, tokenizer, file, replace=True)
    with raises("MW-DATA-058", "b.jsonl.gz"):
        made(out, tokenizer, file, last, skip_broken=True)
    (tmp_path / ".out.preparing/corpus/train.bin").write_bytes(b"")
    with raises("MW-DATA-084", "train.bin", 0):
        made(out, tokenizer, file, skip_broken=True)
    made(out, tokenizer, file, skip_broken=True, replace=True)
    assert documents_in(out)["train"] == [f"{i}" for i in range(60) if i % 7]


def test_links_are_followed_and_lead_somewhere(tokenizer: Path, tmp_path: Path) -> None:
    """A folder of links, as a cache of downloads is: none left out,
    read as what the link is called.
    """
    folder, store = tmp_path / "in", tmp_path / "store/blobs"
    store.mkdir(parents=True)
    folder.mkdir()
    write_lines(store / "5891b5b522d5", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "elsewhere/sub").mkdir(parents=True)
    (tmp_path / "elsewhere/sub/c.txt").write_text("three")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    (folder / "a.jsonl").symlink_to(store / "5891b5b522d5")
    (folder / "b").symlink_to("../elsewhere/sub")
    (folder / "itself").symlink_to(".")
    made(tmp_path / "out", tokenizer, folder)
    assert documents_in(tmp_path / "out")["train"] == ["one", "two", "three"]
    (folder / "z").symlink_to("../elsewhere/gone.txt")
    with raises("MW-DATA-045", "in/z", "../elsewhere/gone.txt"):
        made(tmp_path / "again", tokenizer, folder)


def test_a_folder_that_cannot_be_read_is_named(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in/closed").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_text("a")
    scan = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with raises("MW-DATA-046", "in/closed"):
        made(tmp_path / "out", tokenizer, tmp_path / "in")


def test_names_that_are_no_utf8(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"a\xff.txt", b"new\nline.txt", b" *[-].txt"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(
            name if name.isascii() else b"caf\xe9"
        )
    outcome = made(tmp_path / "out", tokenizer, folder, skip_broken=True)
    assert documents_in(tmp_path / "out")["train"] == [" *[-].txt", "new\nline.txt"]
    assert (
        (tmp_path / "out/skipped.txt")
        .read_text()
        .startswith(f"{folder}/a\\udcff.txt is not utf-8 (byte 0xe9 at 3)")
    )
    assert outcome.built and not made(tmp_path / "out", tokenizer, folder, skip_broken=True).built


def test_the_corpus_is_no_source_of_itself(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert made(tmp_path / "out", tokenizer / "tokenizer.json", tmp_path).built
    assert not made(tmp_path / "out", tokenizer / "tokenizer.json", tmp_path).built
    assert documents_in(tmp_path / "out")["train"] == ["a"]


def test_other_things_that_cannot_be(tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "null.parquet")
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]),
        tmp_path / "two.parquet",
    )
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not at all PAR1")
    (tmp_path / "latin.txt").write_bytes(b"stra\xdfe")
    (tmp_path / "one.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    short = write_lines(tmp_path / "short.jsonl.gz", [{"text": f"{i}" * 50} for i in range(500)])
    short.write_bytes(short.read_bytes()[:200])
    out = tmp_path / "out"
    cases: list[tuple[str, dict[str, Any], str, tuple[object, ...]]] = [
        ("a.parquet", {}, "MW-DATA-065", ("'text'", "body", "--text-key body")),
        ("null.parquet", {}, "MW-DATA-050", ("null.parquet: row 2", "'text'")),
        ("two.parquet", {}, "MW-DATA-064", ("two.parquet", "2 columns 'text'")),
        ("no.parquet", {}, "MW-DATA-063", ("no.parquet",)),
        ("latin.txt", {}, "MW-DATA-050", ("latin.txt", "0xdf", 4)),
        ("one.json", {}, "MW-DATA-055", ("one.json",)),
        ("empty", {}, "MW-DATA-052", ("empty",)),
        ("nowhere", {}, "MW-DATA-053", ("nowhere",)),
        ("short.jsonl.gz", {}, "MW-DATA-058", ("short.jsonl.gz",)),
        ("latin.txt", {"form": Form.PAIRS}, "MW-DATA-049", ("latin.txt", "--format pairs")),
        ("latin.txt", {"validation_share": 0.6, "test_share": 0.4}, "MW-DATA-048", (0.6, 0.4)),
        ("latin.txt", {"end_token": "<end>"}, "MW-DATA-100", ("'<end>'", "</s>")),
    ]
    for name, changes, code, values in cases:
        with raises(code, *values):
            made(out, tokenizer, tmp_path / name, **changes)
    (tmp_path / "link.txt").symlink_to("latin.txt")
    for other in ("latin.txt", "link.txt"):
        with raises("MW-DATA-054", "latin.txt", 2):
            made(out, tokenizer, tmp_path / "latin.txt", tmp_path / other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("the only copy")
    with raises("MW-DATA-042", "thesis.txt"):
        made(
            tmp_path / "mine", tokenizer, tmp_path / "null.parquet", replace=True, skip_broken=True
        )
    assert (tmp_path / "mine/thesis.txt").read_text() == "the only copy"


def test_globs_choose_files_of_folders(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("a.md", "b.py", ".hidden.md", "sub/c.md", "sub/d.json"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    made(tmp_path / "all", tokenizer, tmp_path / "in")
    made(tmp_path / "some", tokenizer, tmp_path / "in", globs=["*.md"])
    assert documents_in(tmp_path / "all")["train"] == ["a.md", "b.py", "sub/c.md", "sub/d.json"]
    assert documents_in(tmp_path / "some")["train"] == ["a.md", "sub/c.md"]
    with raises("MW-DATA-052", 4, "--glob *.rst"):
        made(tmp_path / "none", tokenizer, tmp_path / "in", globs=["*.rst"])


def test_a_tokenizer_that_cuts_or_fills_up_does_neither(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = bytes_tokenizer(tmp_path / "tokenizer")
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.enable_truncation(4)
    loaded.enable_padding(length=8)
    loaded.save(str(folder / "tokenizer.json"))
    file = write_lines(tmp_path / "a.jsonl", [{"text": "longer than four"}, {"text": "b"}])
    made(tmp_path / "out", folder, file)
    assert documents_in(tmp_path / "out")["train"] == ["longer than four", "b"]


def test_where_the_end_of_document_comes_from(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    said = {"eos_token": {"content": "<end>"}}
    assert "(<end>)" in str(
        made(tmp_path / "1", bytes_tokenizer(tmp_path / "t1", config=said, end="<end>"), file)
    )
    with raises("MW-DATA-103", "<fin>"):
        made(tmp_path / "2", bytes_tokenizer(tmp_path / "t2", end="<fin>"), file)
    made(tmp_path / "2", tmp_path / "t2", file, end_token="<fin>", begin_token="<fin>")
    assert np.fromfile(tmp_path / "2/train.bin", np.uint16).tolist() == [256, 64, 256]
    with raises("MW-DATA-102", "'<end>'"):
        made(tmp_path / "3", bytes_tokenizer(tmp_path / "t3", config=said), file)
    with raises("MW-DATA-128", "vocab.json", "tokenizer.json"):
        (tmp_path / "t4").mkdir()
        (tmp_path / "t4/vocab.json").write_text("{}")
        made(tmp_path / "4", tmp_path / "t4", file)
    assert json.loads((tmp_path / "1/tokenizer_config.json").read_text()) == said


def test_a_worker_that_is_killed_is_named() -> None:
    def die(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with raises("MW-DATA-086", "SIGKILL", 2):
        list(ordered_map(die, range(9), 2))


def test_results_come_in_order_and_not_too_far_ahead() -> None:
    asked = 0

    def numbers() -> Any:
        nonlocal asked
        for number in range(60):
            asked = number
            yield number

    def slow_first(number: int) -> int:
        time.sleep(0.2 if number == 0 else 0)
        return number * number

    found = ordered_map(slow_first, numbers(), 3)
    assert next(found) == (0, 0)
    assert asked <= 3 * 4
    assert list(found) == [(n, n * n) for n in range(1, 60)]


def test_two_at_once_are_not_let_in(tokenizer: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 9)
    refused = []

    def second(_: Progress) -> None:
        process = in_a_fork(lambda: made(tmp_path / "out", tokenizer, file))
        process.join()
        refused.append(process.exitcode)

    preparation.prepare(
        preparation.Options([file], tokenizer, tmp_path / "out", num_workers=1), second
    )
    assert set(refused) == {REFUSED}
