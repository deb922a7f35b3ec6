"""Published runs of the accuracy benchmark: rows that it cannot score are named,
three sources are in no fit.
"""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright_plan.planner.rates import RateFractions

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/planner_accuracy.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("planner_accuracy", "published", "report", "measure", "task", "wire"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("planner_accuracy")


def written(path: Path, *changes: dict[str, Any]) -> Path:
    """Write small runs in the columns of published_runs.csv, each with some values changed."""
    with (BENCHMARKS / "published_runs.csv").open(encoding="utf-8") as lines:
        example = next(csv.DictReader(lines))
    small = {
        "id": "mine",
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "kv_heads": 2,
        "ffn": 256,
        "vocab": 128,
        "seq": 32,
    }
    small |= {
        "gpus": 8,
        "tp": 1,
        "pp": 1,
        "dp": 8,
        "micro_batch": 1,
        "global_batch": 8,
        "iter_time_s": 1.0,
    }
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(example))
        writer.writeheader()
        for change in changes:
            writer.writerow(example | small | change)
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schedule": "zigzag"}, "schedule = 'zigzag': known are none, 1F1B"),
        ({"gpu": "abacus"}, "gpu = 'abacus': known are A100-SXM-80GB"),
        ({"dp": "", "tp": "two"}, "no whole number from 1 up: tp = 'two', dp = ''"),
        ({"iter_time_s": ""}, "no iter_time_s, no peak_mem_gb"),
        ({"heads": 3, "kv_heads": 3}, "hidden"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(
    accuracy: ModuleType, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    runs = written(tmp_path / "runs.csv", {}, {"id": "other"} | change)
    rows, left_out = accuracy.draw(runs, lambda name: True)
    assert [row.case.row.id for row in rows] == ["mine"]
    (line,) = left_out
    assert line.startswith("other: ") and reason in line


def test_a_file_without_a_column_names_it(accuracy: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("id,layers\nmine,2\n")
    assert accuracy.draw(tmp_path / "runs.csv", lambda name: True)[1][0].startswith(
        "mine: no column hidden, heads"
    )


def test_three_sources_are_in_no_fit(accuracy: ModuleType, tmp_path: Path) -> None:
    ids = [*(f"{name}-1" for name in accuracy.NEVER_FITTED), "korthikanti22-1"]
    rows, _ = accuracy.draw(
        written(tmp_path / "runs.csv", *({"id": each} for each in ids)), lambda name: True
    )
    assert len(accuracy.NEVER_FITTED) == 3 and len(rows) == 4
    assert accuracy.Fit(rows).papers == ["korthikanti22"]


def test_rows_with_expert_parallelism_have_the_options_of_their_model(
    accuracy: ModuleType, tmp_path: Path
) -> None:
    """A file without the two columns is read as before."""
    experts = {"ep": 4, "model_options": '{"moe": {"num_experts": 4, "top_k": 2}}'}
    rows, left_out = accuracy.draw(
        written(tmp_path / "runs.csv", {"id": "simumax-1"}, {"id": "bridgemoe-1"} | experts),
        lambda name: True,
    )
    assert not left_out and [row.case.config.parallel.ep for row in rows] == [1, 4]
    dense, mixture = rows
    assert mixture.case.execution.groups_experts and not dense.case.execution.groups_experts
    # one expert in each of two blocks
    assert mixture.layout.elements[0].of_experts.trained == 2 * 3 * 64 * 256
    assert {
        message.axis for layer in mixture.layout.layers for message in layer.forward_messages
    } == {"ep"}
    found = accuracy.show_axis(
        [accuracy.predict(row, accuracy.START) for row in rows], accuracy.Console(quiet=True), "ep"
    )
    assert [(line["source"], line["guessed"], line["rows"]) for line in found] == [
        ("bridgemoe", True, 1)
    ]


def test_rows_with_context_parallelism_are_scored_apart(
    accuracy: ModuleType, tmp_path: Path
) -> None:
    """A row of another source is not among them, and one whose source guesses is in no fit."""
    shared = {"dp": 4, "cp": 2}
    changes = [{"id": "simumax-1"}, {"id": "simumax-2"} | shared, {"id": "nemo-1"} | shared]
    rows, _ = accuracy.draw(written(tmp_path / "runs.csv", *changes), lambda name: True)
    scored = [accuracy.predict(row, accuracy.START) for row in rows]
    found = accuracy.show_axis(scored, accuracy.Console(quiet=True), "cp")
    assert [(line["source"], line["guessed"], line["rows"]) for line in found] == [
        ("simumax", False, 1),
        ("nemo", True, 1),
    ]
    assert found[0]["mean"] == abs(scored[1].error) and found[0]["bias"] == scored[1].error
    assert accuracy.Fit(rows).papers == ["simumax", "simumax"]


@pytest.mark.long
def test_published_mixtures_are_predicted_as_the_docs_say(accuracy: ModuleType) -> None:
    """README and docs/planner-accuracy.md state 2 to 55 %;
    groups of experts once straddled domains of GB200.
    """
    sources = ("bridgemoe-", "mcoremoe-", "moezoo-", "dsgb200-")
    rows, _ = accuracy.draw(
        BENCHMARKS / "published_runs.csv", lambda name: name.startswith(sources)
    )
    errors = [abs(accuracy.predict(row, RateFractions()).error) for row in rows]
    assert len(errors) == 20 and max(errors) < 0.56 and sum(errors) / len(errors) < 0.23
