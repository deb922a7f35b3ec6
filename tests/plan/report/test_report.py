"""A page out of a run directory: of a run that goes on, was torn, has restarted,
or has taken no step at all.
"""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.mesh.grid import Grid
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import to_json
from meshwright.watch.hang.status import Status
from meshwright_launch.cli import main
from meshwright_plan.report.curves import (
    LOSS,
    loss_curves,
    marks_of,
    points,
)
from meshwright_plan.report.figures import key_figures, layout_of
from meshwright_plan.report.notices import notices
from meshwright_plan.report.page import MAX_ROWS, differences, memory_of, page
from meshwright_plan.report.run import ReportedState, clock, read_run
from tests.plan.report.builders import (
    make_checkpoint,
    make_mixture_run,
    make_peaks,
    make_run,
    record,
)
from tests.support.errors import has_code
from tests.support.marks import long_row

ROOT = Path(__file__).parents[3]


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "demo", saved=(50, 100)))
    assert [each.step for each in run.records] == list(range(1, 101)) and run.remarks == ()
    assert [(each.step, each.layout, each.size, each.parameters) for each in run.checkpoints] == [
        (50, "pp2 dp2 tp2", 3 * 2**20, 2007),
        (100, "pp2 dp2 tp2", 3 * 2**20, 2007),
    ]
    assert (
        run.trace is not None and run.trace.trace.step == 5 and "pp0 dp0  tp  0 1" in run.placement
    )
    text = page([run])
    for said in (
        "measured, step 5: 1f1b",
        "simulated: 1f1b",
        "Time of a step by rank",
        "pp2 dp2 tp2, 1f1b, ZeRO-1",
        "2,007 param",
    ):
        assert said in text, said


def test_the_time_of_a_checkpoint_is_that_of_its_manifest(tmp_path: Path) -> None:
    """A copy with new file times keeps it; a checkpoint of an earlier version has its file's;
    nonsense is damage.
    """
    directory = make_run(tmp_path / "demo", saved=(10,))
    resolved = read_run(directory).resolved
    assert resolved is not None
    for step, saved_at_s in ((20, 1_700_000_000), (30, 2**62), (40, "soon")):
        make_checkpoint(directory, step, resolved, saved_at_s)
    for manifest in directory.glob("checkpoints/*/manifest.json"):
        os.utime(manifest, (1_600_000_000, 1_600_000_000))
    run = read_run(directory)
    assert [(each.step, each.at_s) for each in run.checkpoints] == [
        (10, 1_600_000_000.0),
        (20, 1_700_000_000.0),
    ]
    assert len(run.remarks) == 2 and all("is damaged" in remark for remark in run.remarks)
    assert clock(1_700_000_000) in page([run])


def test_the_memory_of_each_rank_is_on_the_page(tmp_path: Path) -> None:
    """By pipeline rank, which have layers of their own; not there, or damaged, all else is."""
    directory = make_run(tmp_path / "demo", starts=((0, Grid(pp=4, dp=2)),))
    found = memory_of(read_run(directory))
    assert found is not None
    assert [(name, words) for name, _, words in found.stages] == [
        ("pp0", "1.00 GiB"), ("pp1", "1.10 GiB"), ("pp2", "1.20 GiB"), ("pp3", "1.30 GiB"),
    ]  # fmt: skip
    assert [share for _, share, _ in found.stages] == pytest.approx(
        [10 / 13, 11 / 13, 12 / 13, 1], abs=1e-6
    )
    assert found.ranks[5] == ("5", "2", "1", "0", "1.20 GiB")
    text = page([read_run(directory)])
    assert (
        "Peak memory by rank" in text and "up to step 100" in text and "rank 7, the highest" in text
    )
    (directory / "memory.json").write_text('{"grid": [2, 2')
    damaged = read_run(directory)
    assert "memory.json is damaged" in damaged.remarks[0] and "Peak memory by rank" not in page(
        [damaged]
    )
    (directory / "memory.json").unlink()
    alone = read_run(directory)
    assert alone.peaks is None and facts_of(directory)["peak memory"] == "1.00 GiB"


