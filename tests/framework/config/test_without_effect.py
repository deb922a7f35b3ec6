"""Keys that nothing would read are refused, with the keys that would make them act."""

from __future__ import annotations

import pytest

from meshwright.config import load
from meshwright.errors import ConfigError
from meshwright_launch.cli import main

DEMO = "configs/demo.toml"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--adapter.alpha=3"], "MW-CONFIG-066"),
        (["--adapter.dropout=0.1"], "MW-CONFIG-066"),
        (["--adapter.init=gaussian"], "MW-CONFIG-066"),
        (["--adapter.dora=true"], "MW-CONFIG-066"),
        (["--adapter.targets=['block*']"], "MW-CONFIG-066"),
        (["--adapter.rank=3"], "MW-CONFIG-066"),
        (["--optimizer.name=sgd", "--optimizer.betas=[0.8,0.9]"], "MW-CONFIG-068"),
        (["--optimizer.name=adafactor", "--optimizer.betas=[0.8,0.9]"], "MW-CONFIG-068"),
        (["--optimizer.name=sgd", "--optimizer.eps=1e-6"], "MW-CONFIG-068"),
        (["--optimizer.block_size=64"], "MW-CONFIG-068"),
        (["--optimizer.nesterov=false"], "MW-CONFIG-068"),
        (["--optimizer.momentum=0.5"], "MW-CONFIG-068"),
        (["--optimizer.name=lion", "--optimizer.momentum=0.5"], "MW-CONFIG-068"),
        (["--optimizer.name=muon", "--optimizer.momentum=0.5"], "MW-CONFIG-073"),
        (["--pipeline.recompute=full", "--pipeline.recompute_layers=[]"], "pipeline.recompute_layers"),
        (["--parallel.zero=3", "--parallel.shard_factor=1", "--parallel.reduce=microbatch"], "MW-CONFIG-042"),
    ],
)
def test_refused(words: list[str], code: str) -> None:
    with pytest.raises(ConfigError, match=code):
        load(DEMO, words)


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer.name=lion", "--optimizer.betas=[0.8,0.9]", "--optimizer.eps=1e-6"],
        ["--optimizer.name=muon", "--optimizer.betas=[0.8,0.9]", "--optimizer.eps=1e-6"],
        ["--optimizer.name=adamw8bit", "--optimizer.block_size=64"],
        ["--optimizer.name=adafactor", "--optimizer.eps=1e-6"],
        ["--optimizer.name=sgd", "--optimizer.momentum=0.5"],
        ["--parallel.zero=3", "--parallel.shard_factor=2", "--parallel.reduce=microbatch"],
        ["--adapter.rank=3", "--adapter.targets=['block*']", "--adapter.alpha=3", "--adapter.dropout=0.1"],
    ],
)
def test_read(words: list[str]) -> None:
    assert load(DEMO, words)


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_mup_has_no_rule_for_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.options.mup_base_size=32", f"--optimizer.name={name}"]
    assert main(["dryrun", DEMO, *words]) == 2
    assert "MW-MODEL-036" in capsys.readouterr().err


def test_a_load_beyond_the_experts_group(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dryrun", "configs/moe-demo.toml", "--cluster", "h100", "--skew", "9"]
    assert main(words) == 2
    assert "MW-LAUNCH-090" in capsys.readouterr().err
