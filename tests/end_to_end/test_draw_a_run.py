"""A run leaves a trace of one step; ``meshwright draw`` lays it over its simulation and says
where the time went.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_plan.report.account import account
from meshwright_plan.report.trace_file import read
from tests.end_to_end.driving import changed, layout, lines, run_config, train


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    """Three steps of two pipeline ranks, two replicas: the third is traced,
    since there is no fifth.
    """
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("runs"),
        parallel=layout("dp2,pp2"),
        train={"steps": 3},
        data={"validation": None},
    )
    train(pool, config)
    return config


def test_a_trace_holds_a_step_of_one_replica_on_one_clock(trained: RunConfig) -> None:
    (path,) = (run_directory(trained.run) / "traces").iterdir()
    assert path.name == "step-00000003.json"
    found = read(path)
    assert (found.trace.step, found.trace.run, found.trace.clock_error_s) == (3, "run", 0)
    assert min(span.start for span in found.timeline.spans) >= 0
    accounts = account(found.timeline, found.readings)
    for each in accounts:
        assert each.total == pytest.approx(accounts[0].total)
        assert min(each) >= -1e-9 and each.compute > 0 and each.data > 0 and each.optimizer > 0
    assert sum(each.waiting for each in accounts) > 0
    first = [span for span in found.timeline.spans if span.rank == 0]
    assert first[-1].end - first[0].start <= lines(trained)[-1]["perf/step_s"]
    by_action = {str(span.action): span for span in found.timeline.spans}
    assert by_action["0SEND_F0"].start < by_action["1F0"].start
    assert by_action["1SEND_B3"].start < by_action["0B3"].start


def test_measured_is_laid_over_simulated(
    trained: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["draw", str(run_directory(trained.run))]) == 0
    said = capfd.readouterr().out
    traces = run_directory(trained.run) / "traces"
    stem = traces / "step-00000003"
    for suffix in (".txt", ".svg", ".png", ".trace.json"):
        assert f"{stem}{suffix}\n" in said and Path(f"{stem}{suffix}").stat().st_size > 500
    assert (
        "measured, step 3: 1f1b pp=2 chunks=4: bubble" in said
        and "\nsimulated: 1f1b pp=2 chunks=4: bubble" in said
    )
    assert "where the time of the step went" in said and " points" in said
    groups = [group.get("id", "") for group in ElementTree.parse(f"{stem}.svg").getroot().iter()]
    for panel in ("panel0", "panel1"):
        assert {
            f"{panel}-rank{rank}-{rank}{kind}{m}"
            for rank in (0, 1)
            for kind in "FB"
            for m in range(4)
        } <= set(groups)
    events = json.loads(Path(f"{stem}.trace.json").read_text())["traceEvents"]
    assert {
        event["args"]["name"].partition(",")[0]
        for event in events
        if event["name"] == "process_name"
    } == {
        "measured",
        "simulated: 1f1b pp=2 chunks=4",
    }


def test_a_run_has_no_costs_and_no_keys(
    trained: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = str(run_directory(trained.run))
    for words in (["--costs", "f=2"], ["--parallel.pp=2"]):
        assert main(["draw", directory, *words]) == 2
        assert "has no effect" in capfd.readouterr().err
    assert main(["draw", str(run_directory(trained.run).parent)]) == 2
    assert "has no trace" in capfd.readouterr().err


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(
    trained: RunConfig, pool: RankPool
) -> None:
    """It goes on from its checkpoint, on one rank; where traces should lie is a file."""
    traces = run_directory(trained.run) / "traces"
    traces.rename(traces.with_name("elsewhere"))
    traces.write_text("in the way")
    longer = changed(trained, train={"steps": 5}, parallel=layout(""), batch={"chunks": None})
    try:
        train(pool, longer)
        assert traces.read_text() == "in the way"
    finally:
        traces.unlink()
        traces.with_name("elsewhere").rename(traces)
    assert [line["step"] for line in lines(longer)] == [1, 2, 3, 4, 5]


def test_a_resumed_run_is_traced_again_and_zero_traces_nothing(
    corpus: Path, tmp_path: Path, pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run_config(
        corpus, tmp_path, parallel=layout("pp2"), train={"steps": 1}, tracking={"trace_step": 0}
    )
    train(pool, config)
    assert not (run_directory(config.run) / "traces").exists()
    train(pool, changed(config, train={"steps": 3}, tracking={"trace_step": 1}))
    assert [path.name for path in (run_directory(config.run) / "traces").iterdir()] == [
        "step-00000002.json"
    ]