def test_a_page_asks_nobody(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / name, seed=seed)) for seed, name in enumerate(["demo", "deep"])
    ]
    text = page(runs)
    assert not re.findall(r'(?:src|href|action)\s*=\s*"(?!#)', text)
    assert not re.findall(r"<link|<iframe|@import|url\((?!#)|fetch\(|XMLHttp|import\(", text)


def test_a_torn_last_line_is_told_and_left_out(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 20)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/lo')
    run = read_run(directory)
    assert len(run.records) == 20
    (said,) = run.remarks
    assert (
        "metrics.jsonl:21: incomplete record, the last: still being written" in said
        and said in page([run])
    )


def test_a_damaged_line_in_the_middle_hides_no_other(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 20)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines[9] = lines[9][:30]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(directory)
    assert [each.step for each in run.records] == [step for step in range(1, 21) if step != 10]
    assert run.remarks == ("metrics.jsonl:10: incomplete record; left out",)


@pytest.mark.parametrize("times", [long_row(5), pytest.param(40, marks=pytest.mark.torture)])
def test_whatever_a_file_says_there_is_a_page(times: int, tmp_path: Path, seed: int) -> None:
    """Values that cannot be, one at a time, in every file of the page: told or shown,
    and never the end.
    """
    directory = make_run(
        tmp_path / "demo",
        12,
        saved=(12,),
        starts=((0, Grid(pp=2, dp=2, tp=2)), (6, Grid(pp=4, dp=2))),
    )
    draw = random.Random(seed)
    odd = [
        None,
        True,
        -1,
        0,
        1e300,
        10**30,
        10**400,
        math.inf,
        "x",
        "NaN",
        "",
        [],
        {},
        ["y"],
        {"z": 1},
    ]
    for name in (
        "metrics.jsonl",
        "starts.jsonl",
        "memory.json",
        "resolved.json",
        "checkpoints/step-00000012/manifest.json",
    ):
        file = directory / name
        whole = file.read_text()
        lines = whole.splitlines() if name.endswith("l") else [whole]
        for _ in range(times):
            number = draw.randrange(len(lines))
            tree = json.loads(lines[number])
            place, key = draw.choice([*places(tree)])
            place[key] = draw.choice(odd)
            file.write_text(
                "\n".join([*lines[:number], json.dumps(tree), *lines[number + 1 :]]) + "\n"
            )
            assert "</html>" in page([read_run(directory)]), f"{name}: {key} = {place[key]!r}"
        file.write_text(whole)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in a tree, as what holds it and under what."""
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield tree, key
        yield from places(value)


def test_a_run_without_a_step_is_a_page(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "demo", 0, traced=False))
    text = page([run])
    for said in (
        "No step was taken yet",
        "0 of 100",
        "simulated, in ticks",
        "No checkpoint yet",
    ):
        assert said in text, said
    alone = read_run(
        make_run(tmp_path / "one", 0, traced=False, parallel={"dp": 1, "pp": 1, "tp": 1}, starts=())
    )
    text = page([alone])
    assert "Pipeline schedule" not in text and "The run was never started" in text
    assert "None of the runs has taken a step yet" in page([run, alone])


def test_steps_that_a_restart_takes_again_are_told_apart(tmp_path: Path) -> None:
    """As it happens: ten steps, killed, on from the checkpoint of step 6 on another layout,
    with other losses.
    """
    directory = make_run(
        tmp_path / "demo", 10, starts=((0, Grid(pp=2, dp=2, tp=2)), (6, Grid(pp=4, dp=2)))
    )
    (directory / "metrics.jsonl").write_text(
        "".join(f"{to_json(record(step))}\n" for step in range(1, 11))
    )
    sink = JsonlSink(directory / "metrics.jsonl", resumed_step=6)
    for step in range(7, 9):
        sink.write(record(step, loss=1.0, restarts=1, step_s=1.0))
    sink.close()
    run = read_run(directory)
    assert [(each.step, each.restarts) for each in run.records][5:] == [(6, 0), (7, 1), (8, 1)]
    first, second = run.attempts
    assert [each.step for each in first.repeated] == [7, 8, 9, 10] and [
        each.step for each in first.kept
    ][-1] == 6
    assert (
        [each.step for each in second.kept] == [7, 8]
        and second.from_step == 6
        and second.repeated == ()
    )
    curves = {curve.name: curve for curve in loss_curves(run)}
    assert [x for x, _ in curves["repeated after a restart"].points] == [7, 8, 9, 10]
    assert [y for _, y in curves["training"].points][-2:] == [1.0, 1.0]
    assert [mark.x for mark in marks_of(run)] == [6]
    text = page([run])
    assert "pp4 dp2 tp1 (changed)" in text and "7 – 10" in text
    lost = sum(each.step_s for each in first.repeated)
    share = lost / (lost + sum(each.step_s for each in run.records))
    (notice,) = notices(run)
    assert (notice.level, notice.title) == ("warning", "1 restart")
    assert "4 steps repeated after a restart" in notice.text
    assert f": {share:.1%} of the step time." in notice.text
    assert notice.text.endswith("Layouts: pp2 dp2 tp2, then pp4 dp2 tp1.")


def test_steps_that_overlap_in_the_file_count_once(tmp_path: Path) -> None:
    """As a file system that was full while the run came back leaves it:
    the later line of a step is the one.
    """
    directory = make_run(tmp_path / "demo", 10)
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(f"{to_json(record(step, loss=1.0, restarts=1))}\n" for step in (9, 10, 11))
    run = read_run(directory)
    assert [each.step for each in run.records] == list(range(1, 12))
    assert [y for _, y in points(run.records, LOSS)][-3:] == [1.0, 1.0, 1.0]
    assert [each.step for each in run.attempts[0].repeated] == [9, 10]


def test_what_is_not_finite_is_a_gap_and_a_mark(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, object]:
        return {"loss": math.inf, "grad_norm": math.nan, "skipped": True} if step in (7, 8) else {}

    run = read_run(make_run(tmp_path / "demo", 20, change=change))
    assert [x for x, y in points(run.records, LOSS) if math.isnan(y)] == [7, 8]
    assert [(mark.x, mark.kind) for mark in marks_of(run)] == [(7, "bad"), (8, "bad")]
    (notice,) = notices(run)
    assert (notice.level, notice.title) == ("warning", "2 steps skipped for NaN/Inf")
    assert notice.text == "The weights are unchanged by steps 7-8."


def status(step: int, **changes: object) -> Status:
    found: dict[str, object] = {
        "run": "demo", "at_s": time.time(), "tick_s": 5.0, "grid": (2, 2, 2), "step": step, "steps": 100,
        "phase": "training", "pid": 1, "host": "node0", "ranks": (),
    }  # fmt: skip
    return Status.model_validate(found | changes)


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 20)
    place = directory / "status.json"
    place.write_text(status(20).model_dump_json())
    live = read_run(directory)
    assert live.is_live and live.state.text.endswith(", training")
    assert '<span class="state running">' in page([live])
    place.write_text(status(20, at_s=time.time() - 3600).model_dump_json())
    silent = read_run(directory)
    assert not silent.is_live and ", silent for " in silent.state.text
    place.write_text(
        status(20, ended={"how": "failed", "message": "rank 3: <out of memory>"}).model_dump_json()
    )
    text = page([read_run(directory)])
    assert "rank 3: &lt;out of memory&gt;" in text and 'class="state failed"' in text
    assert 'class="state running"' not in text


def test_what_cannot_be_read_is_a_remark(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 20, saved=(10, 20))
    tree = json.loads((directory / "resolved.json").read_text())
    (directory / "resolved.json").write_text(json.dumps(tree | {"of_another_version": {"key": 1}}))
    (directory / "checkpoints/step-00000010/manifest.json").write_text("{")
    (directory / "checkpoints/step-00000020/pp0-tp0-00000.safetensors").unlink()
    (directory / "traces/step-00000005.json").write_text('{"format": "x"}')
    (directory / "status.json").write_text("{}")
    with (directory / "starts.jsonl").open("a") as file:
        file.write('{"at": ')
    (directory / "hang").mkdir()
    (directory / "hang/report.txt").write_text("rank 1 waits for rank 0")
    run = read_run(directory)
    said = " ".join(run.remarks)
    for each in ("not understood by this version", "manifest.json is damaged", "lacks pp0-tp0", "no trace of a step",
                 "no status of a run", "starts.jsonl:2 is damaged"):  # fmt: skip
        assert each in said, each
    text = page([run])
    assert "of_another_version" in text and "rank 1 waits for rank 0" in text


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 2**63},
        {"samples_seen": 10**400},
        {"files": {"a": {"size": 10**400}}},
        {"tensors": {"weights/a": {"shape": [2**40] * 1000}}},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_checkpoint_of_huge_counts_is_damaged(damage: dict[str, Any], tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 5, traced=False, saved=(5,))
    manifest = directory / "checkpoints/step-00000005/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | damage))
    run = read_run(directory)
    assert run.checkpoints == () and "manifest.json is damaged (ValueError)" in run.remarks[0]
    assert "No checkpoint yet" in page([run])


@pytest.mark.parametrize("steps", [10**400, 2**63, 0, -3, True], ids=["huge", "2^63", 0, -3, True])
def test_a_refused_number_of_steps_is_none(steps: int, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 5, traced=False)
    tree = json.loads((directory / "resolved.json").read_text())
    tree["train"]["steps"] = steps
    (directory / "resolved.json").write_text(json.dumps(tree | {"of_another_version": {}}))
    run = read_run(directory)
    assert run.steps is None
    live = replace(run, state=ReportedState("running", "since today"))
    assert "of_another_version" in page([live])


def test_a_run_without_a_finite_loss_has_taken_steps(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path / "nan", 5, change=lambda step: {"loss": math.nan}))])
    assert "No finite loss: there is no curve" in text and "No step was taken" not in text
    text = page([read_run(make_run(tmp_path / "sound", 5))])
    assert "No finite loss" not in text and "No step was taken" not in text


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e308])
def test_seconds_that_are_no_number_leave_the_axes_valid(seconds: float, tmp_path: Path) -> None:
    """``Infinity`` is no JSON: the script of the page would draw no chart."""
    times = {1: 0.5, 2: seconds}
    run = read_run(make_run(tmp_path / "demo", 2, change=lambda step: {"step_s": times[step]}))
    (found,) = re.findall(r'data-axes="([^"]*)"', page([run]))

    def refuse(word: str) -> None:
        raise ValueError(word)

    (axes,) = json.loads(html.unescape(found), parse_constant=refuse)
    assert axes["step"] == [1, 1, 2]


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a" / "demo", 60)
    other = make_run(
        tmp_path / "b" / "demo",
        40,
        seed=1,
        optimizer={"learning_rate": 1e-3},
        parallel={"pp": 4, "dp": 1},
    )
    runs = [read_run(each) for each in (one, other)]
    rows = {row[0]: row[1:] for row in differences(runs)}
    assert rows["optimizer.learning_rate"] == ([("0.0003", False), ("0.001", True)],)
    assert rows["parallel.pp"] == ([("2", False), ("4", True)],)
    assert "run.directory" not in rows and "train.steps" not in rows
    text = page(runs)
    for said in (
        str(one),
        str(other),
        "Validation loss",
        "60 of 100",
        "40 of 100",
    ):
        assert said in text, said
    assert text.count('<details class="run">') == 2


def test_a_mixture_of_experts_is_described_in_words(tmp_path: Path) -> None:
    """Its metrics have titles and scales, in comparisons too; its layout has ep."""
    mixture, dense = (
        read_run(make_mixture_run(tmp_path / "mixture", 20)),
        read_run(make_run(tmp_path / "dense", 20)),
    )
    assert "ep4" in layout_of(mixture) and "ep" not in layout_of(dense)
    titles = (
        "Load of the busiest expert",
        "Entropy of the load",
        "Idle experts",
        "Entropy of a token",
        "Dropped choices",
    )
    alone = page([mixture])
    assert all(title in alone for title in titles) and ">experts/" not in alone
    assert "Load of the busiest expert" in page([mixture, dense])
    assert "Load of the busiest" not in page([dense]) and "Load of the busiest" not in page(
        [dense, read_run(make_run(tmp_path / "b", 20))]
    )


def test_many_starts_and_checkpoints_are_shortened(tmp_path: Path) -> None:
    starts = tuple((step, Grid(pp=2, dp=2, tp=2)) for step in range(0, 100))
    text = page([read_run(make_run(tmp_path / "demo", 100, starts=starts, traced=False))])
    assert text.count("pp2 dp2 tp2</td>") == MAX_ROWS and ">…</th>" in text


def test_ten_thousand_steps_are_a_small_file(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 10_000, train={"steps": 10_000}, saved=(10_000,))
    assert len(page([read_run(directory)]).encode()) < 200_000
    assert (
        len(page([read_run(make_mixture_run(tmp_path / "mixture", 300, 256))]).encode()) < 200_000
    )


def test_a_schedule_of_many_boxes_is_text(tmp_path: Path) -> None:
    large = {
        "parallel": {"dp": 1, "pp": 16, "tp": 1},
        "batch": {"micro_batch_size": 1, "global_batch": 128},
    }
    text = page([read_run(make_run(tmp_path / "demo", 20, **large))])  # type: ignore[arg-type]
    assert "rank 15 |" in text and len(text.encode()) < 250_000


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_run(tmp_path / "runs/one", 20), make_run(tmp_path / "runs/other", 20)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs/one"]) == 0
    assert (
        capsys.readouterr().out == "runs/one/report.html\n"
        and (one / "report.html").stat().st_size > 10_000
    )
    assert main(["report", "runs/one", str(other), "--out", "deep/both.html"]) == 0
    assert "<title>meshwright: one, other</title>" in Path("deep/both.html").read_text()
    capsys.readouterr()
    for words, said in [
        (["runs/none"], "runs/none does not exist: there are"),
        (["runs"], "runs is not a run, but contains"),
        (["runs/one", str(one)], "a run is named twice"),
        (
            ["runs/one", "--out", "runs"],
            "--out runs: there is a folder of that name; name a file, such as runs/report.html",
        ),
        (
            ["runs/one", "--out", "runs/one/metrics.jsonl/x.html"],
            "is a file, and nothing can lie below it",
        ),
    ]:
        assert main(["report", *words]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and shown.out == "" and "Traceback" not in shown.err


def test_without_matplotlib_schedules_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright_plan.picture.library.find_spec", lambda name: None)
    directory = make_run(tmp_path / "demo", 5)
    assert main(["report", str(directory)]) == 0
    text = (directory / "report.html").read_text()
    assert "matplotlib is not installed" in text and "rank 0 |" in text


def test_it_needs_no_torch(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "demo", 5)
    script = f"""
