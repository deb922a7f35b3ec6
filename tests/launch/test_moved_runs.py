"""A run that was moved, copied or written elsewhere:
no command trains it from fresh weights without a word.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import resolve, to_toml, write_snapshot
from meshwright.errors import ConfigError, DataError
from meshwright.run.directory import STATUS, check_not_moved, check_own_directory
from meshwright.tracking.record import StepRecord, to_json
from meshwright.watch.hang.heartbeat import Heartbeat
from meshwright.watch.hang.status import RankStatus, Status
from meshwright_launch.cli import main
from meshwright_launch.status import describe
from tests.end_to_end.driving import run_config
from tests.support.errors import has_code


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory as training leaves it, without a checkpoint."""
    config = resolve(run_config(tmp_path / "corpus", tmp_path / "runs"), 1)
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    write_snapshot(path, config)
    (path / "config.toml").write_text(to_toml(config))
    return path


SLURM = ("--nodes=1", "--devices-per-node=1")


@pytest.mark.parametrize(
    "command",
    [("train",), ("slurm", *SLURM), ("kubernetes", *SLURM, "--image=registry/team/train:1.0")],
)
def test_a_moved_run_is_refused(
    command: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = run.rename(run.with_name("base"))
    name, *options = command
    assert main([name, str(moved / "config.toml"), *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(
        f"meshwright: error: {moved}/config.toml lies in the run {moved}, "
    )
    assert f"--run.directory={moved.parent} --run.name=base" in told.err and told.err.endswith(
        "[MW-RUN-037]\n"
    )
    assert not run.exists()


def test_a_copy_is_refused_a_link_and_a_named_run_are_not(run: Path, tmp_path: Path) -> None:
    config = run_config(tmp_path / "corpus", tmp_path / "runs")
    copied = shutil.copytree(run, tmp_path / "elsewhere" / "run")
    with pytest.raises(
        ConfigError, match="it was moved, copied or renamed", check=has_code("MW-RUN-037")
    ):
        check_not_moved(config.run, str(copied / "config.toml"), ["--train.steps=9"])
    for named in (
        ["--run.name=two"],
        ["--run.directory", str(copied.parent)],
        ["--run.name", "run"],
    ):
        check_not_moved(config.run, str(copied / "config.toml"), named)
    check_not_moved(config.run, str(run / "config.toml"), [])
    (tmp_path / "link").symlink_to(run)
    check_not_moved(config.run, str(tmp_path / "link" / "config.toml"), [])
    (copied / "resolved.json").unlink()  # a folder of the user's, with a configuration
    check_not_moved(config.run, str(copied / "config.toml"), [])


@pytest.mark.parametrize("keys", [{"name": "two"}, {"directory": "/scratch"}])
def test_a_run_is_written_where_it_trains(keys: dict[str, Any], tmp_path: Path) -> None:
    config = run_config(tmp_path / "corpus", tmp_path / "runs")
    check_own_directory(config.run, tmp_path / "runs" / "run")
    with pytest.raises(ConfigError, match=r"where training would not find it.*MW-RUN-036"):
        check_own_directory(config.replace(run=keys).run, tmp_path / "runs" / "run")


def live_status(**keys: Any) -> str:
    """Return a status file of this process, written just now."""
    mine: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "at_s": time.time()}
    beat = Heartbeat(rank=0, beat=1, step=1, phase="training", what="F0", for_s=0.0, **mine)
    run = {
        "run": "run",
        "tick_s": 60.0,
        "grid": (1, 1, 1),
        "step": 1,
        "steps": 9,
        "phase": "training",
    }
    whole = Status(**mine, **run, ranks=(RankStatus(silent_s=0.0, beat=beat),))
    return json.dumps(whole.model_dump(mode="json") | keys)


@pytest.mark.parametrize("step_s", [float("inf"), 1e15, 1e308])
def test_the_status_of_a_step_without_end(step_s: float, tmp_path: Path) -> None:
    """A damaged line of metrics gives no date of the end."""
    record = StepRecord(1, 8, 8, 1.0, 1.0, 1e-3, step_s, 0.0, 1.0, 1, 1)
    (tmp_path / "metrics.jsonl").write_text(to_json(record) + "\n")
    (tmp_path / STATUS).write_text(live_status())
    text = describe(tmp_path)
    assert (
        "state  training" in text
        and f"step   1 of 9, {step_s:.3g} s each" in text
        and "left" not in text
    )


def test_a_status_of_no_time_is_damaged(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text(live_status(at_s=1e300, ended={"how": "failed", "message": ""}))
    with pytest.raises(DataError, match="no status of a run: at_s", check=has_code("MW-WATCH-004")):
        describe(tmp_path)
