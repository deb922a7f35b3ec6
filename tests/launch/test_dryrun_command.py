"""``meshwright dryrun`` from its words to its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main

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


def test_it_needs_no_data_and_draws(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", config, "--out", str(tmp_path / "job.svg")]) == 0
    said = capsys.readouterr().out
    assert "4 ranks on 1 node" in said
    assert (tmp_path / "job.svg").read_text().startswith("<?xml")


def test_a_seeded_fault_is_exit_code_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", config, "--seed-fault", "missing:dp:1"]) == 1
    assert "without rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed-fault", "sleep:1"], "write schedule:RANK=NAME or missing:AXIS:RANK"),
        (["--seed-fault", "schedule:9=gpipe"], "the ranks are 0 to 3"),
        (["--seed-fault", "schedule:1=zigzag"], "choose of gpipe"),
        (["--seed-fault", "missing:tp:1"], "choose of pp, dp"),
        (["--out", "job.txt"], "a picture ends in one of .svg"),
        (
            ["--nodes", "3"],
            "3 nodes x 8 devices = 24 ranks, and the degrees make pp 2 x tp 1 x dp 2 = 4: take --parallel.dp=12",
        ),
    ],
)
def test_what_is_not_understood_is_said(
    config: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", config, *words]) == 2
    assert said in capsys.readouterr().err
