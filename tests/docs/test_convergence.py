"""benchmarks/convergence at toy sizes: every contender has the losses of plain torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "convergence"


def run(script: str, *words: str) -> str:
    """Return what a script prints."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of random tokens; a contender reads nothing else of one."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        generator.integers(0, 4096, 8_000, dtype=np.uint16).tofile(folder / f"{split}.bin")
    (folder / "fingerprint.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


def losses(contender: str, corpus: Path, out: Path) -> list[float]:
    """Return the losses of a contender's steps, and its validation loss."""
    file = out / f"{contender.replace(':', '-')}-seed0.json"
    if not file.exists():
        run("run.py", contender, "--corpus", str(corpus), "--out", str(out), "--tiny")
    record = json.loads(file.read_text())
    found: list[float] = [*record["losses"], record["validation"]]
    assert len(found) == 9
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "dp2-zero3", "pp2-tp2", "dp2-pp2-cp2"])
def test_a_layout_has_the_losses_of_plain_torch(layout: str, corpus: Path, out: Path) -> None:
    assert losses(f"ours:{layout}", corpus, out) == pytest.approx(
        losses("plain", corpus, out), abs=1e-5
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "package"), [("core", "megatron"), ("trainer", "accelerate"), ("titan", "torchtitan")]
)
def test_another_framework_has_the_losses_of_plain_torch_at_its_rates(
    other: str, package: str, corpus: Path, out: Path
) -> None:
    """So learning rates, and torchtitan's decay of norms, are all that differs."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    theirs = losses(other, corpus, out)
    assert theirs != pytest.approx(losses("plain", corpus, out), abs=1e-5)
    assert theirs == pytest.approx(losses(f"plain-as-{other}", corpus, out), abs=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_the_table_has_a_row_of_each_run(corpus: Path, out: Path) -> None:
    losses("plain", corpus, out)
    losses("ours:one", corpus, out)
    picture = out / "curves.png"
    printed = run("table.py", str(out), "--picture", str(picture))
    assert "| meshwright, 1 rank | 1 |" in printed
    assert picture.stat().st_size > 10_000
