"""The model of docs/models.md has every attribute and gives the numbers of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.model.build import PlainModel

ROOT = Path(__file__).parents[2]

TEXT = (ROOT / "docs" / "models.md").read_text()
CONFIG = """
[model]
builder = "attributes:build"
[data]
train = "random"
sequence_length = 8
[batch]
micro_batch_size = 1
global_batch = 4
[train]
steps = 3
"""


@pytest.mark.long
def test_the_model_with_every_attribute(tmp_path: Path) -> None:
    (block,) = (
        b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "model.impossible" in b
    )
    (tmp_path / "attributes.py").write_text(block)
    (tmp_path / "run.toml").write_text(CONFIG)
    layouts = ["dp2,pp2,tp2", "dp2,zero3,selective"]
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "verify",
        "run.toml",
        "--steps",
        "3",
        "--layouts",
    ]
    found = subprocess.run(
        [*command, *layouts], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("same numbers") >= 2, found.stdout


def test_every_attribute_is_in_the_table() -> None:
    names = {
        "sharding_plan",
        "divisible",
        "tied_weights",
        "initialise",
        "selective_recompute",
        "impossible",
        "loss",
    }
    names |= {"loss_heads"}
    assert names <= set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert {"initialise", "loss", "divisible", "selective_recompute", "impossible"} <= set(
        PlainModel.__annotations__
    )
