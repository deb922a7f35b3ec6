"""What a local run listens on, and what a stranger can do there: the loopback interface,
and nothing that runs code.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import run_directory
from meshwright.tracking.jsonl import read_records
from meshwright_launch.restarts import GIVEN_UP_EXIT_CODE
from tests.end_to_end.driving import layout, run_config, with_own_samples
from tests.end_to_end.shell import LIMIT_S, Shell, written

LISTENS = "0A"


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that these processes listen on,
    as ``ss -ltn`` shows them.
    """
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(str(descriptor.readlink()))
            except OSError:
                continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = [
                    bytes.fromhex(host)[at : at + 4][::-1] for at in range(0, len(host) // 2, 4)
                ]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def wait_for_a_step(process: subprocess.Popen[str], metrics: Path, after_s: float = 0.0) -> None:
    """Block until the run has recorded a step, after a time of the clock."""
    deadline_s = time.monotonic() + LIMIT_S
    while (
        not metrics.exists() or metrics.stat().st_mtime < after_s or not list(read_records(metrics))
    ):
        assert process.poll() is None and process.stdout is not None, process.stdout.read()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@contextmanager
def training(
    shell: Shell, tmp_path: Path, restarts: int = 0, **parallel: Any
) -> Iterator[subprocess.Popen[str]]:
    """Yield a run of two ranks in the middle of its steps."""
    config = with_own_samples(
        run_config(
            tmp_path,
            tmp_path / "runs",
            parallel=parallel or layout("dp2"),
            train={"steps": 100_000, "validate_every": 0},
            checkpoint={"every": 0},
            launch={"max_restarts": restarts},
        )
    )
    # as for a cluster
    shell.environment |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    metrics = run_directory(config.run) / "metrics.jsonl"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with shell.start(
        ["-m", "meshwright_launch", "train", written(config, tmp_path)], **how
    ) as process:
        wait_for_a_step(process, metrics)
        try:
            yield process
        finally:
            shell.end_all()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    yield found
    found.end_all()


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A place in which sockets can have names."""
    with tempfile.TemporaryDirectory(prefix="mw-", dir="/tmp") as made:
        yield Path(made)


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def temporary(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.long
@pytest.mark.slow
def test_a_local_run_listens_on_loopback_and_survives_strangers(
    shell: Shell, tmp_path: Path, short_directory: Path
) -> None:
    """A stranger who reaches a port writes pickles: none is unpickled, and the run goes on or ends;
    then leftovers.
    """
    here = short_directory
    shell.environment["TMPDIR"] = str(here)
    semaphores = set(Path("/dev/shm").glob("sem.mp-*"))
    with training(shell, tmp_path) as process:
        found = listening(shell.alive())
        assert found and {host for host, _ in found} == {"127.0.0.1"}, found
        ran = tmp_path / "ran"
        payload = pickle.dumps(Payload(ran))
        for _, port in found:
            for message in (payload, struct.pack("<Q", len(payload)) + payload):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(message)
        time.sleep(1)
        assert not ran.exists()
        assert process.poll() is None, "rubbish on a port does not end the run"
        assert temporary(here)  # what would be left behind
        for pid in shell.alive():  # all at once, as the kernel does when memory runs out
            os.kill(pid, signal.SIGKILL)
    shell.wait_until_none_is_left()
    left = temporary(here)
    assert [name for name in left if not re.fullmatch(r"meshwright-launcher-\w+", name)] == [], left
    assert set(Path("/dev/shm").glob("sem.mp-*")) <= semaphores
    for name in left:
        os.utime(here / name, (1, 1))
    done = shell.run(
        "-c", "from meshwright_launch.leftovers import remove_leftovers; remove_leftovers()"
    )
    assert done.returncode == 0 and temporary(here) == [], done.stderr


def test_leftovers_of_others_and_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright_launch import leftovers

    monkeypatch.setattr(leftovers, "_temporary_directory", lambda: tmp_path)
    monkeypatch.setattr(leftovers, "_own", {})
    mine = leftovers.own_directory()
    for each in mine.iterdir():  # what a program that cleans /tmp does
        each.unlink()
    os.utime(mine, (1, 1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "meshwright-launcher-link").symlink_to(elsewhere)
    young = tmp_path / "meshwright-launcher-young"
    young.mkdir()
    other = tmp_path / "meshwright-notes"
    other.mkdir()
    dead = tmp_path / "meshwright-launcher-dead"
    dead.mkdir()
    (dead / "file").touch()
    os.utime(dead, (1, 1))
    old = tmp_path / "meshwright-launcher-old"
    old.mkdir()
    os.utime(old, (1, 1))
    leftovers.remove_leftovers()
    assert mine.is_dir() and elsewhere.is_dir() and young.is_dir() and other.is_dir()
    assert (elsewhere / "file").exists() and not dead.exists() and not old.exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_fork_server_that_is_killed_is_one_message(shell: Shell, tmp_path: Path) -> None:
    with training(shell, tmp_path) as process:
        os.kill(_fork_server(shell), signal.SIGKILL)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(LIMIT_S) == 1
    assert (
        "Traceback" not in said
        and "process that forks the ranks has ended" in said
        and "[MW-LAUNCH-036]" in said
    )


@pytest.mark.long
def test_a_run_is_restarted_after_its_fork_server_was_killed(shell: Shell, tmp_path: Path) -> None:
    with training(shell, tmp_path, restarts=1) as process:
        assert process.stdout is not None
        os.kill(_fork_server(shell), signal.SIGKILL)
        restart = next(
            line for line in iter(process.stdout.readline, "") if "restart 1 of 1" in line
        )
        assert "process that forks the ranks has ended" in restart
        wait_for_a_step(process, next(tmp_path.rglob("metrics.jsonl")), after_s=time.time())
        os.kill(_fork_server(shell), signal.SIGKILL)
        said = process.stdout.read()
        assert process.wait(LIMIT_S) == GIVEN_UP_EXIT_CODE
    assert "given up after 2 failures" in said and "Traceback" not in said


def _fork_server(shell: Shell) -> int:
    return next(
        pid
        for pid in shell.alive()
        if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() and _forks(pid)
    )


def _forks(pid: int) -> bool:
    """Return whether it has children: the server, and not a rank."""
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
