"""The example of extension points: every layout gives its numbers,
and a killed run resumes bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.tracking.jsonl import read_records

EXAMPLE = Path(__file__).parents[2] / "examples" / "extend"
SIZES = [
    "model.options.width=16",
    "model.options.depth=2",
    "data.options.length=16",
    "batch.global_batch=8",
]
DRIVER = """
import json, os, signal, sys
import meshwright, own_run

class Kill(meshwright.Observer):
    def after_step(self, parts, event):
        if parts.state.step == 5 and parts.mesh.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

def train(config):
    kill = [Kill()] if config.train.steps == 7 else []
    meshwright.run_training(config, [own_run.Ema(), own_run.EarlyStop(), *kill])

if __name__ == "__main__":
    meshwright.spawn(train, meshwright.load_config("own_run.toml", json.loads(sys.argv[1])))
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example and of the script that kills it, where a user would have them."""
    for name in ("own_run.py", "own_run.toml"):
        (tmp_path / name).write_text((EXAMPLE / name).read_text())
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def test_the_script_is_short() -> None:
    lines = [line for line in (EXAMPLE / "own_run.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 66


def run(example: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    changes = [
        *SIZES,
        f"run.name={name}",
        "train.steps=8",
        "train.validate_every=2",
        "checkpoint.every=4",
    ]
    command = [
        sys.executable,
        "driver.py",
        json.dumps([*changes, "checkpoint.keep_last=9", "parallel.dp=1", *overrides]),
    ]
    return subprocess.run(
        command, cwd=example, capture_output=True, text=True, timeout=300, check=False
    )


def saved(example: Path, name: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(find(example / "runs" / name)[0].path)
    files = {file: entry.sha256 for file, entry in checkpoint.manifest.files.items()}
    return {"step": checkpoint.manifest.step, "files": files, "state": checkpoint.manifest.state}


@pytest.mark.long
@pytest.mark.slow
def test_layouts_agree(example: Path) -> None:
    layouts = ["dp2,pp2,tp2,zero2", "dp2,tp2,zero3", "pp2,tp2,zb_v", "dp4,offload"]
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "verify",
        "own_run.toml",
        "--layouts",
        *layouts,
    ]
    command += [*(f"--{each}" for each in SIZES)]
    done = subprocess.run(
        command, cwd=example, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and "all 4 layouts agree" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_and_on_another_layout(example: Path) -> None:
    whole = run(example, "whole")
    assert whole.returncode == 0, whole.stderr
    killed = run(example, "killed", "train.steps=7")
    assert (
        killed.returncode != 0
        and not (example / "runs" / "killed" / "checkpoints" / "step-00000008").exists()
    )
    resumed = run(example, "killed")
    assert resumed.returncode == 0 and "step 4, " in resumed.stdout, resumed.stderr
    assert saved(example, "killed") == saved(example, "whole")
    losses = {
        name: [r.loss for r in read_records(example / "runs" / name / "metrics.jsonl")]
        for name in ("whole", "killed")
    }
    assert losses["killed"][-4:] == losses["whole"][-4:]
    state = saved(example, "whole")["state"]["callbacks"]
    assert set(state) == {"EarlyStop"} and 0 < state["EarlyStop"]["best"] < 10
    other = run(
        example,
        "whole",
        "train.steps=10",
        "parallel.dp=4",
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.zero=3",
    )
    assert other.returncode == 0, other.stderr
    checkpoint = open_checkpoint(find(example / "runs" / "whole")[0].path)
    assert checkpoint.manifest.step == 10
    trained = checkpoint.parameters(TensorKind("momentum"))
    assert (
        checkpoint.parameters(TensorKind("ema"))
        == trained
        == checkpoint.parameters(TensorKind.WEIGHTS)
    )
