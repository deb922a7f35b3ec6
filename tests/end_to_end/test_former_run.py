"""A run directory of commit 9f5e7374, from before the packages moved, is resumed.

``tests/golden/former_run`` was written by ``python -m launch train run.toml`` there (torch 2.13.0,
CPU, 2026-11-27): 8 steps of a GPT-2 with dropout as dp2, ZeRO-1. Its last checkpoint was removed,
so that step 4 is the newest.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from meshwright.tracking.jsonl import read_records
from tests.end_to_end.shell import Shell

pytestmark = pytest.mark.slow

FORMER = Path(__file__).parents[1] / "golden" / "former_run"
BUILDER = "models.gpt2:build"
"""The name of the builder in its files; ``meshwright.models.gpt2:build`` until 2026-11-29."""
COURSE = "--optimizer.min_learning_rate=0.0"
"""The default when the run began; a tenth of the learning rate now."""
TOLERANCE = 1e-5
"""Relative, of losses in float32: on the processor
that wrote them the same layout gives the same bits.
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [[], ["--parallel.dp=1", "--parallel.tp=2", "--batch.chunks=4"]], ids=["same", "tp2"]
)
def test_a_former_run_is_resumed(layout: list[str], tmp_path: Path, shell: Shell) -> None:
    shutil.copytree(FORMER, tmp_path, dirs_exist_ok=True)
    assert BUILDER in (tmp_path / "run.toml").read_text()
    resume_former(tmp_path, shell, "meshwright_launch", layout)


@pytest.mark.long
@pytest.mark.parametrize("name", ["meshwright.models.gpt2:build", "meshwright_models.gpt2:build"])
def test_a_run_with_a_later_name_is_resumed_by_the_former_command(
    name: str, tmp_path: Path, shell: Shell
) -> None:
    shutil.copytree(FORMER, tmp_path, dirs_exist_ok=True)
    for file in (*tmp_path.rglob("*.toml"), *tmp_path.rglob("*.json")):
        file.write_text(file.read_text().replace(f'"{BUILDER}"', f'"{name}"'))
    (sums,) = tmp_path.rglob("SHA256SUMS")
    names = [line.split()[1] for line in sums.read_text().splitlines()]
    hashes = [hashlib.sha256((sums.parent / each).read_bytes()).hexdigest() for each in names]
    sums.write_text(
        "".join(f"{digest}  {each}\n" for digest, each in zip(hashes, names, strict=True))
    )
    told = resume_former(tmp_path, shell, "meshwright.launch", [])
    assert "meshwright.launch is meshwright_launch now" in told


def resume_former(tmp_path: Path, shell: Shell, module: str, layout: list[str]) -> str:
    """Resume the run with ``python -m module`` and compare its losses;
    return what went to stderr.
    """
    metrics = tmp_path / "saved" / "run" / "metrics.jsonl"
    former = [record.loss for record in read_records(metrics)]
    done = shell.run("-m", module, "train", "run.toml", COURSE, *layout)
    assert done.returncode == 0, done.stderr
    assert "resuming from saved/run/checkpoints/step-00000004" in done.stdout
    assert len(former) == 8
    assert [record.loss for record in read_records(metrics)] == pytest.approx(former, rel=TOLERANCE)
    assert (
        tmp_path / "saved" / "run" / "checkpoints" / "step-00000008" / "manifest.json"
    ).is_file()
    return done.stderr
