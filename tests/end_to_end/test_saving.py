"""Checkpoints written behind the training: what is in them,
and what a disk that refuses does to the run.
"""

from __future__ import annotations

import errno
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.build import build
from meshwright.checkpoint import find, open_checkpoint
from meshwright.checkpoint.files import DELETED_SUFFIX
from meshwright.config import RunConfig, resolve
from meshwright.errors import CheckpointError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parts import NOT_WRITTEN, Parts
from meshwright.run import saving
from meshwright.run.directory import run_directory
from meshwright.run.saving import Saver
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import differing, layout, run_config, size, tensors
from tests.support.marks import long_row

LIMIT_S = 60.0
"""Time after which a test stops waiting, in seconds."""


def opened(config: RunConfig, world_size: int) -> Parts:
    config = resolve(config, world_size)
    assert isinstance(config.parallel.dp, int)
    grid = Grid(pp=config.parallel.pp, dp=config.parallel.dp, tp=config.parallel.tp)
    return build(config, open_mesh(grid, "cpu"))


def step(parts: Parts, saver: Saver, times: int = 1) -> None:
    """As the loop does."""
    for _ in range(times):
        saver.check(NOT_WRITTEN in take_step(parts).flags)


def saves_twice(rank: int, world_size: int, config: RunConfig, slow: bool) -> None:
    """Steps 2 and 4; ``slow``: the steps after each save are taken before a byte
    of it is written.
    """
    parts = opened(config, world_size)
    saver = Saver(parts, run_directory(config.run), lambda text: None)
    for _ in range(2):
        step(parts, saver, 2)
        if slow:
            held = saver.writer.start

            def later(*what: Any, held: Any = held, **how: Any) -> None:
                step(parts, saver, 2)
                parts.state.step -= 2
                held(*what, **how)

            saver.writer.start = later  # type: ignore[method-assign]
            saver.start()
            del saver.writer.start
            break
        saver.start()
    saver.finish()
    close_mesh(parts.mesh)


