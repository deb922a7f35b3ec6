"""Routing of a run: recorded on one layout, replayed on another, recorded on after a resume;
drops in its metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig, load
from meshwright.errors import ConfigError
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankError, RankPool
from meshwright_launch.work import check
from tests.end_to_end.driving import LATER, changed, lines, train
from tests.end_to_end.test_shared_experts import LLAMA, of_layout
from tests.support.errors import has_code
from tests.support.marks import long_row

MOE = {"num_experts": 4, "top_k": 2, "capacity_factor": 0.8, "balance": "bias", "bias_rate": 0.05}


def of_routing(corpus: Path, runs: Path, text: str, name: str, **keys: Any) -> RunConfig:
    config = of_layout(corpus, runs, text)
    options = LLAMA | {"moe": MOE}
    return changed(
        config, run={"name": name}, model={"options": options}, train={"validate_every": 1, **keys}
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        long_row("dp2,ep2", "tp2"),
        LATER("dp2,pp2,ep2", "cp2,tp2,ep2,sequence"),
        LATER("tp2", "dp4,ep4"),
    ],
)
def test_a_routing_is_recorded_on_one_layout_and_replayed_on_another(
    before: str, after: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    first = of_routing(corpus, tmp_path, before, "first", routing="record")
    train(pool, first)
    recorded = run_directory(first.run) / "routing"
    names = [file.name for file in sorted(recorded.iterdir())]
    assert names == ["step-00000001.safetensors", "step-00000002.safetensors"], (
        "validation is not recorded"
    )
    keys = {"routing": "replay", "routing_directory": str(recorded)}
    second = of_routing(corpus, tmp_path, after, "second", **keys)
    train(pool, second)
    ours, theirs = lines(second), lines(first)
    for name in (
        "train/loss",
        "validation/loss",
        "experts/dropped_share",
        "experts/token_entropy",
        "experts/skew",
    ):
        assert [line[name] for line in ours] == [
            pytest.approx(line[name], rel=1e-10) for line in theirs
        ], name
    assert 0 < theirs[0]["experts/dropped_share"] < 1 and 0 < theirs[0]["experts/token_entropy"] < 1
    with pytest.raises(RankError, match=r"run.seed is 5, the file's 1234.*MW-EP-006"):
        train(pool, changed(second, run={"name": "third", "seed": 5}))


@pytest.mark.torture
def test_a_resumed_run_records_on(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    first = of_routing(corpus, tmp_path, "dp2,ep2", "first", routing="record")
    train(pool, first)
    train(pool, changed(first, train={"steps": 3}))
    assert len(list((run_directory(first.run) / "routing").iterdir())) == 3


def test_keys_that_contradict_each_other(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\ntrain = "none"\n')
    for key, said in (
        ("routing=replay", "needs train.routing_directory"),
        ("routing_directory=a", "has no effect"),
    ):
        with pytest.raises(ConfigError, match=said, check=has_code("MW-CONFIG-037")) as error:
            load(file, [f"--train.{key}"])
        assert "MW-CONFIG-078" in [problem.code for problem in error.value.problems]
    dense = of_layout(corpus, tmp_path, "dp1")
    options = {name: value for name, value in LLAMA.items() if name != "moe"}
    with pytest.raises(
        ConfigError, match="the model has no such router", check=has_code("MW-EP-008")
    ) as error:
        check(changed(dense, model={"options": options}, train={"routing": "record"}), 1)
    assert error.value.code == "MW-EP-008"
