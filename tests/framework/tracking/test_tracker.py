"""A sink may raise, block or be slow: the run does not notice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshwright.tracking.jsonl import JsonlSink, read_records
from meshwright.tracking.tracker import LateSink, Tracker


class Kept:
    """Keeps what it is told; ``told`` is released once per record."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed: list[bool] = []
        self.told = threading.Semaphore(0)

    def open(self) -> None:
        pass

    def write(self, record) -> None:
        self.steps.append(record.step)
        self.told.release()

    def close(self, failed: bool = False) -> None:
        self.closed.append(failed)


class Raising(Kept):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def open(self) -> None:
        self._raise_in("open")

    def write(self, record) -> None:
        super().write(record)
        self._raise_in("write")

    def close(self, failed: bool = False) -> None:
        super().close(failed)
        self._raise_in("close")

    def _raise_in(self, method: str) -> None:
        if self.where == method:
            raise RuntimeError(f"broken in {method}")


class Gated(Kept):
    """Goes on only when the gate is opened: blocked for ever, or slow, as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()

    def write(self, record) -> None:
        self.entered.set()
        self.gate.wait()
        super().write(record)


@pytest.fixture
def warnings() -> list[str]:
    return []


def test_everyone_gets_every_record_in_order(tmp_path, record, warnings) -> None:
    sinks = [Kept(), Kept()]
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), sinks, warn=warnings.append) as tracker:
        for step in range(1, 101):
            tracker.write(record(step))
    expected = list(range(1, 101))
    assert [found.step for found in read_records(tmp_path / "metrics.jsonl")] == expected
    assert [sink.steps for sink in sinks] == [expected, expected]
    assert [sink.closed for sink in sinks] == [[False], [False]]
    assert warnings == []


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
@pytest.mark.parametrize(("where", "told"), [("open", []), ("write", [1]), ("close", [1, 2, 3])])
def test_a_sink_that_raises_is_switched_off(tmp_path, record, warnings, where, told) -> None:
    good, bad = Kept(), Raising(where)
    with Tracker(
        JsonlSink(tmp_path / "metrics.jsonl"), [bad, good], warn=warnings.append
    ) as tracker:
        for step in (1, 2, 3):
            tracker.write(record(step))
    assert bad.steps == told
    assert len(bad.closed) == 1  # it may have something to free
    assert good.steps == [1, 2, 3]
    assert len(warnings) == 1
    assert "Raising" in warnings[0] and f"broken in {where}" in warnings[0]


class Odd(BaseException):
    """No Exception, and without a text."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit, KeyboardInterrupt, Odd])
@pytest.mark.parametrize("where", ["made", "open", "write", "close"])
def test_whatever_a_sink_raises_ends_only_this_sink(
    tmp_path, record, warnings, where, error
) -> None:
    def fail(*_: object) -> None:
        raise error

    def make() -> Kept:
        bad = Kept()
        if where == "made":
            fail()
        setattr(bad, where, fail)
        return bad

    good = Kept()
    sinks = [LateSink("theirs:make", make), good]
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), sinks, warn=warnings.append) as tracker:
        for step in (1, 2):
            tracker.write(record(step))
    assert good.steps == [1, 2] and good.closed == [False]
    assert len(warnings) == 1 and "theirs:make" in warnings[0] and error.__name__ in warnings[0]


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_sink_that_blocks_for_ever_is_left_behind(tmp_path, record, warnings) -> None:
    good, stuck = Kept(), Gated()
    tracker = Tracker(
        JsonlSink(tmp_path / "metrics.jsonl"),
        [stuck, good],
        queue_size=4,
        close_limit_s=0.2,
        warn=warnings.append,
    )
    tracker.write(record(1))
    assert stuck.entered.wait(10)
    for step in range(2, 21):
        tracker.write(record(step))
        assert good.told.acquire(timeout=10)  # its neighbour is not held up
    assert good.told.acquire(timeout=10)
    tracker.close()
    assert good.steps == list(range(1, 21))
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 20
    assert stuck.steps == []
    assert len(warnings) == 2
    assert "15 records" in warnings[0]  # one in its hands, four in the queue
    assert "left behind" in warnings[1]
    stuck.gate.set()


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_slow_sink_gets_what_fits_and_the_rest_is_counted(record, warnings) -> None:
    slow = Gated()
    tracker = Tracker(None, [slow], queue_size=3, warn=warnings.append)
    tracker.write(record(1))
    assert slow.entered.wait(10)
    for step in range(2, 8):
        tracker.write(record(step))
    slow.gate.set()
    tracker.close()
    assert slow.steps == [1, 2, 3, 4]
    assert slow.closed == [False]
    assert len(warnings) == 1 and "3 records" in warnings[0]


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_blocked_sink_does_not_keep_the_process_alive() -> None:
    """The whole way to the end of the interpreter: nothing joins the thread."""
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done\n"
    assert "left behind" in run.stderr


BLOCKED = """
import threading
from meshwright.tracking.tracker import Tracker
class Blocked:
    def open(self): threading.Event().wait()
    def write(self, record): pass
    def close(self, failed=False): pass
Tracker(None, [Blocked()], close_limit_s=0.1).close()
print("done")
"""


def test_a_run_that_fails_says_so_to_the_sinks(record) -> None:
    sink = Kept()
    with pytest.raises(ZeroDivisionError), Tracker(None, [sink]) as tracker:
        tracker.write(record(1))
        raise ZeroDivisionError
    assert sink.closed == [True]


def test_a_truth_that_cannot_be_written_is_tried_again_and_the_run_goes_on(
    tmp_path, record, warnings
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    other = Kept()
    with Tracker(JsonlSink(blocked / "metrics.jsonl"), [other], warn=warnings.append) as tracker:
        for step in (1, 2, 3):
            tracker.write(record(step))
        blocked.unlink()  # the cause goes away: nothing was lost
        tracker.write(record(4))
    assert other.steps == [1, 2, 3, 4]
    assert [found.step for found in read_records(blocked / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (
        len(warnings) == 2 and f"{blocked} cannot be written: File exists (errno 17)" in warnings[0]
    )
    assert "is written again" in warnings[1]


def test_a_warning_that_cannot_be_written_stops_nothing(record) -> None:
    def closed_stderr(message: str) -> None:
        raise BrokenPipeError

    sink = Raising("write")
    with Tracker(None, [sink], warn=closed_stderr) as tracker:
        tracker.write(record(1))
    assert sink.steps == [1]


def test_without_sinks_nothing_happens(record) -> None:
    with Tracker() as tracker:
        tracker.write(record(1))
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("tracking")
        ]
