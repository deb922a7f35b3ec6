"""metrics.jsonl: whole lines, a torn end, and what a resumed run does to the file."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.tracking.jsonl import JsonlSink, drop_records_after, read_records
from meshwright.tracking.record import to_json
from tests.support.errors import raises


@pytest.fixture
def path(tmp_path, record):
    """A file with the steps 1 to 6."""
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.open()
    for step in range(1, 7):
        sink.write(record(step))
    sink.close()
    return sink.path


def steps(path) -> list[int]:
    return [found.step for found in read_records(path)]


def test_each_line_is_in_the_file_at_once(tmp_path, record) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.open()
    for step in (1, 2, 3):
        sink.write(record(step))
        assert list(read_records(sink.path))[-1] == record(step)  # the sink is still open
    sink.close()


def test_a_torn_last_line_is_passed_over(path) -> None:
    with path.open("a") as file:
        file.write('{"step": 7, "train/lo')
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_torn_character_is_passed_over(path) -> None:
    with path.open("ab") as file:
        file.write(b'{"step": 7, "\xc3')
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_damaged_line_in_the_middle_is_named(path) -> None:
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:20]
    path.write_text("\n".join(lines) + "\n")
    with raises("MW-TRACKING-002", "metrics.jsonl:3"):
        list(read_records(path))


def test_a_missing_file_is_a_clear_error(tmp_path) -> None:
    with raises("MW-TRACKING-001", "none.jsonl"):
        list(read_records(tmp_path / "none.jsonl"))


def test_resume_drops_the_steps_to_be_made_again(path, record) -> None:
    with path.open("a") as file:
        file.write('{"step": 7, "train/lo')
    sink = JsonlSink(path, resumed_step=4)
    sink.open()
    assert steps(path) == [1, 2, 3, 4]
    sink.write(record(5, loss=99.0))
    sink.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert list(read_records(path))[-1].loss == 99.0
    again = path.with_name("metrics-again.jsonl")
    assert sorted(path.parent.iterdir()) == [again, path]
    assert [(found.step, found.loss == 99.0) for found in read_records(again)] == [
        (5, False),
        (6, False),
    ]


def test_resume_at_the_last_step_leaves_the_file_alone(path) -> None:
    before = path.stat().st_ino, path.read_bytes()
    JsonlSink(path, resumed_step=6).open()
    assert (path.stat().st_ino, path.read_bytes()) == before


def test_resume_from_the_start_begins_afresh(path) -> None:
    JsonlSink(path, resumed_step=0).open()
    assert path.read_bytes() == b""


def test_resume_keeps_a_whole_line_that_lost_only_its_newline(path, record) -> None:
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    sink = JsonlSink(path, resumed_step=6)
    sink.write(record(7))
    sink.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]


def test_truncation_is_all_or_nothing(path, monkeypatch) -> None:
    """Should it fail on the way (the disk is full), the old file is whole."""
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        drop_records_after(path, 2)
    assert path.read_bytes() == before


def test_a_killed_process_leaves_all_its_steps(tmp_path, record) -> None:
    path = tmp_path / "metrics.jsonl"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), to_json(record(1))],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert killed.returncode == -signal.SIGKILL
    assert steps(path) == [1, 2, 3]


KILLED = """
import dataclasses, os, signal, sys
from pathlib import Path
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import from_json
sink = JsonlSink(Path(sys.argv[1]))
for step in (1, 2, 3):
    sink.write(dataclasses.replace(from_json(sys.argv[2]), step=step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_tears_no_line_and_loses_none(tmp_path, record) -> None:
    """A real limit on the file's size stands for the full disk: the write goes through in part,
    then fails.
    """
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(record(1))
    one_line = sink.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (one_line + one_line // 2, hard))
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink.write(record(step))
        assert sink.path.stat().st_size == one_line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    sink.write(record(4))
    sink.close()
    assert steps(sink.path) == [1, 2, 3, 4]
