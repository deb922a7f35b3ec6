"""The table of seconds by folder and file after a run."""

from __future__ import annotations

import os
from types import SimpleNamespace

from tests.support.durations import cpu_seconds, table


def report(nodeid: str, duration: float) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, duration=duration)


def test_phases_are_added_up_by_folder_and_by_file() -> None:
    reports = [
        report("tests/a/b/test_x.py::test_one", 30.0),
        report("tests/a/b/test_x.py::test_one", 10.0),  # its setup
        report("tests/a/b/c/test_y.py::test_two", 25.0),
        report("tests/test_z.py::test_three", 5.0),
        SimpleNamespace(message="a warning has no duration"),
    ]
    first, *lines = table(reports)
    assert first.startswith("70 s in tests")
    found = [tuple(line.split()) for line in lines]
    assert found == [
        ("65.0", "s", "2", "tests", "tests/a/b/"),
        ("5.0", "s", "1", "tests", "tests/"),
        ("40.0", "s", "1", "tests", "tests/a/b/test_x.py"),
        ("25.0", "s", "1", "tests", "tests/a/b/c/test_y.py"),
        ("5.0", "s", "1", "tests", "tests/test_z.py"),
    ]


def test_a_short_run_has_no_table() -> None:
    assert not list(table([report("tests/test_z.py::test_three", 5.0)]))


def test_processes_that_were_waited_for_count() -> None:
    before = cpu_seconds()
    pid = os.fork()
    if pid == 0:
        for _ in range(5_000_000):
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_seconds() - before > 0.02
