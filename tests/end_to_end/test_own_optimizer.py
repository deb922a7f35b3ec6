"""An optimizer of the user whose state begins late, on every kind of shard:
in plain torch's numbers, and resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find, open_checkpoint
from meshwright.config import Optimizer
from meshwright.config.combinations.layout import parse_layout
from meshwright.errors import CheckpointError
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.run.directory import run_directory
from meshwright.run.tensors import OWN_OPTIMIZER, take_states
from meshwright.verify.run import Verification
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import LATER, layout, run_config, tensors, train, train_rank
from tests.support.errors import has_code

KINDS = "tests.framework.optimizer.own_kinds"
PLAIN: dict[str, Any] = {
    "schedule": "constant",
    "warmup_steps": 0,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
}
MOMENTUM = {**PLAIN, "builder": f"{KINDS}:Momentum", "options": {"late": 2}}
AVERAGED = {**PLAIN, "builder": f"{KINDS}:Averaged", "options": {"late": 70}}
NADAM = {**PLAIN, "builder": "torch.optim:NAdam"}
FIRST, ALL = 4, 7
"""Steps before the change of the layout, and after it."""


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        (MOMENTUM, "dp2,zero1", "tp2"),
        (NADAM, "dp2,zero3", "dp2,zero2"),
        LATER(MOMENTUM, "tp2", "dp2,zero3"),
        LATER(MOMENTUM, "pp2", "dp4,zero2"),
        LATER(MOMENTUM, "dp2,zero0", "dp2,zero1,offload"),
        LATER(NADAM, "", "dp2,pp2,tp2"),
    ],
)
def test_a_resume_goes_on_with_all_of_the_state(
    optimizer: dict[str, Any], before: str, after: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    def settings(name: str, steps: int) -> dict[str, Any]:
        return {
            "run": {"name": name},
            "train": {"steps": steps, "dtype": "float64"},
            "optimizer": optimizer,
            "data": {"validation": None},
        }

    whole = run_config(corpus, tmp_path, parallel=layout(""), **settings("whole", ALL))
    train(pool, whole)
    train(pool, run_config(corpus, tmp_path, parallel=layout(before), **settings("parts", FIRST)))
    last = run_config(corpus, tmp_path, parallel=layout(after), **settings("parts", ALL))
    train(pool, last)
    expected, found = tensors(run_directory(whole.run)), tensors(run_directory(last.run))
    assert found.keys() == expected.keys()
    states = {name.partition("/")[0] for name in found} - {"weights"}
    assert states == ({"momentum"} if optimizer is MOMENTUM else {"exp_avg", "exp_avg_sq"})
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-15, name


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (MOMENTUM, "dp2,zero3"),
        (NADAM, "dp2,tp2,zero1"),
        LATER(MOMENTUM, "dp2,tp2,sequence"),
        LATER(MOMENTUM, "dp2,pp2,zero2"),
        LATER(MOMENTUM, "dp4,zero0"),
        LATER(MOMENTUM, "dp2,zero1,offload"),
        LATER({**MOMENTUM, "weight_decay": None}, "dp2,zero2"),
    ],
)
def test_every_layout_has_the_numbers_of_plain_torch(
    optimizer: dict[str, Any], words: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus, tmp_path, train={"dtype": "float64"}, optimizer=optimizer, parallel={"dp": 1}
    )
    proof = Verification(config, global_batch=8, steps=5, random_tokens=True)
    row = proof.compare_layout(parse_layout(words), pool, is_repeated=False)
    assert row.passed, (row.problems, row.failure)


def test_a_record_of_states_that_this_project_did_not_write_is_refused(
    corpus: Path, tmp_path: Path
) -> None:
    config = run_config(
        corpus, tmp_path, train={"steps": 3}, optimizer=MOMENTUM, parallel=layout("")
    )
    train_rank(0, 1, config)
    with open_checkpoint(find(run_directory(config.run))[0].path) as checkpoint:
        manifest = checkpoint.manifest
    assert manifest.state[OWN_OPTIMIZER] == {
        "tensors": ["momentum"],
        "numbers": {"step": ["int", 3]},
    }
    wrong = {"tensors": ["../momentum"], "numbers": {}}
    with pytest.raises(CheckpointError, check=has_code("MW-RUN-038")) as caught:
        take_states(
            FlatOptimizer([], Optimizer(**MOMENTUM)),
            manifest.model_copy(update={"state": {**manifest.state, OWN_OPTIMIZER: wrong}}),
        )
    assert "../momentum" in caught.value.message
