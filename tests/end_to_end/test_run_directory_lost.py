"""The run directory deleted, moved, replaced or unmounted, or its lock removed,
under a run that trains.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshwright.checkpoint import find, open_checkpoint
from meshwright.config import RunConfig, parse
from meshwright.errors import UserError
from meshwright.run.directory import run_directory
from meshwright.run.lock import FILE, RunLock
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import (
    LATER,
    changed,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    size,
    tensors,
    train,
)
from tests.end_to_end.shell import LIMIT_S, Shell, written
from tests.support.marks import long_row

pytestmark = pytest.mark.fault(
    row="the run directory deleted, moved, replaced or unmounted; its lock removed"
)

STEPS, AT = 24, 6
"""Of each run, and how many have been taken when it is disturbed."""


class Left(NamedTuple):
    """How a rank left."""

    message: str
    exit_code: int
    warned: str


def run_rank(rank: int, world_size: int, config: RunConfig) -> Left:
    warned = io.StringIO()
    try:
        with contextlib.redirect_stderr(warned), contextlib.redirect_stdout(io.StringIO()):
            work(config)
    except UserError as error:
        return Left(str(error), error.exit_code, warned.getvalue())
    return Left("", 0, warned.getvalue())


def disturbed(
    pool: RankPool, config: RunConfig, disturb: Callable[[Path], object], at: int = AT
) -> list[Left]:
    """Train, and disturb the run between two steps; what each rank left with."""
    directory, missed = run_directory(config.run), []

    def wait_and_disturb() -> None:
        deadline_s = time.monotonic() + LIMIT_S
        metrics = directory / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < at:
            if time.monotonic() > deadline_s:
                missed.append("no step was taken")
                return
            time.sleep(0.002)
        disturb(directory)

    thread = threading.Thread(target=wait_and_disturb)
    thread.start()
    answers: list[Left] = pool.run(run_rank, size(config), config)
    thread.join()
    assert not missed
    return answers


def slow_run(
    corpus: Path, runs: Path, text: str, pause_s: float = 0.02, **sections: dict[str, Any]
) -> RunConfig:
    """Return a run whose steps take 30 ms and more, or ``pause_s`` for each micro-batch."""
    config = run_config(corpus, runs, parallel=layout(text), train={"steps": STEPS}, **sections)
    options = {**config.model.options, "pause_s": pause_s, "of": "norm"}
    return changed(config, model={"builder": "tests.end_to_end.builders:slow", "options": options})


def deleted(directory: Path) -> None:
    """As ``rm -rf`` does, until it is gone:
    a run that writes a file meanwhile makes a first try fail.
    """
    was = directory.stat().st_ino
    while directory.exists() and directory.stat().st_ino == was:
        shutil.rmtree(directory, ignore_errors=True)


def moved(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def emptied(directory: Path) -> None:
    deleted(directory)
    directory.mkdir()


def same_as_undisturbed(pool: RankPool, config: RunConfig, elsewhere: Path) -> None:
    plain = changed(config, run={"directory": str(elsewhere)}, checkpoint={"every": 0})
    train(pool, plain)
    assert exact_losses(config) == exact_losses(plain)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(plain.run)))


@pytest.mark.parametrize(
    ("text", "disturb"), [long_row("dp2", deleted), LATER("", moved), LATER("", emptied)]
)
def test_a_directory_that_is_gone_is_made_again(
    text: str, disturb: Callable[[Path], None], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """All of metrics.jsonl, the configuration and a checkpoint: nothing of the run is lost."""
    config = slow_run(corpus, tmp_path / "runs", text, checkpoint={"every": 4, "keep_last": 50})
    answers = disturbed(pool, config, disturb)
    assert [left.exit_code for left in answers] == [0] * size(config)
    warned = answers[0].warned
    what = "was moved to" if disturb is moved else "was deleted"
    assert (
        f"warning: {run_directory(config.run)} {what}" in warned
        and "It is recreated from memory" in warned
    )
    names = {path.name for path in run_directory(config.run).iterdir()}
    assert {
        "resolved.json",
        "config.toml",
        "starts.jsonl",
        "placement.txt",
        "metrics.jsonl",
        FILE,
    } <= names
    text_of_config = (run_directory(config.run) / "resolved.json").read_text()
    assert parse(text_of_config).run == config.run
    first = min(candidate.step for candidate in find(run_directory(config.run)))
    assert AT <= first <= AT + 5, "a checkpoint at once"
    if disturb is moved:
        before = {
            candidate.step for candidate in find(run_directory(config.run).with_name("moved"))
        }
        assert before == {4}
    RunLock(run_directory(config.run)).check_free()
    if text:
        same_as_undisturbed(pool, config, tmp_path / "plain")
    else:
        assert [line["step"] for line in lines(config)] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_deleted_in_the_very_last_step(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """There is no step after it in which it could be seen."""
    config = changed(slow_run(corpus, tmp_path / "runs", ""), train={"steps": AT})
    assert disturbed(pool, config, deleted)[0].exit_code == 0
    (found,) = find(run_directory(config.run))
    open_checkpoint(found.path).verify()
    assert found.step == AT and len(lines(config)) == AT


@pytest.mark.parametrize("first_moved", [True, long_row(False)])
def test_another_runs_directory_is_never_written_over(
    first_moved: bool, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = slow_run(corpus, tmp_path / "runs", "dp2", checkpoint={"every": 4})
    other = changed(config, run={"name": "other"}, train={"steps": 1})
    train(pool, other)
    theirs = {
        path: path.read_bytes() for path in run_directory(other.run).rglob("*") if path.is_file()
    }

    def replaced(directory: Path) -> None:
        (moved if first_moved else deleted)(directory)
        run_directory(other.run).rename(directory)

    answers = disturbed(pool, config, replaced)
    assert [left.exit_code for left in answers] == [20, 20] and answers[0].message == answers[
        1
    ].message
    said, directory = answers[0].message, run_directory(config.run)
    assert "another run's directory is in its place" in said
    found = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert found == {
        directory / path.relative_to(run_directory(other.run)): data
        for path, data in theirs.items()
    }
    if first_moved:
        match = re.search(r"step (\d+) is saved in (\S+), from where", said)
        assert match and find(Path(match[2]))[0].step == int(match[1]) >= AT
    else:
        assert "the steps since its last checkpoint are lost" in said


@pytest.mark.long
def test_the_watchdog_writes_no_status_there(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """It writes status.json twice a second, in steps of a second and more."""
    sections = {"launch": {"timeout_s": 5.0}, "run": {"name": "run"}}
    config = changed(slow_run(corpus, tmp_path / "runs", "", pause_s=0.3), **sections)
    other = changed(
        slow_run(corpus, tmp_path / "runs", ""), run={"name": "other"}, train={"steps": 1}
    )
    train(pool, other)
    theirs = (run_directory(other.run) / "status.json").read_bytes()

    def replaced(directory: Path) -> None:
        moved(directory)
        run_directory(other.run).rename(directory)

    assert disturbed(pool, config, replaced, at=1)[0].exit_code == 20
    assert (run_directory(config.run) / "status.json").read_bytes() == theirs
    assert (run_directory(config.run).with_name("moved") / "status.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_that_is_removed_is_taken_again(
    taken: bool, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Unless another job has been let in meanwhile: then this one stops, and says who."""
    config = slow_run(corpus, tmp_path / "runs", "dp2")
    second = RunLock(run_directory(config.run))

    def removed(directory: Path) -> None:
        if taken:
            aside = directory / "lock.new"
            aside.touch()
            aside.rename(directory / FILE)
            second.__enter__()
        else:
            (directory / FILE).unlink()

    try:
        answers = disturbed(pool, config, removed)
        if taken:
            assert [left.exit_code for left in answers] == [20, 20] and answers[
                0
            ].message == answers[1].message
            assert (
                f"process {os.getpid()} on " in answers[0].message
                and "was removed during training" in answers[0].message
            )
            assert AT <= len(lines(config)) < STEPS
        else:
            assert [left.exit_code for left in answers] == [0, 0]
            assert (
                "the lock of this run, was removed or replaced: locked again" in answers[0].warned
            )
            assert (
                json.loads((run_directory(config.run) / FILE).read_text())["process"] in pool.pids()
            )
    finally:
        second.__exit__(None, None, None)


def test_an_unmounted_file_system_ends_the_run(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = slow_run(corpus, tmp_path / "runs", "dp2")
    place = tmp_path / "runs"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "meshwright-test", str(place)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    answers = disturbed(
        pool, config, lambda _: subprocess.run(["umount", "--lazy", str(place)], check=True)
    )
    assert [left.exit_code for left in answers] == [20, 20]
    assert "is on another file system than before: was it unmounted?" in answers[0].message
    assert list(place.iterdir()) == [], "nothing is written where the disk is not"


@pytest.mark.torture
def test_from_the_shell_with_the_logs_of_the_ranks(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    config = slow_run(corpus, tmp_path / "runs", "dp2")
    with shell.start(
        ["-m", "meshwright_launch", "train", written(config, tmp_path)], stderr=subprocess.PIPE
    ) as process:
        metrics = run_directory(config.run) / "metrics.jsonl"
        deadline_s = time.monotonic() + LIMIT_S
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < AT:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.002)
        deleted(run_directory(config.run))
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "It is recreated from memory" in said
    assert [line["step"] for line in lines(config)] == list(range(1, STEPS + 1))
    log = run_directory(config.run) / "logs" / "rank-1.log"
    assert log.read_text().startswith("=== started ")
