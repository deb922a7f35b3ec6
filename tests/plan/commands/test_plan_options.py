"""Options of a plan that exclude each other, devices of a dry run's cluster,
and what a plan says of the states.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_plan.commands import calibration
from tests.plan.commands.test_plan import CONFIG, NO_CORPUS
from tests.support.marks import long_row

PLAN = ["--cluster", "h100", "--nodes", "1", "--devices-per-node", "2", "--global-batch", "8"]


class _Started(Exception):
    pass


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(runs=tmp_path, data=NO_CORPUS))
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep-nodes", "1,2", "--why", "tp=2"], "--why: a sweep"),
        (["--sweep-batch", "8", "--why", "tp=2", "--best", "3"], "--why and --best: a sweep"),
        (["--sweep-batch", "8", "--out", "folder"], "--out: a sweep"),
        (["--sweep-nodes", "1000000000"], "such as --sweep-nodes 524288"),
        (["--pipeline.balance=[1,3]"], "pipeline.balance = [1, 3] is of one number of stages"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *PLAN, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        long_row([], "AdamW"),
        long_row(["--optimizer.name=sgd"], "SGD"),
        (["--optimizer.name=adamw8bit"], "AdamW in 8 bits"),
        long_row(["--optimizer.state_dtype=bfloat16"], "AdamW"),
    ],
)
def test_the_states_of_a_plan_are_those_of_its_memory_table(
    overrides: list[str], name: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--cluster",
        "h100",
        "--nodes",
        "1",
        "--devices-per-node",
        "1",
        "--global-batch",
        "8",
        *overrides,
    ]
    words += ["--model.options.hidden_size=512", "--model.options.vocab_size=8192"]
    assert main(["plan", config, *words]) == 0
    out = capsys.readouterr().out
    found = re.search(rf"weights, gradients and {name} of [\d,]+ parameters are ([\d.]+) MiB", out)
    row = re.search(r"^ *0 +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) (MiB|KiB)", out, re.MULTILINE)
    assert found and row, out
    weights, gradients, states = (float(row[at]) for at in (1, 2, 3))
    states /= 1 if row[4] == "MiB" else 1024
    # 8 bits: code tables
    assert float(found[1]) == pytest.approx(weights + gradients + states, abs=0.8)


def test_a_dry_run_has_as_many_devices_on_a_node_as_its_cluster(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "dryrun",
        config,
        "--parallel.dp=8",
        "--batch.global_batch=8",
        "--batch.micro_batch_size=1",
    ]
    words += ["--train.device=cuda"]
    nodes = []
    for more in (
        ["--cluster", "gb200"],
        ["--cluster", "h100"],
        ["--cluster", "gb200", "--devices-per-node", "2"],
        [],
    ):
        assert main([*words, *more]) == 0
        nodes.append(re.findall(r"8 ranks on (\d+) node", capsys.readouterr().out))
    assert nodes == [["2"], ["1"], ["4"], ["1"]]


def test_no_more_processes_are_started_than_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Pool(RankPool):
        def __init__(self, size: int) -> None:
            started.append(size)
            raise _Started

    monkeypatch.setattr(calibration, "RankPool", Pool)
    with pytest.raises(_Started):
        main(["calibrate", "--out", str(tmp_path / "box.toml"), "--ranks", "5000"])
    assert started == [max(2, calibration.cores())]