import sys
from meshwright_launch.cli import main
code = main(["report", {str(directory)!r}])
assert not {{"torch", "transformers", "wandb"}} & sys.modules.keys()
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="is not a run directory, or its run was never started",
        check=has_code("MW-RUN-008"),
    ):
        read_run(tmp_path)


def facts_of(directory: Path) -> dict[str, str]:
    return {fact.name: fact.text for fact in key_figures(read_run(directory))}


def test_what_an_old_layout_needed_is_not_shown_as_the_present_one(tmp_path: Path) -> None:
    """Memory, speed and peaks go with the layout that stands beside them;
    a traced step says its layout.
    """
    old, new = Grid(pp=2, dp=2, tp=2), Grid(pp=4, dp=2)
    directory = make_run(tmp_path / "unstarted", starts=((0, old), (100, new)))
    make_peaks(directory, 100, old)
    assert not {"peak memory", "throughput"} & facts_of(directory).keys(), (
        "no step on the present layout yet"
    )
    assert memory_of(read_run(directory)) is None and "Peak memory by rank" not in page(
        [read_run(directory)]
    )

    def heavy_and_slow(step: int) -> dict[str, Any]:
        return (
            {"memory_bytes": 9 * 2**30, "tokens_per_s": 7.0, "step_s": 123.0} if step <= 60 else {}
        )

    directory = make_run(tmp_path / "resumed", starts=((0, old), (60, new)), change=heavy_and_slow)
    shown = facts_of(directory)
    assert shown["peak memory"] == "1.30 GiB" and shown["throughput"] == "40,960 tokens/s"
    assert "It was traced on pp2 dp2 tp2." in page([read_run(directory)])
    same = make_run(tmp_path / "same", starts=((0, old), (60, old)), change=heavy_and_slow)
    assert facts_of(same)["peak memory"] == "9.00 GiB", (
        "another start of one layout is no other layout"
    )
    assert "It was traced on" not in page([read_run(same)])
    cp = Grid(pp=2, dp=2, cp=2)
    longer = make_run(tmp_path / "cp", starts=((0, old), (100, cp)))
    make_peaks(longer, 100, Grid(pp=2, dp=2, tp=2))
    assert memory_of(read_run(longer)) is None, "as many ranks, on other axes"


