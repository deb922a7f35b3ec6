"""The lock of a run directory: who holds it is named, whoever dies lets go,
and what it starts does not hold it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.run import lock
from meshwright.run.lock import FILE, RunLock
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.2)


def test_the_second_is_told_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with RunLock(tmp_path):
        for attempt in (RunLock(tmp_path).check_free, RunLock(tmp_path).__enter__):
            with raises("MW-RUN-011") as caught:
                attempt()
            message = str(caught.value)
            assert message.startswith(
                f"process {os.getpid()} of Slurm job 77 on {os.uname().nodename}, since 2"
            )
            assert f"works in {tmp_path}: wait until it ends" in message
    RunLock(tmp_path).check_free()
    monkeypatch.delenv("SLURM_JOB_ID")
    with RunLock(tmp_path), raises("MW-RUN-011") as caught:
        RunLock(tmp_path).check_free()
    assert "Slurm" not in str(caught.value)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (tmp_path / FILE).symlink_to(elsewhere)
    with raises("MW-RUN-013"), RunLock(tmp_path):
        pass
    assert elsewhere.read_text() == "precious"


def test_a_requeued_job_waits_for_its_own_earlier_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = RunLock(tmp_path)
    first.__enter__()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    killed = threading.Timer(1.0, first.__exit__, (None, None, None))
    killed.start()
    with RunLock(tmp_path):
        assert killed.finished.is_set()
        monkeypatch.setenv("SLURM_JOB_ID", "78")
        with raises("MW-RUN-011"):
            RunLock(tmp_path).check_free()


def test_a_restarted_jobset_waits_for_its_own_earlier_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_JOBSET", "run-demo")
    first = RunLock(tmp_path)
    first.__enter__()
    killed = threading.Timer(1.0, first.__exit__, (None, None, None))
    killed.start()
    with RunLock(tmp_path):
        assert killed.finished.is_set()
        monkeypatch.setenv("MESHWRIGHT_JOBSET", "run-other")
        with raises("MW-RUN-011", "JobSet run-demo"):
            RunLock(tmp_path).check_free()
        monkeypatch.delenv("MESHWRIGHT_JOBSET")
        with raises("MW-RUN-011"):
            RunLock(tmp_path).check_free()


def test_looking_makes_nothing_and_keeps_nobody_out(tmp_path: Path) -> None:
    RunLock(tmp_path / "nowhere").check_free()
    RunLock(tmp_path).check_free()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass
    RunLock(tmp_path).check_free()
    with RunLock(tmp_path):
        pass


def test_a_holder_that_cannot_be_read_is_another_job(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        for text in ("", "[1]", '{"host": 3}', "null"):
            (tmp_path / FILE).write_text(text)
            with raises("MW-RUN-011", "another job"):
                RunLock(tmp_path).check_free()


def test_a_first_job_that_is_dying_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 30.0)
    script = f"""
import fcntl, time
file = open({str(tmp_path / FILE)!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(0.5)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with RunLock(tmp_path):
            assert holder.wait(10) == 0


def test_what_the_holder_starts_does_not_hold_it(tmp_path: Path) -> None:
    """A child that is forked or spawned, and outlives the holder, keeps nobody out."""
    held = RunLock(tmp_path)
    ready, told = os.pipe()
    with held:
        forked = os.fork()
        if forked == 0:
            os.write(told, b"x")
            time.sleep(60)
            os._exit(0)
        spawned = subprocess.Popen(["sleep", "60"], close_fds=False)
        os.read(ready, 1)
    try:
        with RunLock(tmp_path):
            assert spawned.poll() is None
    finally:
        os.kill(forked, 9)
        os.waitpid(forked, 0)
        spawned.kill()
        spawned.wait()
        os.close(ready)
        os.close(told)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_the_run_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path), RunLock(tmp_path):
        RunLock(tmp_path).check_free()
    said = capfd.readouterr().err
    assert (
        said.startswith(f"warning: {tmp_path / FILE} cannot be locked here")
        and said.count("\n") == 2
    )


def test_a_lock_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with raises("MW-RUN-013", tmp_path / FILE, "Is a directory"), RunLock(tmp_path):
        pass
