"""``meshwright dryrun`` from its words to its exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright_launch.cli import main
from meshwright_plan.planner.calibrate import to_toml
from tests.plan.planner.small import hardware
from tests.support.marks import long_row

TAKES_ALL = 24
"""Samples that many replicas share evenly."""

CONFIG = """
[model.options]
vocab_size = 64
hidden_size = 16
num_layers = 2
num_heads = 2
[data]
train = "nowhere"
sequence_length = 8
[batch]
micro_batch_size = 1
chunks = 2
[parallel]
pp = 2
dp = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return str(path)


def test_it_needs_no_data_and_draws(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", config, "--out", str(tmp_path / "job.svg")]) == 0
    said = capsys.readouterr().out
    assert "4 ranks on 1 node" in said
    assert (tmp_path / "job.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(("memory", "code"), [(64, 1), long_row(10**9, 0)])
def test_a_job_that_will_run_out_of_memory_is_exit_code_1(
    config: str, memory: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu.toml").write_text(to_toml(hardware(memory, flops_per_s={"float32": 1e12})))
    assert main(["dryrun", config, "--cluster", str(tmp_path / "gpu.toml")]) == code
    shown = capsys.readouterr().out
    assert ("will run out of memory" in shown) is bool(code)
    assert "all ranks    agree" in shown


def test_a_seeded_fault_is_exit_code_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", config, "--seed-fault", "schedule:2=gpipe"]) == 1
    assert "rank 2 runs gpipe and the others 1f1b" in capsys.readouterr().out


def test_one_rank_with_another_schedule_that_would_run_through_is_found(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", config, "--parallel.pp=1", "--seed-fault", "schedule:1=gpipe"]) == 1
    shown = capsys.readouterr().out
    assert "DO NOT AGREE: 1 found" in shown and "ranks compare their schedules at start" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed-fault", "sleep:1"], "MW-LAUNCH-021"),
        (["--seed-fault", "schedule:1"], "MW-LAUNCH-021"),
        (["--seed-fault", "schedule:-1=gpipe"], "MW-LAUNCH-021"),
        (["--seed-fault", "schedule:9=gpipe"], "the ranks are 0 to 3"),
        (["--seed-fault", "schedule:1=zigzag"], "choose from gpipe"),
        (["--seed-fault", "schedule:1=1f1b"], "'1f1b' is what all ranks run: choose from gpipe"),
        long_row(
            ["--parallel.pp=4", "--seed-fault", "schedule:1=zb_v"],
            "schedule:1=zb_v: 5 layers over 8 stages",
        ),
        (
            ["--parallel.pp=1", "--parallel.dp=1", "--seed-fault", "schedule:1=gpipe"],
            "the only rank is 0",
        ),
        (["--out", "job.txt"], "a picture ends in one of .svg, .png, .pdf: job.svg"),
        (["--out", "{0}"], "there is a folder of that name; name a file, such as {0}/job.svg"),
        (["--out", "{0}/small.toml/x.svg"], "small.toml is a file, and nothing can lie below it"),
        (["--nodes", "0"], "0 is not a whole number from 1 to 1,048,576"),
        (["--nodes", "three"], "three is not a whole number from 1 to 1,048,576"),
        (
            ["--nodes", "3"],
            "3 nodes x 8 devices = 24 ranks, and the degrees make pp 2 x tp 1 x dp 2 = 4",
        ),
        (
            [
                "--nodes",
                "3",
                "--devices-per-node",
                "2",
                "--parallel.tp=5",
                "--parallel.pp=1",
                "--parallel.dp=1",
            ],
            "pp 1 x tp 5 x dp 1 = 5: leave --nodes and --devices-per-node out",
        ),
        (["--parallel.tp=2", "--devices-per-node", "3"], "straddles the nodes node0, node1"),
        (["--cluster", "h10"], "did you mean h100?"),
        (
            ["--train.dtype=bfloat16", "--cluster", "{0}/cores.toml"],
            "[flops_per_s] has no bfloat16",
        ),
    ],
)
def test_what_is_not_understood_is_said(
    config: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cores.toml").write_text(to_toml(hardware(flops_per_s={"float32": 1e12})))
    assert main(["dryrun", config, *(word.format(tmp_path) for word in words)]) == 2
    shown = capsys.readouterr()
    assert said.format(tmp_path) in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "words",
    [
        "--nodes 3",
        long_row("--nodes 1 --parallel.dp=1"),
        long_row("--nodes 3 --devices-per-node 1 --parallel.dp=auto"),
        long_row("--nodes 2 --devices-per-node 3 --parallel.dp=auto --parallel.pp=4"),
    ],
)
def test_degrees_that_do_not_fill_the_nodes_are_told_what_would(
    config: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["dryrun", config, *words.split()]
    assert main(asked) == 2
    told = capsys.readouterr().err
    named = re.findall(r"(--[\w.-]+)[ =](\d+)", told.split(": pass ")[1])
    assert named
    for option, value in named:
        again = [
            *asked,
            f"--batch.global_batch={TAKES_ALL}",
            "--batch.chunks=none",
            f"{option}={value}",
        ]
        assert main(again) == 0, capsys.readouterr().err
