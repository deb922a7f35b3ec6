"""A run that cannot save ends before it has anything to lose: before its first step,
or at its first checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.checkpoint import find, open_checkpoint
from meshwright.errors import ConfigError
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check
from tests.end_to_end.driving import changed, layout, lines, refused_rank, run_config, train
from tests.support.errors import has_code
from tests.support.marks import long_row


@pytest.mark.parametrize("seed", [long_row(2**60), 2**63 - 1])
def test_every_seed_that_is_allowed_can_be_saved(
    seed: int, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus, tmp_path, run={"seed": seed}, parallel=layout(""), train={"steps": 2}
    )
    check(config, 1)
    train(pool, config)
    (found,) = find(run_directory(config.run))
    assert open_checkpoint(found.path).manifest.seed == seed
    assert "resuming from" in train(pool, changed(config, train={"steps": 3}))


@pytest.mark.parametrize("asynchronous", [True, long_row(False)])
def test_a_first_save_that_fails_ends_the_run(
    asynchronous: bool, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus,
        tmp_path,
        parallel=layout("dp2"),
        train={"steps": 12},
        checkpoint={"every": 2, "on_failure": "warn", "asynchronous": asynchronous},
    )
    run_directory(config.run).mkdir()
    (run_directory(config.run) / "checkpoints").write_text("in the way")
    for said, exit_code in pool.run(refused_rank, 2, config):
        assert "the checkpoint of step 2 could not be saved" in said and "errno 17" in said
        assert "whatever checkpoint.on_failure is" in said and exit_code == 2
    assert len(lines(config)) == 2


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(
    corpus: Path, tmp_path: Path
) -> None:
    config = run_config(
        corpus,
        tmp_path,
        parallel=layout(""),
        model={"builder": "tests.end_to_end.builders:with_a_boolean_buffer"},
    )
    with pytest.raises(
        ConfigError,
        match=r"a checkpoint of this run could not be written .*\n.*seen.*torch\.bool",
        check=has_code("MW-RUN-027"),
    ):
        check(config, 1)
