"""TensorBoard's own thread on a full disk: one warning, no traceback, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from tests.plan.report.builders import record
from meshwright.tracking.tensorboard import TensorBoardSink
from meshwright.tracking.tracker import Tracker

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = TensorBoardSink(None, Path(sys.argv[1]))
with Tracker(None, [sink]) as tracker:
    tracker.write(record(1))
    time.sleep(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for step in range(2, 400):
        tracker.write(record(step))
        time.sleep(0.005)
print("went on")
"""


@pytest.mark.slow
def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "went on\n", done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    assert (
        done.stderr.count("TensorBoardSink is switched off") == 1
        and "File too large" in done.stderr
    ), done.stderr
