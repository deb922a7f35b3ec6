"""The notebook runs from top to bottom in one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
DRIVER = """
import json, sys

names = {"__name__": "__main__"}
for cell in json.loads(open(sys.argv[1]).read())["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
kept = ("begin", "losses", "validation", "resumed", "more", "text")
found = {name: names[name] for name in kept} | {"loss": names["result"].loss, "stages": len(names["stages"])}
open("found.json", "w").write(json.dumps(found))
"""


def run(folder: Path) -> dict[str, Any]:
    """Return what the variables of the notebook are after its last cell."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(NOTEBOOK)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


# the block of docs/python.md is its smaller brother, in tests/docs/test_python.py
@pytest.mark.torture
def test_the_notebook_trains_resumes_evaluates_and_samples(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found["begin"], found["resumed"], found["stages"]) == (0, 6, 1)
    assert len(found["losses"]) == 6 and found["more"][-1] < found["losses"][0]
    assert math.isfinite(found["validation"]) and math.isfinite(found["loss"])
    assert found["text"].startswith("class") and len(found["text"]) > len("class")


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
