"""A disk that is too small for the checkpoints: told before any rank starts.
On a small file system, really mounted.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.checkpoint import find
from meshwright.checkpoint.preflight import checkpoint_bytes
from meshwright.config import RunConfig, resolve, to_toml
from meshwright.errors import ConfigError
from meshwright.parts import Observer, Parts
from meshwright.run.directory import run_directory
from meshwright.run.tensors import saved_tensors
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check, work
from tests.end_to_end.driving import GPT2, initial_weights, layout, run_config, size
from tests.support.errors import has_code
from tests.support.marks import long_row

STATES = ("first", "second", "third")


class Adding(Observer):
    """Adds three states to each weight."""

    def __init__(self, parts: Parts) -> None:
        pass

    def setup(self, parts: Parts) -> None:
        for name in STATES:
            parts.add_state(name)


def needed(config: RunConfig, num_added: int = 0) -> int:
    return checkpoint_bytes(
        saved_tensors(draw_blueprint(resolve(config, size(config)))), 2 + num_added
    )


def train_or_refuse(rank: int, world_size: int, config: RunConfig) -> str:
    """One rank; its warnings, and the error that refuses the run."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            work(config)
        except ConfigError as error:
            return said.getvalue() + str(error)
    return said.getvalue()


def taken(run: Path) -> int:
    return sum(file.stat().st_size for file in find(run)[0].path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "text", "frozen"),
    [long_row("bfloat16", "pp2,tp2", False), ("float32", "", True), ("float64", "tp2", False)],
)
def test_it_is_what_a_checkpoint_takes(
    dtype: str, text: str, frozen: bool, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    options: dict[str, Any] = {**GPT2, "vocab_size": 301, "hidden_size": 128}
    model = {"builder": "meshwright_models.gpt2:build", "options": options}
    if frozen:
        (tmp_path / "source.txt").write_text("1.5")
        options["source"] = str(tmp_path / "source.txt")
        model["builder"] = "tests.end_to_end.builders:partly_frozen"
    config = run_config(
        corpus, tmp_path, parallel=layout(text), train={"dtype": dtype}, model=model
    )
    pool.run(initial_weights, size(config), config, str(tmp_path / "run"))
    assert abs(needed(config) - taken(tmp_path / "run")) < 0.02 * taken(tmp_path / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave so many bytes, to within a page."""
    import shutil

    (disk / "filler").unlink(missing_ok=True)
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - free))


def test_less_than_one_is_refused(
    disk: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run_config(corpus, disk, parallel=layout(""))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    fill(disk, 100_000)
    assert main(["train", str(file)]) == 2
    said = capfd.readouterr()
    assert said.out == "", "no rank was started"
    assert (
        said.err.startswith(f"meshwright: error: {run_directory(config.run)} has ")
        and said.err.count("\n") == 1
    )
    assert f"one checkpoint of this run takes {needed(config):,}: free " in said.err
    assert "or choose a run.directory on another disk" in said.err
    assert not list(run_directory(config.run).iterdir())


@pytest.mark.long
def test_fewer_than_are_kept_is_warned_of(
    disk: Path, corpus: Path, pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run_config(corpus, disk, parallel=layout(""), checkpoint={"keep_last": 2})
    one = needed(config)
    fill(disk, 2 * one)
    check(config, 1)
    said = capfd.readouterr().err
    assert (
        said.startswith(f"warning: {run_directory(config.run)} has ")
        and "checkpoint.keep_last = 2 takes" in said
    )
    assert f"takes {3 * one:,} more" in said and said.count("\n") == 1
    fill(disk, 3 * one + 50_000)
    check(config, 1)
    assert capfd.readouterr().err == ""

    # what is there already need not fit once more
    pool.run(initial_weights, 1, config, str(run_directory(config.run)))
    fill(disk, 2 * one + 50_000)
    check(config, 1)
    assert capfd.readouterr().err == ""
    fill(disk, one + 50_000)
    check(config, 1)
    assert "warning: " in capfd.readouterr().err

    # nor does what a dead save has left, which the next one removes
    dead = run_directory(config.run) / "checkpoints" / ".tmp-step-00000001-a1"
    dead.mkdir()
    (dead / "pp0-tp0-00000.safetensors").write_bytes(bytes(one))
    fill(disk, 20_000)
    check(config, 1)
    assert "warning: " in capfd.readouterr().err
    (dead / "pp0-tp0-00000.safetensors").unlink()
    fill(disk, 20_000)
    with pytest.raises(
        ConfigError, match="bytes free, and one checkpoint", check=has_code("MW-CHECKPOINT-029")
    ):
        check(config, 1)

    # a run that has taken its steps saves no more
    path = find(run_directory(config.run))[0].path
    path.rename(path.with_name("step-00000006"))
    check(config, 1)


def test_states_of_callbacks_count_and_all_ranks_refuse(
    disk: Path, corpus: Path, pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    callbacks = (f"{__name__}:Adding",)
    config = run_config(
        corpus,
        disk,
        parallel=layout("dp2,zero1"),
        train={"callbacks": callbacks, "steps": 1},
        checkpoint={"keep_last": 1},
    )
    plain, one = needed(config), needed(config, len(STATES))
    run = run_directory(config.run)
    fill(disk, (plain + one) // 2)
    check(config, 2)  # the ranks start, and know more
    assert "warning: " in capfd.readouterr().err  # of keep_last, for other reasons
    told = pool.run(train_or_refuse, 2, config)
    assert told[0] == told[1]
    assert f"and one checkpoint of this run takes {one:,}: free " in told[0]
    assert told[0].endswith("states of callbacks are included: first, second, third [MW-RUN-034]")
    assert not find(run) and not (run / "metrics.jsonl").exists()

    fill(disk, one + 100_000)
    told = pool.run(train_or_refuse, 2, config)
    assert (
        f"checkpoint.keep_last = 1 takes {2 * one:,} more" in told[0]
        and told[0].count("warning: ") == 1
    )
    assert told[1] == ""
    assert abs(one - taken(run)) < 0.05 * taken(run)  # tensors are small, and each has a header

    fill(disk, 20_000)  # a run that has taken its steps saves no more
    assert pool.run(train_or_refuse, 2, config) == ["", ""]
