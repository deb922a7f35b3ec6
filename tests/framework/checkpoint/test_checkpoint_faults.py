"""Damage, death and hostile files: each found, named and survived; never a half checkpoint."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import (
    TensorKind,
    begin,
    files,
    find,
    has_checkpoint,
    newest_valid,
    open_checkpoint,
    prune,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import DELETED_SUFFIX, final_directory
from meshwright.errors import CheckpointError
from meshwright.system import atomic
from tests.support.errors import raises

FILES = ["manifest.json", "SHA256SUMS", "pp0-tp0-00000.safetensors", "pp0-tp1-00001.safetensors"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x01
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\n") and None,
}


# Damage after publishing


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
    tmp_path: Path, fake: Any, file: str, damage: str
) -> None:
    older = fake.state(1)
    fake.save(tmp_path, 100, tp=2, state=older)
    DAMAGE[damage](fake.save(tmp_path, 200, tp=2) / file)
    warnings: list[str] = []
    found = newest_valid(tmp_path, warn=warnings.append)
    assert found is not None and found.manifest.step == 100
    assert len(warnings) == 1 and "step-00000200" in warnings[0] and file in warnings[0]
    local = found.read(TensorKind.MASTER, fake.info("embedding.weight", 1, 0))
    assert local is not None and torch.equal(local, older[TensorKind.MASTER, "embedding.weight"])


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "grown"])
def test_opening_alone_finds_what_sizes_tell(tmp_path: Path, fake: Any, damage: str) -> None:
    """What ranks do that leave the hashing to another."""
    path = fake.save(tmp_path, 1)
    DAMAGE[damage](path / "pp0-tp0-00001.safetensors")
    with raises("MW-CHECKPOINT-014", "pp0-tp0-00001.safetensors"):
        open_checkpoint(path)


@pytest.mark.long
def test_every_flipped_byte_is_found(tmp_path: Path, fake: Any) -> None:
    """Not only where a test chose to look: any byte of any file."""
    path = fake.save(tmp_path, 1)
    generator = random.Random(0)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for position in {0, len(data) - 1, *(generator.randrange(len(data)) for _ in range(8))}:
            for mask in (0x01, 0x20):  # 0x20 changes the case of a letter
                file.write_bytes(
                    data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
                )
                with pytest.raises(
                    CheckpointError,
                    match=file.name if file.suffix == ".safetensors" else "manifest",
                ):
                    open_checkpoint(path).verify()
        file.write_bytes(data)
    open_checkpoint(path).verify()


def test_all_damaged_is_an_error_and_not_a_new_start(tmp_path: Path, fake: Any) -> None:
    for step in (100, 200):
        (fake.save(tmp_path, step) / "manifest.json").unlink()
    with raises("MW-CHECKPOINT-015", 2, "step-00000200", "step-00000100"):
        newest_valid(tmp_path, warn=lambda _: None)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path, fake: Any) -> None:
    fake.save(tmp_path, 100).rename(tmp_path / "checkpoints" / "step-00000900")
    with raises("MW-CHECKPOINT-015", "step 100"):
        newest_valid(tmp_path, warn=lambda _: None)


# A disk that refuses to read


class RefusingDisk:
    """Answers reads of one file with an errno, so many times."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, path: Path, number: int, times: int
    ) -> None:
        self.left = times

        def refusing(opened: Callable[..., Any]) -> Callable[..., Any]:
            def open_(file: Any, *how: Any, **more: Any) -> Any:
                if str(file) == str(path) and self.left:
                    self.left -= 1
                    raise OSError(number, os.strerror(number), str(file))
                return opened(file, *how, **more)

            return open_

        monkeypatch.setattr(io, "open", refusing(io.open))
        monkeypatch.setattr(os, "open", refusing(os.open))
        monkeypatch.setattr(files, "READ_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_error_is_no_damage(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    """One that passes is tried again; one that stays stops the start with its errno,
    and nothing is passed over.
    """
    fake.save(tmp_path, 100, tp=2)
    newest = fake.save(tmp_path, 200, tp=2)
    warned: list[str] = []
    RefusingDisk(monkeypatch, newest / file, number, times=2)
    found = newest_valid(tmp_path, warn=warned.append)
    assert found is not None and found.manifest.step == 200 and not warned
    disk = RefusingDisk(monkeypatch, newest / file, number, times=4)
    with raises("MW-CHECKPOINT-004", file, f"errno {number}", "4 times"):
        newest_valid(tmp_path, warn=warned.append)
    assert not warned and not disk.left
    RefusingDisk(monkeypatch, newest / file, number, times=4)
    with raises("MW-CHECKPOINT-004"):
        begin(tmp_path, 200, "a2", warn=warned.append)
    assert newest.is_dir() and not list(newest.parent.glob("broken-*")) and not warned


@pytest.mark.parametrize("directory", ["checkpoints", "checkpoints/step-00000100"])
def test_a_directory_that_cannot_be_read_is_an_error_with_its_errno(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """A stale handle on NFS."""
    fake.save(tmp_path, 100)
    stat, left = os.stat, 4

    def refuse(path: Any, **how: Any) -> os.stat_result:
        nonlocal left
        if str(path) == str(tmp_path / directory) and left:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(files, "READ_PAUSES_S", (0.0, 0.0, 0.0))
    with raises("MW-CHECKPOINT-004", 4):
        find(tmp_path)
    assert [each.step for each in find(tmp_path)] == [100]
    left = 4
    assert has_checkpoint(tmp_path, above=0)


def test_what_could_not_be_read_back_is_not_published(tmp_path: Path, fake: Any) -> None:
    """A state of a user's stream, for example, which has a file name that is not UTF-8."""
    with raises("MW-CHECKPOINT-008"):
        fake.save(tmp_path, 100, extra={"name": "\udcff"})
    assert find(tmp_path) == []


def test_retention_removes_what_a_dead_one_left(tmp_path: Path, fake: Any) -> None:
    """The save does not: the files are on a thread that hangs, perhaps."""
    fake.save(tmp_path, 100)
    left = tmp_path / "checkpoints" / f".tmp-step-00000050{DELETED_SUFFIX}"
    left.mkdir()
    (left / "pp0-tp0-00000.safetensors").touch()
    fake.save(tmp_path, 200)
    assert left.is_dir()
    prune(tmp_path, 2)
    assert not left.exists()


# An existing step


def test_a_sound_step_is_never_written_into(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 100)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with raises("MW-CHECKPOINT-023"):
        fake.save(tmp_path, 100, state=fake.state(2))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_step_that_appears_during_the_save_is_not_replaced(tmp_path: Path, fake: Any) -> None:
    temporary = begin(tmp_path, 1, "a1")
    write_shard(temporary, "shard", fake.pieces(fake.state(1), 1, 0))
    final = final_directory(tmp_path, 1)
    final.mkdir()
    with raises("MW-CHECKPOINT-025"):
        publish(temporary, final, fake.head(1))
    assert list(final.iterdir()) == []


def test_a_damaged_step_is_set_aside_and_the_run_goes_on(tmp_path: Path, fake: Any) -> None:
    fake.save(tmp_path, 100)
    bad = fake.save(tmp_path, 200)
    flip(bad / "pp0-tp0-00000.safetensors")
    kept = {file.name: file.read_bytes() for file in bad.iterdir()}
    warnings: list[str] = []
    begin(tmp_path, 200, "a2", warn=warnings.append)
    assert len(warnings) == 1 and "pp0-tp0-00000.safetensors" in warnings[0]
    aside = tmp_path / "checkpoints" / "broken-step-00000200-a2"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == kept
    fake.save(tmp_path, 200)
    found = newest_valid(tmp_path)
    assert found is not None and found.manifest.step == 200


# Death during a save


def save_and_die(run: Path, fake: Any, step: int, last_line: int | None) -> int:
    """Save in this process, killed with SIGKILL when the room's ``last_line``-th line runs;
    returns the lines run.
    """
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(
            (str(Path(files.__file__).parent), atomic.__file__)
        ):
            return None
        if event == "line":
            lines += 1
            if lines == last_line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fake.save(run, step, tp=2)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.long
def test_killed_at_any_moment_the_run_has_a_sound_checkpoint(tmp_path: Path, fake: Any) -> None:
    """20 children, each killed at a seeded random line of a save.
    The run directory is the same for all of them.
    """
    older = fake.state(1)
    fake.save(tmp_path, 100, tp=2, state=older)
    # a first save makes directories, with more lines
    fake.save(tmp_path / "elsewhere", 100, tp=2, state=older)
    total = save_and_die(tmp_path / "elsewhere", fake, 200, None)
    generator = random.Random(1234)
    # the last lines are those around the rename: half of the deaths go there
    moments = [generator.randint(1, total) for _ in range(10)] + [
        total - 3 * index for index in range(10)
    ]
    outcomes = set()
    for index, moment in enumerate(moments):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            save_and_die(tmp_path, fake, 200, moment)
            os._exit(3)  # never reached: the moment is one of the save's lines
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        steps = [candidate.step for candidate in find(tmp_path)]
        for candidate in find(tmp_path):
            open_checkpoint(candidate.path).verify()
        assert steps in ([100], [200, 100])
        outcomes.add(len(steps))
        if len(steps) == 2:  # killed between the rename and the end: published, and whole
            assert prune(tmp_path, 2) == []
            (tmp_path / "checkpoints" / "step-00000200").rename(tmp_path / f"whole-{index}")
    assert outcomes == {1, 2}, "the moments must lie on both sides of the rename"
    found = newest_valid(tmp_path)
    assert found is not None and found.manifest.step == 100
    local = found.read(TensorKind("exp_avg"), fake.info("block0.mlp.down.weight", 1, 0))
    assert local is not None and torch.equal(
        local, older[TensorKind("exp_avg"), "block0.mlp.down.weight"]
    )
    fake.save(tmp_path, 200)
    assert not list((tmp_path / "checkpoints").glob(".tmp-*")), (
        "what the dead left behind is removed by the next save"
    )


def test_all_is_synced_before_the_rename(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut cannot be tested here, but the order that survives one can be watched."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def watched_rename(source: Any, target: Any, **options: Any) -> None:
        events.append(("rename", Path(target).name))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    path = fake.save(tmp_path, 1, tp=2)
    cut = events.index(("rename", "step-00000001"))
    before, after = events[:cut], events[cut + 1 :]
    assert {name for kind, name in before if kind == "fsync"} >= {
        file.name for file in path.iterdir()
    }
    assert before[-1] == ("fsync", ".tmp-step-00000001-a1"), (
        "the names of the files, after the last file"
    )
    assert after == [("fsync", "checkpoints")]


def test_a_full_disk_names_the_file_and_leaves_the_older(tmp_path: Path, fake: Any) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the write in a child, as a full disk would."""
    import resource

    fake.save(tmp_path, 100)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
            fake.save(tmp_path, 200)
        except CheckpointError as error:
            code = (
                0 if "pp0-tp0-00000.safetensors" in str(error) and "errno 27" in str(error) else 2
            )
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [candidate.step for candidate in find(tmp_path)] == [100]


# Retention


def test_prune_keeps_the_newest_that_are_sound(tmp_path: Path, fake: Any) -> None:
    paths = {step: fake.save(tmp_path, step) for step in (10, 20, 30, 40, 50)}
    (paths[40] / "manifest.json").unlink()
    warnings: list[str] = []
    deleted = prune(tmp_path, 2, warn=warnings.append)
    assert sorted(candidate.step for candidate in deleted) == [10, 20]
    # 40 does not count, and is not deleted
    assert [candidate.step for candidate in find(tmp_path)] == [50, 40, 30]
    assert "step-00000040" in warnings[0]
    assert prune(tmp_path, 3, warn=warnings.append) == []


def test_prune_keeps_every_so_many_for_good(tmp_path: Path, fake: Any) -> None:
    for step in range(50, 351, 50):
        fake.save(tmp_path, step)
    assert [gone.step for gone in prune(tmp_path, 2, 100)] == [250, 150, 50]
    assert [found.step for found in find(tmp_path)] == [350, 300, 200, 100]


def test_prune_deletes_nothing_when_the_newest_is_damaged(tmp_path: Path, fake: Any) -> None:
    for step in (10, 20, 30):
        path = fake.save(tmp_path, step)
    flip(path / "pp0-tp0-00001.safetensors")
    warnings: list[str] = []
    assert prune(tmp_path, 1, warn=warnings.append) == []
    assert "pp0-tp0-00001.safetensors" in warnings[0]
    assert len(find(tmp_path)) == 3