def test_the_placement_is_drawn(tmp_path: Path) -> None:
    """Each rank in the card of its node; as text for runs that did not record the nodes,
    or whose record is damaged.
    """
    directory = make_run(tmp_path / "demo", starts=((0, Grid(pp=2, dp=2, tp=2)),))
    starts = directory / "starts.jsonl"
    line = json.loads(starts.read_text())
    assert line["ranks_on"] == [["node0", 8]]
    starts.write_text(json.dumps(line | {"ranks_on": [["<b>", 4], ["node1", 4]]}) + "\n")
    text = page([read_run(directory)])
    assert (
        "┌" not in text
        and text.count('<table class="node">') == 2
        and "&lt;b&gt;: ranks 0-3" in text
    )
    assert re.findall(r"<span>(\d+)</span>", text.partition('class="nodes"')[2]) == [
        str(rank) for rank in range(8)
    ]
    for damaged in (
        None,
        3,
        [],
        [["a", 7]],
        [["a", 9]],
        [["a", 10**9]],
        [["a", -1], ["b", 9]],
        [[1, 8]],
        [["a", True]],
    ):
        starts.write_text(json.dumps(line | {"ranks_on": damaged}) + "\n")
        assert '<pre tabindex="0">pp 2 x dp 2 x tp 2 = 8 ranks' in page([read_run(directory)]), (
            damaged
        )


