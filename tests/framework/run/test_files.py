"""Files that a live run replaces while its directory is taken away."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.run import RunFiles, RunLock
from meshwright.run.files import check_run_files
from meshwright.system.atomic import write_atomic
from meshwright.tracking.jsonl import drop_records_after
from tests.support.errors import raises


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RunFiles]:
    directory = tmp_path / "run"
    directory.mkdir()
    with RunLock(directory) as lock, contextlib.closing(RunFiles(directory, lock)) as found:
        yield found


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir() if path.name != "lock"}


def test_a_file_is_replaced(files: RunFiles) -> None:
    files.write("status.json", "a")
    files.write("status.json", "b")
    assert contents(files.directory) == {"status.json": "b"}


def test_a_write_that_fails_leaves_the_file_and_nothing_else(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("status.json", "a")

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        files.write("status.json", "b")
    assert contents(files.directory) == {"status.json": "a"}


def test_links_in_a_received_run_are_not_written_through(files: RunFiles, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    for name in (".part-status.json", ".part-resolved.json", "metrics.jsonl.kept"):
        (files.directory / name).symlink_to(elsewhere)
    files.write("status.json", "a")
    write_atomic(files.directory / "resolved.json", "b")
    (files.directory / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    drop_records_after(files.directory / "metrics.jsonl", 1)
    assert elsewhere.read_text() == "precious"
    assert (
        contents(files.directory)["status.json"] == "a"
        and contents(files.directory)["resolved.json"] == "b"
    )
    for name in ("metrics.jsonl", "status.json"):
        (files.directory / name).unlink()
        (files.directory / name).symlink_to(elsewhere)
        with raises("MW-RUN-009", name):
            check_run_files(files.directory)
        (files.directory / name).unlink()


def test_nothing_is_written_where_another_directory_is(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it came between the check and the write:
    then the moved directory has the file.
    """
    moved = files.directory.rename(files.directory.with_name("moved"))
    files.directory.mkdir()
    files.write("status.json", "mine")
    assert contents(files.directory) == contents(moved) == {}
    monkeypatch.setattr(files, "are_lost", lambda: False)
    files.write("status.json", "mine")
    assert contents(files.directory) == {} and contents(moved) == {"status.json": "mine"}


def test_nothing_is_written_into_a_deleted_directory(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(files.directory)
    monkeypatch.setattr(files, "are_lost", lambda: False)
    files.write("status.json", "mine")
    assert not files.directory.exists()


def test_a_directory_made_again_is_written_to(files: RunFiles) -> None:
    shutil.rmtree(files.directory)
    assert files.recover().is_new
    files.write("status.json", "mine")
    assert contents(files.directory) == {"status.json": "mine"}
    files.close()
    files.write("status.json", "closed")
    assert contents(files.directory) == {"status.json": "mine"}