@pytest.mark.parametrize("text", ["dp2", long_row("pp2,tp2")])
def test_what_is_saved_is_the_step_and_not_what_came_after(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    sections: dict[str, dict[str, Any]] = {"parallel": layout(text), "train": {"dtype": "bfloat16"}}
    plain = run_config(corpus, tmp_path / "plain", **sections, checkpoint={"asynchronous": False})
    behind = run_config(corpus, tmp_path / "behind", **sections)
    pool.run(saves_twice, size(plain), plain, False)
    pool.run(saves_twice, size(behind), behind, True)
    newer, older = find(run_directory(plain.run))
    (only,) = find(run_directory(behind.run))
    assert (newer.step, older.step, only.step) == (4, 2, 2)
    newer.path.rename(tmp_path / "aside")
    assert not differing(tensors(run_directory(behind.run)), tensors(run_directory(plain.run)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run's checkpoints, a file system of its own of 2 MiB."""
    place = tmp_path / "runs" / "run" / "checkpoints"
    place.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "meshwright-test", str(place)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def meets_a_full_disk(
    rank: int, world_size: int, config: RunConfig
) -> tuple[list[int], str | None]:
    """Save; fill the disk and save again; make room and save: what had been warned of by then,
    and what was said.
    """
    parts = opened(config, world_size)
    directory = run_directory(config.run)
    warned: list[str] = []
    saver = Saver(parts, directory, lambda text: None, warned.append)
    ballast = directory / "checkpoints" / "ballast"
    found = []
    try:
        for full in (False, True, False):
            step(parts, saver)
            if rank == 0:
                ballast.write_bytes(b"")
                free = shutil.disk_usage(ballast.parent).free
                ballast.write_bytes(b"x" * (free - 40_000 if full else 0))
            parts.mesh.world.barrier()
            saver.start()
            step(parts, saver)
            if parts.mesh.world.gather_objects(saver.writer.failed())[0]:
                step(parts, saver)
            saver.finish()
            found.append(len(warned))
    except CheckpointError as error:
        return found, str(error)
    finally:
        close_mesh(parts.mesh)
    return found, "\n".join(warned)


@pytest.mark.fault(row="the disk full, or not writable for one rank")
def test_a_full_disk_is_survived(corpus: Path, small_disk: Path, pool: RankPool) -> None:
    config = run_config(
        corpus, small_disk.parents[1], parallel=layout("pp2"), checkpoint={"keep_last": 1}
    )
    answers = pool.run(meets_a_full_disk, 2, config)
    found, said = answers[0]
    assert found == [0, 1, 1]
    assert said is not None and said.startswith(
        "the checkpoint of step 3 could not be saved:\n  rank "
    )
    assert (
        f"(errno {errno.ENOSPC})" in said and ".safetensors" in said and "the run continues" in said
    )
    assert answers[1] == ([0, 0, 0], "")
    (only,) = find(small_disk.parent)
    assert only.step > 4 and sorted(path.name for path in small_disk.iterdir()) == [
        "ballast",
        only.path.name,
    ]
    open_checkpoint(only.path).verify()


@pytest.mark.fault(row="the disk full, or not writable for one rank")
def test_or_ends_the_run_where_that_is_wanted(
    corpus: Path, small_disk: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus, small_disk.parents[1], parallel=layout("pp2"), checkpoint={"on_failure": "fail"}
    )
    answers = pool.run(meets_a_full_disk, 2, config)
    assert [found for found, _ in answers] == [[0], [0]]
    assert answers[0][1] == answers[1][1] and answers[0][1].endswith(
        'as checkpoint.on_failure = "fail"'
    )
    assert [checkpoint.step for checkpoint in find(small_disk.parent)] == [1]


def one_rank_may_not_write(rank: int, world_size: int, config: RunConfig) -> str:
    """Save where the last rank may not write files of this size;
    the first rank raises the error in the next step.
    """
    parts = opened(config, world_size)
    warned: list[str] = []
    saver = Saver(parts, run_directory(config.run), lambda text: None, warned.append)
    step(parts, saver)
    saver.start()
    saver.finish()  # a run that has no checkpoint yet would end
    step(parts, saver)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    saver.start()
    while not saver.writer.is_share_done() and rank > 0:  # the first waits for the shares of all
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
    parts.mesh.world.barrier()
    step(parts, saver)
    said = "\n".join(warned)
    saver.finish()
    close_mesh(parts.mesh)
    return said


@pytest.mark.fault(row="the disk full, or not writable for one rank")
@pytest.mark.parametrize("text", ["pp2", long_row("tp2")])
def test_one_rank_that_cannot_write_is_named_in_the_next_step(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(corpus, tmp_path, parallel=layout(text))
    said, other = pool.run(one_rank_may_not_write, 2, config)
    directory = run_directory(config.run) / "checkpoints"
    assert (
        said.startswith(f"the checkpoint of step 2 could not be saved:\n  rank 1: {directory}")
        and not other
    )
    assert f"(errno {errno.EFBIG})" in said
    assert [path.name for path in directory.iterdir()] == ["step-00000001"]


def deletion_hangs(rank: int, world_size: int, config: RunConfig) -> list[Any]:
    """Save steps 1 to 3 while the first deletion of older checkpoints hangs, then step 4,
    when it no longer does.
    """
    parts = opened(config, world_size)
    warned: list[str] = []
    num_hung, has_answered = [0], threading.Event()
    saver = Saver(parts, run_directory(config.run), lambda text: None, warned.append)

    remove = shutil.rmtree

    def hang(path: Any, *what: Any, **how: Any) -> None:
        if str(path).endswith(DELETED_SUFFIX):
            num_hung[0] += 1
            has_answered.wait(LIMIT_S)
        remove(path, *what, **how)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shutil, "rmtree", hang)
        for _ in range(3):
            step(parts, saver)
            saver.start()
        saver.finish_or_fail()
    found: list[Any] = [saver.saved_step, num_hung[0], list(warned)]
    has_answered.set()
    parts.mesh.world.barrier()
    time.sleep(0.5)  # the thread that hung ends
    step(parts, saver)
    saver.start()
    saver.finish_or_fail()
    close_mesh(parts.mesh)
    return [*found, len(warned)]


def unsynced_of_a_save(rank: int, world_size: int, config: RunConfig) -> list[list[str]]:
    """Lists of files to sync, at the sync of rank 0 and after the save."""
    parts = opened(config, world_size)
    saver, synced = Saver(parts, run_directory(config.run), lambda text: None), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            saving, "sync_run_files", lambda _, files, warn: synced.extend(map(str, files))
        )
        step(parts, saver)
        parts.written_files.append(Path("note"))
        saver.start()
        saver.finish()
    assert parts.written_files == []
    close_mesh(parts.mesh)
    return [synced, [str(path) for path in saver._unsynced]]


def test_files_of_observers_are_kept_on_rank_0_until_they_are_synced(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2"))
    assert pool.run(unsynced_of_a_save, 2, config) == [[["note"], []], [[], []]]


def stop_while_deleting(rank: int, world_size: int, config: RunConfig) -> list[Any]:
    """Save at a stop while the deletion after the save before hangs."""
    parts = opened(config, world_size)
    has_answered = threading.Event()
    warned: list[str] = []
    saver = Saver(parts, run_directory(config.run), lambda text: None, warned.append)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(saving, "prune", lambda *what, **how: has_answered.wait(LIMIT_S))
        step(parts, saver)
        saver.start()
        step(parts, saver)
        since_s = time.monotonic()
        saver.start(is_urgent=True)
        saver.finish(retention=False)
        took_s = time.monotonic() - since_s
    has_answered.set()
    close_mesh(parts.mesh)
    return [saver.saved_step, took_s < LIMIT_S / 2, warned]


def test_a_save_before_a_stop_does_not_wait_for_a_deletion(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2"), checkpoint={"keep_last": 1})
    assert pool.run(stop_while_deleting, 2, config) == [[2, True, []]] * 2
    assert [checkpoint.step for checkpoint in find(run_directory(config.run))] == [2, 1]


def test_a_deletion_that_hangs_does_not_stop_the_run(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    keys: dict[str, Any] = {"launch": {"timeout_s": 1.0}, "checkpoint": {"keep_last": 1}}
    config = run_config(corpus, tmp_path, parallel=layout("dp2"), **keys)
    first, second = pool.run(deletion_hangs, 2, config)
    saved, num_hung, (said,), num_warned = first
    assert (saved, num_hung, num_warned) == (3, 1, 1) and second == [3, 0, [], 0]
    assert said.startswith(
        f"old files in {run_directory(config.run)}/checkpoints are still being deleted after 1 s"
    )
    assert [checkpoint.step for checkpoint in find(run_directory(config.run))] == [4]
