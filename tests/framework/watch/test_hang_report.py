"""A report of a hang is never lost: not to a slow file system, a slow diagnosis,
or the end of the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.errors import HangEcho, HangError, UserError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import Mesh, close_mesh, open_mesh
from meshwright.watch.hang import report, watchdog
from meshwright.watch.hang.diagnosis import Verdict
from meshwright.watch.hang.disk_writer import DiskWriter
from meshwright.watch.hang.heartbeat import Heartbeat, ReceivedHeartbeat
from meshwright.watch.hang.report import SOUGHT, HangReport, judge_safely
from meshwright_launch.pool import RankPool

SECONDS = 30.0


def a_report() -> HangReport:
    at: dict[str, Any] = {
        "beat": 9,
        "step": 3,
        "phase": "training",
        "pid": 1,
        "host": "h",
        "at_s": 1.0,
    }
    beat = Heartbeat(rank=0, what="reading samples", for_s=600.0, **at)
    return HangReport("the run hangs.", {0: ReceivedHeartbeat(beat, 0.1)}, Grid(), 10.0, (0,))


def test_a_slow_diagnosis_is_reported_without_a_cause_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported, lines = threading.Event(), list[str]()

    def slow(*_: object) -> Verdict:
        assert reported.wait(SECONDS)
        return Verdict("the cause", (0,))

    def late(found: HangReport) -> None:
        lines.extend(found.whole())
        reported.set()

    monkeypatch.setattr(report, "judge", slow)
    monkeypatch.setattr(report, "JUDGE_LIMIT_S", 0.01)
    verdict = judge_safely(a_report(), 1.0, late)
    assert lines[0] == f"the run hangs. {SOUGHT}" and lines[-1].endswith("reading samples")
    assert a_report().with_verdict(verdict).short()[0] == "the run hangs. the cause"


def test_a_diagnosis_that_fails_is_no_end_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Verdict:
        raise KeyError(7)

    monkeypatch.setattr(report, "judge", fail)
    found = a_report().with_verdict(judge_safely(a_report(), 1.0, pytest.fail))
    assert found.head.startswith(
        "the run hangs. The cause could not be found (KeyError: 7)"
    ) and found.ranks == (0,)
    assert found.short()[-1].endswith("reading samples")


def writer(
    directory: Path, rank: int = 0, replace_status: Callable[[str], object] = pytest.fail
) -> DiskWriter:
    return DiskWriter(directory, rank, "h", pytest.fail, replace_status)


def text_status(text: str) -> Any:
    return SimpleNamespace(model_dump_json=lambda: text)


def test_who_writes_a_heartbeat_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """A rank that waits for a slow file system would be taken for one that is stopped."""
    asked, answers, written = threading.Event(), threading.Event(), list[str]()

    def slow(text: str) -> None:
        asked.set()
        assert answers.wait(SECONDS)
        written.append(text)

    disk = writer(tmp_path, replace_status=slow)
    disk.write_status(text_status("one"))
    assert asked.wait(SECONDS)
    for text in ("two", "three"):
        disk.write_status(text_status(text))
    disk.write_report(["why"])
    assert not disk.flush(0.01) and not written
    answers.set()
    assert disk.flush(SECONDS)
    assert written == ["one\n", "three\n"], "the latest replaces the one that waits"
    assert disk.report_path.read_text().endswith("\nwhy\n")


def test_a_report_made_alone_keeps_that_of_another_rank(tmp_path: Path) -> None:
    """But not one of an earlier hang of the run."""
    for start in range(2):
        disks = [writer(tmp_path, rank) for rank in range(3)]
        for disk in disks:
            disk.remove_stacks()
            assert disk.flush()
        assert not list((tmp_path / "hang").glob("report-*"))
        disks[1].write_report([f"alone {start}"], is_alone=True)
        assert disks[1].flush() and disks[1].report_path.read_text().endswith(f"alone {start}\n")
        disks[0].write_report([f"why {start}"])
        assert disks[0].flush()
        disks[2].write_report(["the store is gone"], is_alone=True)
        assert disks[2].flush() and disks[2].report_path.read_text().endswith(f"why {start}\n")
        assert (tmp_path / "hang" / "report-rank-2.txt").read_text().endswith("the store is gone\n")


def end_of_a_hang(
    rank: int, world_size: int, directory: str, limit_s: float, confirms: bool
) -> tuple[str, float]:
    """Rank 0 serves the store and reports; rank 1 reads the cause a little later, or never.

    Returns the type of a rank's error, and a time (monotonic, s): of rank 0 when its process would
    have ended, of rank 1 when it began to read.
    """
    ended: list[tuple[str, float]] = []

    def give_up(error: UserError) -> None:
        assert isinstance(error, HangError)
        error.linger()
        ended.append((type(error).__name__, time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "holds_store", lambda mesh: mesh.rank == 0)
        patch.setattr(watchdog, "start_timer", lambda *_: threading.Timer(0, print))
        mesh = open_mesh(Grid(dp=2), "cpu")
        dog = watchdog.Watchdog(
            mesh, Path(directory), limit_s, 9, lambda: 1, give_up, lambda text: None
        )
        dog._exchange.send(0.0)
        mesh.world.barrier()
        dog._exchange.receive()
        began_s = 0.0
        if rank == 0:
            dog._report()
        elif confirms:
            while dog._exchange.reason() is None:
                time.sleep(0.01)
            time.sleep(0.5)
            began_s = time.monotonic()
            dog._wait_for_report(began_s)
        mesh.world.barrier()
        close_mesh(mesh)
    name, ended_s = ended[0] if ended else ("", 0.0)
    return name, began_s or ended_s


@pytest.mark.parametrize(("limit_s", "confirms"), [(100.0, True), (5.0, False)])
def test_the_process_that_serves_the_store_ends_after_those_that_read_it(
    limit_s: float, confirms: bool, tmp_path: Path, pool: RankPool
) -> None:
    """But not never, if one does not read it."""
    (why, ended_s), (echo, began_s) = pool.run(end_of_a_hang, 2, str(tmp_path), limit_s, confirms)
    assert why == HangError.__name__ and echo == (HangEcho.__name__ if confirms else "")
    assert began_s < ended_s
    assert (tmp_path / "hang" / "report.txt").read_text().count("the run hangs") == 1