def test_recoveries_in_place_are_a_table_and_marks(tmp_path: Path) -> None:
    """Of the present format and of one before; a damaged line is a remark."""
    grid = Grid(pp=2, dp=2, tp=2)
    directory = make_run(tmp_path / "run", 40, starts=[(0, grid), (10, grid), (25, grid)])
    now = {
        "at": "2026-12-01 12:00:00+00:00",
        "generation": 1,
        "what": "rank 3 was ended by <b>SIGKILL</b>",
        "nodes": ["node7"],
        "replaced": 4,
        "step": 11,
        "detected_s": 3.25,
        "left_s": 1.0,
        "groups_s": 1.5,
        "built_s": 2.0,
        "restored_s": 2.25,
        "stepped_s": 2.75,
    }
    before = {key: now[key] for key in ("at", "generation", "what", "left_s", "stepped_s")}
    text = "\n".join([json.dumps(now), json.dumps(before), "[1", "{}"])
    (directory / "recoveries.jsonl").write_text(text + "\n")
    run = read_run(directory)
    assert [each.step for each in run.recoveries] == [11, None, None]
    assert [(mark.x, mark.name) for mark in marks_of(run)] == [(10, "recovery"), (25, "restart")]
    assert len(run.remarks) == 1 and "recoveries.jsonl:3 is damaged" in run.remarks[0]
    html = page([run])
    for cell in ("node7", "3.25", "2.75", "rank 3 was ended by &lt;b&gt;SIGKILL"):
        assert f">{cell}" in html, cell
    assert "3 recoveries in place" in html
    assert notices(read_run(make_run(tmp_path / "other", 5))) == []
