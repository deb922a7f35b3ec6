"""Activations of a long sample over ranks against those of one process,
as benchmarks/long_sample.py measures them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "long_sample.py"


@pytest.mark.torture
def test_a_rank_has_its_share(tmp_path: Path) -> None:
    options = [
        "--length",
        "4096",
        "--cp",
        "4",
        "--document",
        "512",
        "--out",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["rows"]) > 2 and found["problems"] == []
