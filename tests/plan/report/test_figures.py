"""Key figures of a run, the table of several runs, and the notices."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.mesh.grid import Grid
from meshwright.run.directory import PEAKS
from meshwright_plan.report.figures import Cell, compared_figures, key_figures, layout_of
from meshwright_plan.report.notices import notices
from meshwright_plan.report.page import TEMPLATE, short_value
from meshwright_plan.report.run import MAX_REMARKS, ReportedState, read_run
from tests.plan.report.builders import make_run


def strip(directory: Path) -> dict[str, tuple[str, str]]:
    return {each.name: (each.text, each.note) for each in key_figures(read_run(directory))}


def test_the_strip_has_the_newest_of_all(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        values = {"loss": 100.0 - step, "mfu": 0.4, "mfu_causal": 0.3}
        validated = {25: 5.0, 50: 7.5}.get(step)
        return {**values, "validation_loss": validated, "validation_perplexity": validated}

    shown = strip(make_run(tmp_path / "demo", 60, change=change))
    assert list(shown) == ["step", "training loss", "validation loss", "throughput", "MFU",
                           "peak memory", "pipeline bubble", "tokens"]  # fmt: skip
    assert shown["step"] == ("60 of 100", "60%"), "it does not train: no time is left"
    note = "mean of the last 10 steps, nats per token"
    assert shown["training loss"] == ("44.5000", note)
    note = "at step 50; best 5.0000 at step 25; perplexity 7.5"
    assert shown["validation loss"] == ("7.5000", note)
    assert shown["MFU"] == ("40.0%", "30.0% with causal attention counted half")
    assert shown["peak memory"] == ("1.10 GiB", "rank 7, the highest")


def test_a_live_run_has_its_time_left(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "demo", 40, change=lambda step: {"step_s": 60.0}))
    live = replace(run, state=ReportedState("running", "since today"))
    (step, *_) = key_figures(live)
    until = time.strftime("%Y-%m-%d %H:", time.localtime(time.time() + 3600))
    assert step.note.startswith(f"40%, 1:00:00 left, until about {until}")


def test_the_layout_is_that_of_the_last_start(tmp_path: Path) -> None:
    """Not that of the configuration, which a recovery on fewer nodes leaves as it is."""
    starts = ((0, Grid(pp=2, dp=2, tp=2)), (20, Grid(pp=2, tp=2)))
    directory = make_run(tmp_path / "demo", 40, starts=starts)
    assert layout_of(read_run(directory)) == "pp2 dp1 tp2, 1f1b, ZeRO-1"
    with (directory / "starts.jsonl").open("a") as file:
        file.write('{"at": ')
    torn = read_run(directory)
    assert layout_of(torn) == "pp2 dp1 tp2, 1f1b, ZeRO-1" and len(torn.present) == 20
    (directory / "starts.jsonl").unlink()
    assert layout_of(read_run(directory)) == "pp2 dp2 tp2, 1f1b, ZeRO-1"


def compared(folder: Path, *changes: tuple[int, dict[str, Any]]) -> dict[str, list[Cell]]:
    runs = [
        make_run(folder / f"run{i}", steps, seed=i, change=lambda _, c=change: c)  # type: ignore[misc]
        for i, (steps, change) in enumerate(changes)
    ]
    return dict(compared_figures([read_run(run) for run in runs]))


def test_the_best_of_each_row_is_marked(tmp_path: Path) -> None:
    """The lowest loss, the highest throughput; with the difference of the losses to the best."""
    rows = compared(
        tmp_path,
        (40, {"loss": 3.5, "tokens_per_s": 5000.0, "validation_loss": 4.0}),
        (20, {"loss": 3.25, "tokens_per_s": 9000.0, "validation_loss": math.nan}),
        (40, {"loss": math.nan, "tokens_per_s": 7000.0, "validation_loss": 4.5}),
    )
    best = {name: [cell.is_best for cell in cells] for name, cells in rows.items()}
    assert best["training loss"] == best["throughput"] == [False, True, False]
    assert best["best validation loss"] == [True, False, False]
    assert not any(best["pipeline bubble"] + best["layout"]), "equal"
    assert [cell.note for cell in rows["training loss"]][:2] == ["+0.2500", ""]
    assert [cell.text for cell in rows["training loss"]] == ["3.5000", "3.2500", "nan"]
    assert rows["best validation loss"][2] == Cell("4.5000", "+0.5000, at step 1", False)
    assert [cell.text for cell in rows["step"]] == ["40 of 100", "20 of 100", "40 of 100"]


def test_the_memory_of_one_rank_is_not_compared_with_that_of_all(tmp_path: Path) -> None:
    """Unless the run has that rank alone."""

    def best(others: int, devices: int) -> list[bool]:
        folder = tmp_path / f"{others} {devices}"
        low = {"memory_bytes": 2**20, "num_devices": devices}
        runs = [make_run(folder / "all", 5, traced=False)]
        runs += [
            make_run(folder / f"{i}", 5, change=lambda step: low, traced=False)
            for i in range(others)
        ]
        for run in runs[1:]:
            (run / PEAKS).unlink()
        found = dict(compared_figures([read_run(run) for run in runs]))["peak memory"]
        assert found[1].text == "1 MiB"
        return [cell.is_best for cell in found]

    assert best(1, 8) == [False, False]
    assert best(2, 8) == [False, False, False]
    assert best(1, 1) == [False, True]
    alone = strip(tmp_path / "1 8" / "0")
    assert alone["peak memory"] == ("1 MiB", "rank 0"), "it is shown"


def test_runs_of_different_length_are_compared_at_their_last_common_step(tmp_path: Path) -> None:
    falling = [make_run(tmp_path / name, steps, change=lambda step: {"loss": 50.0 - step})
               for name, steps in (("long", 40), ("short", 20))]  # fmt: skip
    runs = [read_run(each) for each in falling]
    rows = dict(compared_figures(runs))
    assert [cell.text for cell in rows["training loss"]] == ["14.5000", "34.5000"]
    assert [cell.text for cell in rows["training loss at step 20"]] == ["34.5000"] * 2
    assert not [name for name in dict(compared_figures(runs[:1] * 2)) if "loss at step" in name]


def test_a_run_without_a_step_is_a_column_of_dashes(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / f"run{steps}", steps)) for steps in (0, 20)]
    rows = dict(compared_figures(runs))
    assert {cells[0].text for cells in rows.values()} == {"–"}
    assert rows["step"][1].text == "20 of 100" and compared_figures(runs[:1]) == []


def test_notices_of_everything_the_worst_first(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        return {
            5: {"skipped": True, "loss": math.inf},
            6: {"grad_norm": math.nan},
            10: {"straggler": "rank 3", "straggler_share": 0.125},
            20: {"straggler": "rank 3", "straggler_share": 0.25},
        }.get(step, {})

    grid = Grid(pp=2, dp=2, tp=2)
    directory = make_run(
        tmp_path / "demo", 40, starts=((0, grid), (12, grid), (30, grid)), change=change
    )
    line = {"at": "2026-12-01", "what": "node b is lost", "nodes": ["b"], "step": 31}
    (directory / "recoveries.jsonl").write_text(json.dumps(line) + "\n")
    (directory / "hang").mkdir()
    (directory / "hang/report.txt").write_text("rank 1 waits for rank 0")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step":')
    found = notices(read_run(directory))
    assert [(each.level, each.title) for each in found] == [
        ("error", "The run hung"),
        ("error", "NaN/Inf in 1 step"),
        ("warning", "1 step skipped for NaN/Inf"),
        ("warning", "1 straggler"),
        ("warning", "1 problem with files of the run"),
        ("info", "1 restart"),
        ("info", "1 recovery in place"),
    ]
    by_title = {each.title: each for each in found}
    assert by_title["The run hung"].lines == "rank 1 waits for rank 0"
    assert by_title["1 straggler"].rows == [("rank 3", "2", "25%")]
    assert by_title["1 restart"].text == "Resumed from step 12."
    assert "before step 31: node b is lost" in by_title["1 recovery in place"].text
    assert notices(read_run(make_run(tmp_path / "calm", 40))) == []


def test_more_problems_than_are_listed_are_counted(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 5)
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines("torn\n" for _ in range(20))
    remarks = read_run(directory).remarks
    assert len(remarks) == MAX_REMARKS + 1 and remarks[-1] == "and 8 more"
    assert remarks[0].startswith("metrics.jsonl:6: "), "relative to the run"


def test_a_number_of_a_configuration_has_six_digits() -> None:
    assert [short_value(each) for each in (0.0003, 1e-3 / 3, 1e-08, 3, "x", True)] == [
        "0.0003", "0.000333333", "1e-08", "3", '"x"', "true",
    ]  # fmt: skip


LINEAR = tuple[float, float, float]
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Matrices on linear RGB of Machado et al., 2009, of severity 1."""


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def oklab(rgb: list[float]) -> LINEAR:
    red, green, blue = rgb
    long, middle, short = (
        max(0.0, value) ** (1 / 3)
        for value in (
            0.41222 * red + 0.53633 * green + 0.05145 * blue,
            0.21190 * red + 0.68070 * green + 0.10740 * blue,
            0.08830 * red + 0.28172 * green + 0.62998 * blue,
        )
    )
    return (
        0.21045 * long + 0.79362 * middle - 0.00407 * short,
        1.97800 * long - 2.42859 * middle + 0.45059 * short,
        0.02590 * long + 0.78277 * middle - 0.80868 * short,
    )


def palettes() -> list[dict[str, str]]:
    """Return the colours of the page by day and in the dark, as its style has them."""
    blocks = re.findall(r":root \{([^}]*)\}", TEMPLATE.read_text())
    return [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks]


@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_of_runs_are_told_apart_by_everybody(dark: bool) -> None:
    """At least 0.09 apart in OKLab with each kind of colour blindness, and 3:1 to their card."""
    colours = palettes()[dark]
    runs = [colours[f"c{number}"] for number in range(6)]
    for sight, rows in SIGHT.items():
        seen = {
            run: oklab([sum(a * b for a, b in zip(row, linear(run), strict=True)) for row in rows])
            for run in runs
        }
        for one, other in itertools.combinations(runs, 2):
            assert math.dist(seen[one], seen[other]) > 0.09, (sight, one, other)

    def luminance(colour: str) -> float:
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for name in [*(f"c{number}" for number in range(6)), "bad", "warn", "good", "accent"]:
        low, high = sorted((luminance(colours[name]), luminance(colours["card"])))
        least = 3.0 if name.startswith("c") else 4.5  # the others are words
        assert (high + 0.05) / (low + 0.05) >= least, name
