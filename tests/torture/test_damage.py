"""Each file of a real run's newest checkpoint, damaged in each way: found, named,
and the one before is taken.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find, newest_valid
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import changed, exact_losses, layout, run_config, train


def flip(path: Path, draw: random.Random) -> None:
    """One byte, anywhere."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "missing": lambda path, draw: path.unlink(),
    "empty": lambda path, draw: os.truncate(path, 0),
    "flipped": flip,
    "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
}


@pytest.mark.torture(
    row="every file of the newest checkpoint x {missing, empty, one byte flipped, truncated}"
)
def test_every_damaged_file_is_named(
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    seed: int,
    record_property: Callable[[str, Any], None],
) -> None:
    draw = random.Random(seed)
    config = run_config(
        corpus,
        tmp_path / "run",
        parallel=layout("dp2,pp2,tp2"),
        train={"steps": 4, "dtype": "bfloat16"},
        checkpoint={"every": 2},
    )
    train(pool, config)
    expected = exact_losses(config)
    newest, older = find(run_directory(config.run))
    sound = tmp_path / "sound"
    shutil.copytree(run_directory(config.run), sound)
    cases = 0
    for name in sorted(path.name for path in newest.path.iterdir()):
        for damage in DAMAGE.values():
            damage(newest.path / name, draw)
            warned: list[str] = []
            found = newest_valid(run_directory(config.run), warn=warned.append)
            assert found is not None and found.path == older.path
            assert len(warned) == 1 and newest.path.name in warned[0]
            assert name in warned[0]
            shutil.copy2(sound / "checkpoints" / newest.path.name / name, newest.path / name)
            cases += 1
    for damage in DAMAGE.values():  # and through the door that users take
        damage(draw.choice(sorted(newest.path.glob("*.safetensors"))), draw)
        said = train(pool, config)
        assert f"resuming from {older.path}" in said
        assert exact_losses(config) == expected
        shutil.rmtree(run_directory(config.run))
        shutil.copytree(sound, run_directory(config.run))
    newest.path.joinpath("manifest.json").unlink()
    older.path.joinpath("manifest.json").unlink()
    with pytest.raises(Exception, match="none of the 2 checkpoints verifies"):
        train(pool, changed(config, train={"steps": 6}))
    record_property("noted", f"{cases} of {cases} detected, file named, fell back")
