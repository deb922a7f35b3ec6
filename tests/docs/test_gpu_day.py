"""benchmarks/gpu_day.py on a CPU: rows are written,
and a stage that is stopped is a row with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_day.py"


def day(out: Path, *words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code, and the rows of each stage, of toy sizes on a CPU."""
    program = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out), *words]
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.mark.long
@pytest.mark.slow
def test_each_stage_writes_its_rows(tmp_path: Path) -> None:
    """A kernel that a CPU lacks (addmm into float32) is a row with its reason,
    and not the end of its stage.
    """
    code, rows = day(tmp_path, "--stages", "facts,ceilings", "--minutes", "5")
    assert code in (0, 1)
    facts = {row["name"]: row for row in rows["facts"]}
    assert set(facts) == {"versions", "device", "kernels of attention"}, facts
    assert facts["versions"]["megatron-core"] and facts["kernels of attention"]["kernels"]
    ceilings = {row["name"]: row for row in rows["ceilings"]}
    assert len(ceilings) == 9 and all("ms" in row or "reason" in row for row in ceilings.values())
    assert ceilings["GEMM forward"]["ms"] > 0 and ceilings["cross-entropy, 12 bytes each"]["ms"] > 0
    assert "GEMM forward" in (tmp_path / "table.txt").read_text()


@pytest.mark.torture
def test_all_stages(tmp_path: Path) -> None:
    """Losses are compared in the race; a measured peak on CPU is the predicted one to 1 %."""
    _, rows = day(tmp_path, "--minutes", "9")
    assert rows["tests"][0]["exit_code"] == 0
    assert [row for stage in ("memory", "race") for row in rows[stage] if "reason" in row] == []
    predicted, measured = rows["memory"]
    assert predicted["predicted_gib"] > 0 and abs(measured["error_percent"]) < 1
    assert {row["name"].rpartition(" ")[2] for row in rows["race"]} == {
        "ours",
        "master",
        "fully_shard",
        "megatron",
    }
    assert len(rows["predict"]) == 5 and all(row["predicted_ms"] > 0 for row in rows["predict"][1:])
    assert sum("error_percent" in row for row in rows["predict"]) == 2, "ours x 1 and x 4"
    assert [(len(row["losses"]), "reason" in row) for row in rows["shared"]] == 4 * [(3, False)], (
        rows["shared"]
    )
    ranks = rows["one_rank"]
    assert [row["step_ms"] > 0 and abs(row["error_percent"]) < 2 for row in ranks] == 4 * [True], (
        ranks
    )
    assert all(
        row["step_ms"] > 0 and row["mfu_reason"] and row["kernels_ms"] for row in rows["race"]
    )


def test_the_idle_share_is_of_the_time_that_no_kernel_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu_race import idle_share

    assert idle_share([(0.0, 4.0), (1.0, 2.0), (6.0, 8.0), (7.0, 10.0)]) == 0.2
    assert idle_share([]) == 0.0


def test_a_stage_past_its_deadline_is_a_row_with_the_reason(tmp_path: Path) -> None:
    code, rows = day(tmp_path, "--stages", "race", "--minutes", "0.001")
    assert code == 1 and "deadline" in rows["race"][-1]["reason"]
