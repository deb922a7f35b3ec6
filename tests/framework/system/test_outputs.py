"""What --out names is whole or as it was, and refused with one message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.system.atomic import check_place, rename_synced, write_out, writing
from tests.support.errors import has_code, raises


def test_a_file_in_a_folder_that_is_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b.json"
    write_out(out, "eins\n")
    write_out(out, "zwei\n")
    assert out.read_text() == "zwei\n" and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("failure", [RuntimeError("no"), OSError(28, "No space left on device")])
def test_what_fails_leaves_what_was_there(failure: Exception, tmp_path: Path) -> None:
    out = tmp_path / "b.svg"
    out.write_text("as it was")

    def spoil() -> None:
        with writing(out) as path:
            assert path.suffix == ".svg"
            path.write_text("half")
            raise failure

    with pytest.raises(
        (RuntimeError, ConfigError),
        match=r"^no$|^--out .*b\.svg: cannot be written \(No space left",
    ):
        spoil()
    assert out.read_text() == "as it was" and list(tmp_path.iterdir()) == [out]


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    write_out(link, "through")
    assert link.is_symlink() and file.read_text() == "through"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_out(pipe, "as it comes")
    assert pipe.is_fifo() and os.read(reader, 100) == b"as it comes"
    os.close(reader)


def test_a_place_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_place(tmp_path / "new" / "x", folder=False, example="x")
    for out, folder, said in (
        (
            tmp_path,
            False,
            f"--out {tmp_path}: there is a folder of that name; name a file, such as {tmp_path}/x",
        ),
        (tmp_path / "file", True, "there is a file of that name"),
        (tmp_path / "file" / "x", False, "is a file, and nothing can lie below it"),
    ):
        with pytest.raises(
            ConfigError, check=has_code("MW-SYSTEM-003", "MW-SYSTEM-004")
        ) as refused:
            check_place(out, folder=folder, example="x")
        assert said in str(refused.value)
    with raises("MW-SYSTEM-006"):
        write_out(tmp_path / "file" / "x", "")


def new_and_old(folder: Path) -> tuple[Path, Path]:
    """Write two files, one of which is to replace the other."""
    for name in ("new", "old"):
        (folder / name).write_text(name)
    return folder / "new", folder / "old"


def test_a_rename_that_is_asked_for_twice_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS client does when the answer to the first request was lost."""
    (source, target), rename = new_and_old(tmp_path), Path.rename

    def twice(path: Path, to: Path) -> Path:
        rename(path, to)
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", twice)
        rename_synced(source, target)
    assert target.read_text() == "new" and not source.exists()
    with pytest.raises(FileNotFoundError):
        rename_synced(source, target)
    assert target.read_text() == "new"


def test_a_rename_of_what_another_took_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, target), rename = new_and_old(tmp_path), Path.rename

    def taken(path: Path, to: Path) -> Path:
        path.unlink()
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", taken)
    with pytest.raises(FileNotFoundError):
        rename_synced(source, target)
    assert target.read_text() == "old"
