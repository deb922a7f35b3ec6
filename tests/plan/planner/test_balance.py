"""What ``meshwright stages`` tells of a configuration: layers, stages,
and each balance beside the others.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.pipeline.plan import layer_weights, partition
from meshwright_plan.planner.balance import cuts, describe, imbalance, rows, simulated_step

OPTIONS = {
    "hidden_size": 32,
    "num_layers": 6,
    "num_heads": 2,
    "max_sequence_length": 64,
    "dropout": 0.0,
}


def blueprint_of(
    vocab_size: int = 2048, pp: int = 3, tp: int = 1, dtype: str = "float32", **pipeline: Any
) -> Blueprint:
    """A GPT of six blocks whose head costs several of them,
    and whose embedding costs a part of one.
    """
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "meshwright_models.gpt2:build",
                "options": OPTIONS | {"vocab_size": vocab_size},
            },
            "data": {"train": "random", "sequence_length": 64},
            "batch": {"micro_batch_size": 2, "chunks": 4},
            "parallel": {"dp": 1, "pp": pp, "tp": tp},
            "pipeline": pipeline,
            "train": {"dtype": dtype},
        }
    )
    return draw_blueprint(resolve(config, pp * tp))


@pytest.fixture(scope="module")
def usual() -> Blueprint:
    return blueprint_of()


def test_imbalance_is_the_dearest_stage_over_the_mean() -> None:
    assert imbalance([1.0, 1.0, 4.0], [range(0, 2), range(2, 3)]) == 4 / 3
    assert imbalance([2.0, 2.0], [range(0, 1), range(1, 2)]) == 1.0
    assert imbalance([0.0, 0.0], [range(0, 1), range(1, 2)]) == 1.0


@pytest.mark.parametrize("balance", ["layers", "parameters", "time", [1, 2, 6]])
def test_the_chosen_balance_cuts_the_stages(balance: str | list[int]) -> None:
    blueprint = blueprint_of(balance=balance)
    (chosen,) = [cut for cut in cuts(blueprint) if cut.chosen]
    assert chosen.balance == str(balance) and chosen.stages == blueprint.stages
    if isinstance(balance, str):
        assert blueprint.stages == partition(layer_weights(blueprint.layer_costs, balance), 3)
        assert len(cuts(blueprint)) == 3
    else:
        assert [len(stage) for stage in blueprint.stages] == balance and len(cuts(blueprint)) == 4


def test_no_balance_is_more_even_in_time_than_time(usual: Blueprint) -> None:
    found = {cut.balance: cut.imbalance for cut in cuts(usual)}
    assert found["time"] == min(found.values()) < found["layers"]
    assert found["time"] < found["parameters"], "an embedding has many parameters and costs little"


def test_a_step_has_the_bubble_and_the_imbalance(usual: Blueprint) -> None:
    """Of one stage neither; of three and four micro-batches no less than 1F1B's (pp - 1)
    / chunks.
    """
    (alone,) = {cut.step for cut in cuts(blueprint_of(pp=1))}
    assert alone == pytest.approx(1.0)
    steps = {cut.balance: cut.step for cut in cuts(usual)}
    assert 1 + 2 / 4 <= steps["time"] < steps["layers"]
    assert simulated_step(usual, [range(0, 1), range(1, 2), range(2, 9)]) > 2.5


def test_head_and_loss_count_by_what_they_cost() -> None:
    """With a vocabulary of a few tokens the head is nothing;
    with many it is most of the last stage.
    """
    small, large = (
        [len(stage) for stage in blueprint_of(vocab_size).stages] for vocab_size in (16, 4096)
    )
    assert small == [3, 2, 4] and large[-1] == 1


def test_the_cut_is_of_whole_layers_whatever_tp(usual: Blueprint) -> None:
    split = blueprint_of(tp=2)
    assert split.layer_costs == usual.layer_costs and split.stages == usual.stages


@pytest.mark.long
def test_layers_are_counted_in_the_training_dtype() -> None:
    by_dtype = {
        dtype: blueprint_of(dtype=dtype).layer_costs[1].forward for dtype in ("float64", "bfloat16")
    }
    assert by_dtype["bfloat16"].bytes < by_dtype["float64"].bytes / 3
    assert by_dtype["bfloat16"].flops == by_dtype["float64"].flops


def test_neighbours_that_are_alike_share_a_line() -> None:
    found = rows(blueprint_of(balance=[2, 2, 5]))
    assert [(row.name, row.num_layers, row.stage) for row in found] == [
        ("embedding", 1, 0),
        ("block0", 1, 0),
        ("block1..block2", 2, 1),
        ("block3..block5", 3, 2),
        ("norm", 1, 2),
        ("head", 1, 2),
    ]


def test_the_text() -> None:
    blueprint = blueprint_of(balance=[2, 2, 5])
    lines = describe(blueprint).splitlines()
    assert (
        lines[0]
        == f"model  meshwright_models.gpt2:build, 9 layers, {blueprint.num_parameters:,} parameters"
    )
    assert "as on a CPU core in float32, 0.08 TFLOP/s and 20 GB/s" in lines[2]
    (head,) = [line.split() for line in lines if line.startswith("head ")]
    assert head[:2] == ["head", f"{32 * 2048:,}"] and head[-1] == "2"
    shares = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in lines[13:16]}
    assert list(shares) == ["0", "1", "2"] and sum(shares.values()) == pytest.approx(100, abs=0.02)
    costs = [cost.time_s for cost in blueprint.layer_costs]
    assert shares["1"] == pytest.approx(100 * sum(costs[2:4]) / sum(costs), abs=0.01)
    assert lines[13].split()[1:4] == [
        "embedding..block0",
        "(2)",
        f"{2048 * 32 + 64 * 32 + 12 * 32**2 + 13 * 32:,}",
    ]
    assert [line.split()[0] for line in lines[-5:-1]] == ["layers", "parameters", "time", "[2,"]
    assert "(chosen)" in lines[-2] and lines[-2].endswith("2 stages of 2, 5")
    assert sum("(chosen)" in line for line in lines) == 1
    assert lines[-1].startswith("step: simulated, of 1f1b with 4 micro-batches")
    assert max(map(len, lines)) <= 110
